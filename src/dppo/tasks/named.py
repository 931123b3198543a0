r"""Mathematics data sets by name, from the hub or from a local copy.

Every row is a `prompt` and an `answer`, both text: the problem, and the gold answer alone. GSM8K's
gold is what follows its last "####", MATH's the last ``\boxed`` of its solution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigurationError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

MATH_REWARD = "dppo.rewards:math_reward"
MATH_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
_SUBJECTS += ("number_theory", "prealgebra", "precalculus")
_ENDINGS = {".parquet": "parquet", ".jsonl": "json"}


@dataclass(frozen=True)
class NamedSet:
    """Where a data set is and how it is read.

    Attributes:
        hub: Its name on the hub.
        prompt: The hub's column with the problem.
        gold: The hub's column with the gold answer, or with the text that holds it.
        extract: Takes the gold answer out of that text.
        configurations: Of the hub; several are laid end to end.
        train: The hub's split to train on; None for a benchmark.
        test: The hub's split to evaluate on.
        held_out: The set that the held-out prompts of a training come from.
    """

    hub: str
    prompt: str = "problem"
    gold: str = "answer"
    extract: Callable[[str], str] = str.strip
    configurations: tuple[str | None, ...] = (None,)
    train: str | None = None
    test: str = "test"
    held_out: str = ""


def after_hashes(text: str) -> str:
    """What follows the last "####", without thousands separators; all of a text without any.

    Example:
        >>> after_hashes("2 + 2 = 4 #### 1,004")
        '1004'
    """
    return text.rpartition("####")[2].strip().replace(",", "")


def last_boxed(text: str) -> str:
    r"""What the last ``\boxed`` of a text holds; empty without any.

    Example:
        >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    _, found, rest = text.rpartition("\\boxed" if "\\boxed" in text else "\\fbox")
    rest = rest.lstrip()
    if not found or not rest.startswith("{"):  # "\boxed 5", as MATH has it a few times
        return rest.split("$")[0].strip() if found else ""
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index].strip()
    return ""


NAMED = {
    "gsm8k": NamedSet(
        "openai/gsm8k", "question", extract=after_hashes, configurations=("main",), train="train"
    ),
    "math": NamedSet(
        "EleutherAI/hendrycks_math",
        gold="solution",
        extract=last_boxed,
        configurations=_SUBJECTS,
        train="train",
        held_out="math500",  # the usual 500 problems of the test split
    ),
    "math500": NamedSet("HuggingFaceH4/MATH-500"),
    "aime24": NamedSet("HuggingFaceH4/aime_2024", test="train"),
    "amc23": NamedSet("math-ai/amc23", "question"),
    "minerva_math": NamedSet("math-ai/minervamath", "question"),
    "olympiadbench": NamedSet(
        "Hothan/OlympiadBench",
        "question",
        "final_answer",
        configurations=("OE_TO_maths_en_COMP",),
        test="train",
    ),
}


def is_named(name: str) -> bool:
    """Whether a data set is one of the table."""
    return name in NAMED


def load_named(name: str, *, split: str, data_dir: str | None = None) -> Dataset:
    """Loads a data set of the table.

    Args:
        name: A key of `NAMED`.
        split: "train", "test" or "held_out": the test split of what a training is held against.
        data_dir: A directory with local copies; the hub by default.

    Returns:
        Rows with `prompt` and `answer`.

    Raises:
        ConfigurationError: There is no such split, file or column.
    """
    known = NAMED[name]
    if split == "held_out":
        return load_named(known.held_out or name, split="test", data_dir=data_dir)
    if split == "train" and known.train is None:
        trainable = ", ".join(key for key, value in NAMED.items() if value.train)
        raise ConfigurationError(
            f"dataset: {name} is a benchmark, not to be trained on; of the data sets by name, "
            f"there are {trainable} to train on"
        )
    if data_dir is None:
        return _rows(name, _from_hub(known, split), known)
    path = _local_file(name, split, Path(data_dir).expanduser())
    return _rows(name, *_from_file(path, known))


def _from_hub(known: NamedSet, split: str) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset  # noqa: PLC0415 - importing dppo.tasks must stay cheap

    part = known.train if split == "train" else known.test
    for configuration in known.configurations:
        try:
            rows: Any = load_dataset(known.hub, configuration, split=part)
            yield from rows
        except (OSError, ValueError) as error:  # offline, or renamed there
            raise ConfigurationError(
                f"dataset: {known.hub} cannot be loaded from the hub: {error}. A local copy is "
                "read with --data-dir DIR"
            ) from error


def _local_file(name: str, split: str, folder: Path) -> Path:
    stems = [f"{name}_{split}"]
    if NAMED[name].train is None:  # one of two splits must not pass for the other
        stems.append(name)
    for stem in stems:
        for ending in _ENDINGS:
            path = folder / f"{stem}{ending}"
            if path.is_file():
                return path
    if not folder.is_dir():
        raise ConfigurationError(f"data_dir: there is no directory {folder}")
    there = sorted(path.name for path in folder.iterdir() if path.suffix in _ENDINGS)
    raise ConfigurationError(
        f"data_dir: {folder} has no {' or '.join(stems)} as .parquet or .jsonl; there are "
        f"{', '.join(there) or 'no such files'}"
    )


def _from_file(path: Path, known: NamedSet) -> tuple[Iterable[Mapping[str, Any]], NamedSet]:
    """The rows of a file, and how its own columns are read."""
    from datasets import load_dataset  # noqa: PLC0415 - importing dppo.tasks must stay cheap

    rows: Any = load_dataset(_ENDINGS[path.suffix], data_files=str(path), split="train")
    columns = rows.column_names
    prompt = next((c for c in ("problem", "question", known.prompt) if c in columns), None)
    gold = next((c for c in ("final", "answer", known.gold) if c in columns), None)
    if prompt is None or gold is None:
        raise ConfigurationError(
            f"data_dir: {path} needs a column problem or question, and answer or final; it has "
            f"{', '.join(columns)}"
        )
    whole = gold == "final" or (gold == "answer" and known.gold != "answer")
    return rows, replace(
        known, prompt=prompt, gold=gold, extract=str.strip if whole else known.extract
    )


def _rows(name: str, rows: Iterable[Mapping[str, Any]], known: NamedSet) -> Dataset:
    from datasets import Dataset  # noqa: PLC0415 - importing dppo.tasks must stay cheap

    prompts, answers = [], []
    for row in rows:
        if known.prompt not in row or known.gold not in row:
            raise ConfigurationError(
                f"dataset: {name} needs the columns {known.prompt} and {known.gold}; it has "
                f"{', '.join(row)}"
            )
        value = row[known.gold]
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        answer = "" if value is None else known.extract(text)
        prompts.append(str(row[known.prompt]))
        answers.append(answer)
    missing = answers.count("")
    if missing:
        logger.warning(
            "%d of %d rows of %s have no gold answer: their completions have no score",
            *(missing, len(answers), name),
        )
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
