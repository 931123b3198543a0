"""Reads metrics.jsonl and summary.json as a run leaves them, finished, running or killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dppo.errors import ConfigurationError

Record = dict[str, float]
SPENT = ("step_seconds", "step_cpu_seconds")
"""Sums since the record before, where everything else is an average."""


def find_metrics(path: Path) -> Path:
    """The file of records that the user means.

    Args:
        path: The directory of a run, or the file itself.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is none.
    """
    if not path.exists():
        raise ConfigurationError(
            f"run {path} does not exist; give the output_dir of `dppo train`, or its metrics.jsonl"
        )
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"run {path} has no metrics.jsonl; give the output_dir of `dppo train`, which writes "
            "one from the start of training"
        )
    return file


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """The records, one for each step that has any.

    Args:
        path: A metrics.jsonl.

    Returns:
        The records in order of their steps, and what there is to say about the file.

    Raises:
        ConfigurationError: It cannot be read as text.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; give another run") from error
    parsed = [_record(line) for line in lines if line.strip()]
    broken = sum(record is None for record in parsed)
    notes = []
    if broken and parsed[-1] is None:
        notes.append("the last line of metrics.jsonl is half written and left out")
        broken -= 1
    if broken:
        notes.append(f"{broken} unreadable lines of metrics.jsonl are left out")
    records, stepped_back = _merged(record for record in parsed if record is not None)
    if stepped_back:
        notes.append("metrics.jsonl steps back, as after a resume: what was repeated counts once")
    if not records:
        notes.append("no records yet")
    return records, notes


def read_summary(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a run said at its end.

    Args:
        path: A summary.json.

    Returns:
        Its content, empty if there is none, and what there is to say about it.
    """
    if not path.is_file():
        return {}, ["no summary.json: the run is in progress, or was killed"]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        return {}, ["summary.json cannot be read and is left out"]
    return content, []


def _record(line: str) -> Record | None:
    """The finite numbers of a line; None if it is no record."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    if not isinstance(content, dict) or number(content.get("step")) is None:
        return None
    found = {name: number(value) for name, value in content.items()}
    return {name: value for name, value in found.items() if value is not None}


def number(value: Any) -> float | None:
    """A finite number as it is, anything else as None.

    Example:
        >>> number(2), number("2"), number(True), number(float("nan"))
        (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _merged(records: Iterable[Record]) -> tuple[list[Record], bool]:
    """One record a step: evaluations and the end of a run log at steps that have one already."""
    merged: list[Record] = []
    stepped_back = False
    for record in records:
        while merged and merged[-1]["step"] > record["step"]:
            merged.pop()
            stepped_back = True
        if merged and merged[-1]["step"] == record["step"]:
            merged[-1] = _together(merged[-1], record)
        else:
            merged.append(record)
    return merged, stepped_back


def _together(first: Mapping[str, float], second: Mapping[str, float]) -> Record:
    spent = {
        name: first.get(name, 0.0) + second.get(name, 0.0)
        for name in SPENT
        if name in first or name in second
    }
    return {**first, **second, **spent}
