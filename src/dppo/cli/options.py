"""Reads the flags and the YAML file of a command into one checked, typed mapping.

A flag wins over the file. Every unknown key and every wrong type, in either, is reported at once,
with the nearest valid name, before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.cli.convert import convert, takes_flag_alone, takes_several
from dppo.cli.fields import (
    PLAN_OPTIONS,
    RUN_OPTIONS,
    Field,
    FieldTable,
    config_fields,
    is_misspelling,
    nearest_name,
)
from dppo.cli.yaml_file import read_yaml
from dppo.errors import ConfigurationError

_WORDS = ("reward", "methods")
"""Lists of words, also when there is one; repeatable."""
_CONFIG = Field("config", "str", None, "a YAML file with any of these options; flags win over it")


@dataclass(frozen=True)
class Settings:
    """What the user asked for, typed; nothing that was left at its default.

    Attributes:
        config: Fields of `DPPOConfig`.
        run: The command's own options.
        notes: Lines to print: what could not be checked.
    """

    config: dict[str, Any]
    run: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Given:
    """One option as given, with the place to name in a message."""

    key: str
    value: Any
    place: str

    @property
    def name(self) -> str:
        return self.key.lstrip("-").replace("-", "_")


def read_settings(arguments: Sequence[str], *, run_options: Mapping[str, Field]) -> Settings:
    """Reads a command's arguments and the file that they name.

    Args:
        arguments: The words after the command's name.
        run_options: The command's own options, next to those of `DPPOConfig`.

    Returns:
        The typed settings.

    Raises:
        ConfigurationError: For a broken file, or with one line for each key that is unknown or
            whose value has the wrong type.
    """
    table = config_fields()
    known = {**table.fields, **run_options, "config": _CONFIG}
    flags, problems = _read_flags(arguments, known)
    paths = [given.value for given in flags if given.name == "config"]
    given = _read_file(str(paths[-1]), problems) if paths else []
    given += [flag for flag in flags if flag.name != "config"]

    typed, notes = _typed(given, known, table, problems)
    if problems:
        raise ConfigurationError("\n".join(problems))
    return Settings(
        config={name: value for name, value in typed.items() if name not in run_options},
        run={name: value for name, value in typed.items() if name in run_options},
        notes=tuple(notes),
    )


def _read_file(path: str, problems: list[str]) -> list[_Given]:
    given = [_Given(str(key), value, path) for key, value in read_yaml(Path(path)).items()]
    seen: dict[str, str] = {}
    for item in given:
        if item.name in seen:
            problems.append(f"{path}: {item.key} and {seen[item.name]} are the same option")
        seen[item.name] = item.key
    return given


def _typed(
    given: Sequence[_Given],
    known: Mapping[str, Field],
    table: FieldTable,
    problems: list[str],
) -> tuple[dict[str, Any], list[str]]:
    typed: dict[str, Any] = {}
    notes = []
    for item in given:
        field = known.get(item.name)
        if field is not None:
            try:
                typed[item.name] = convert(field, item.value)
            except ConfigurationError as error:
                problems.append(f"{item.place}: {error}")
            continue
        near = nearest_name(item.name, sorted(known))
        # A valid option of a package that is not here must not be taken for a misspelling.
        if table.missing and not is_misspelling(item.name, near):
            notes.append(f"{item.key} not checked: {', '.join(table.missing)} not installed")
            continue
        problems.append(_unknown(item, near))
    return typed, notes


def _unknown(item: _Given, near: str | None) -> str:
    if item.name in {**RUN_OPTIONS, **PLAN_OPTIONS}:
        return f"{item.place}: {item.key} is an option of `dppo plan` only"
    hint = f"did you mean {near}?" if near else "no option has a similar name"
    return f"{item.place}: unknown option {item.key}; {hint}"


def _read_flags(
    arguments: Sequence[str], known: Mapping[str, Field]
) -> tuple[list[_Given], list[str]]:
    """Splits the words into options; the value of an unknown one is skipped with it."""
    words, given, problems = list(arguments), [], []
    lists: dict[str, list[Any]] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(f"command line: unexpected argument {word!r}; options start with --")
            continue
        key, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        name = key.replace("-", "_")
        field = known.get(name)
        negated = known.get(name.removeprefix("no_")) if name.startswith("no_") else None
        if field is None and negated is not None and takes_flag_alone(negated) and not equals:
            given.append(_Given(negated.name, False, "command line"))
            continue
        while not equals and words and not words[0].startswith("--"):
            values.append(words.pop(0))
            if field is not None and not takes_several(field):
                break
        value = _flag_value(key, values, field, problems)
        if field is not None and name in _WORDS and isinstance(value, list):
            lists.setdefault(name, []).extend(value)
            value = lists[name]
        given.append(_Given(f"--{key}", value, "command line"))
    return given, problems


def _flag_value(key: str, values: list[str], field: Field | None, problems: list[str]) -> Any:
    if field is None:
        return None
    if not values:
        if not takes_flag_alone(field):
            problems.append(f"command line: --{key} needs a value ({field.annotation})")
            return field.default
        return True
    if takes_several(field) and (len(values) > 1 or field.name in _WORDS):
        return values
    return values[0]
