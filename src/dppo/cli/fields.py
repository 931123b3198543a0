"""The options of a run, read from the sources of the config classes without importing them.

Importing TRL takes seconds and needs torch; a misspelt key should not. The dataclass fields of
`TrainingArguments`, TRL's base config, `GRPOConfig` and `DPPOConfig` are annotated assignments, so
their names, types, defaults and help texts can be read with `ast`.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dppo.cli.arithmetic import BatchSettings

_SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("dppo", "trl/config.py", "DPPOConfig"),
)
_USUAL_WORDS = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "group_size": "num_generations",
    "steps": "max_steps",
    "prune_rate": "completion_prune_rate",
    "keep": "completion_keep",
}
UNKNOWN_DEFAULT = "(computed)"


@dataclass(frozen=True)
class Field:
    """One option: its name, its annotation as written, its default and its help text."""

    name: str
    annotation: str
    default: Any = None
    help: str = ""


@dataclass(frozen=True)
class FieldTable:
    """The known config fields.

    Attributes:
        fields: By name.
        missing: The packages whose fields are not in the table because they are not installed.
    """

    fields: dict[str, Field]
    missing: tuple[str, ...] = ()


RUN_OPTIONS = {
    field.name: field
    for field in (
        Field(
            "model", "str", "builtin", "a model's directory or hub name, builtin or smollm2-135m"
        ),
        Field(
            "dataset",
            "str",
            "builtin",
            "a .parquet, .json, .jsonl or .csv file, a hub name, gsm8k, math, "
            "reasoning-gym:TASK, or builtin",
        ),
        Field("reward", "list[str]", None, "a reward function, module:function; repeatable"),
        Field("prompt_column", "str", "prompt", "the column that holds the prompts"),
        Field("answer_column", "str | None", None, "the column to pass to rewards as answer"),
        Field("data_dir", "str | None", None, "local copies of gsm8k and math; see docs/data.md"),
        Field("system_prompt", "str | None", None, "the system message of a conversation"),
        Field("chat", "bool | None", None, "prompts as conversations; of gsm8k and math they are"),
        Field("num_prompts", "int | None", None, "how many prompts there are to train on"),
        Field("eval_prompts", "int", 512, "held-out prompts of the two evaluations; 0: none"),
    )
}
PLAN_OPTIONS = {
    field.name: field
    for field in (
        Field("num_processes", "int", 1, "how many processes (devices) train together"),
        Field("accelerate_config", "str | None", None, "take num_processes from accelerate's file"),
        Field("solve_rate", "float | None", None, "how often one completion is right, 0 to 1"),
        Field("json", "bool", False, "print JSON instead of a table"),
    )
}


@lru_cache(maxsize=1)
def config_fields() -> FieldTable:
    """Reads every field of `DPPOConfig`, its base classes' included.

    Returns:
        The fields, later classes overriding earlier ones. Where TRL or transformers is not
        installed, the fields of the batch arithmetic stand in for theirs.
    """
    table = {field.name: field for field in _arithmetic_fields()}
    missing = []
    for package, file, class_name in _SOURCES:
        path = _source(package, file)
        if path is None and package != "dppo":
            missing.append(package)
        if path is not None:
            table.update((field.name, field) for field in read_fields(path, class_name))
    return FieldTable(table, tuple(dict.fromkeys(missing)))


def read_fields(path: Path, class_name: str) -> list[Field]:
    """Reads the dataclass fields that the body of one class declares.

    Args:
        path: The Python file.
        class_name: A class at its top level.

    Returns:
        The fields in order, without private ones, class variables and fields not in `__init__`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    found = []
    for node in bodies[0] if bodies else []:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            options = _field_call(node.value)
            hidden = node.target.id.startswith("_") or "ClassVar" in annotation
            if not hidden and _literal(options.get("init"), True) is not False:
                found.append(_declared(node, annotation, options))
    return found


def nearest_name(name: str, names: list[str]) -> str | None:
    """The valid name that a misspelt one most likely means.

    Example:
        >>> nearest_name("num_epochs", ["num_train_epochs", "num_generations"])
        'num_train_epochs'
    """
    usual = _USUAL_WORDS.get(name)
    if usual in names:
        return usual
    best = max(names, key=lambda candidate: _similarity(name, candidate), default=None)
    return best if best is not None and _similarity(name, best) >= 0.5 else None


def is_misspelling(name: str, near: str | None) -> bool:
    """Whether a name is so close to a valid one that it can hardly be another.

    Example:
        >>> is_misspelling("num_generation", "num_generations")
        True
        >>> is_misspelling("learning_rate", "solve_rate")
        False
    """
    return near is not None and difflib.SequenceMatcher(None, name, near).ratio() >= 0.85


def _similarity(name: str, candidate: str) -> float:
    """How alike two names are; one that is like a part of the other counts nearly as much."""
    words, count = candidate.split("_"), name.count("_") + 1
    parts = ["_".join(words[i : i + count]) for i in range(len(words) - count + 1)]
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    return max([whole, *(0.9 * difflib.SequenceMatcher(None, name, p).ratio() for p in parts)])


def _source(package: str, file: str) -> Path | None:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    return None


def _field_call(value: ast.expr | None) -> dict[str, ast.expr]:
    """The keyword arguments of `field(...)`, or a plain default as if given that way."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", None) == "field":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
    return {} if value is None else {"default": value}


def _declared(node: ast.AnnAssign, annotation: str, options: dict[str, ast.expr]) -> Field:
    metadata = options.get("metadata")
    text = ""
    if isinstance(metadata, ast.Dict):
        pairs = zip(metadata.keys, metadata.values, strict=True)
        texts = [_literal(v, "") for k, v in pairs if k is not None and _literal(k, "") == "help"]
        text = " ".join(str(texts[0]).replace("%%", "%").split()) if texts else ""
    name = node.target.id if isinstance(node.target, ast.Name) else ""
    return Field(name, annotation, _literal(options.get("default"), UNKNOWN_DEFAULT), text)


def _literal(node: ast.expr | None, otherwise: Any) -> Any:
    if node is None:
        return otherwise
    try:
        return ast.literal_eval(node)
    except ValueError:
        return otherwise


def _arithmetic_fields() -> list[Field]:
    known = [
        Field(field.name, str(field.type), field.default)
        for field in fields(BatchSettings)
        if field.name != "num_processes"
    ]
    keep = Field("completion_keep", "float | str | None", "auto")
    return [*known, keep, Field("completion_rule", "str", "proportional")]
