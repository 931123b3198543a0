"""A run as arrays. Axes: `_S` the steps that have a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.report.derived import derived_columns
from dppo.report.difficulty import Solved, read_solved
from dppo.report.records import Record, find_metrics, number, read_records, read_summary
from dppo.report.seconds import Clock, measure_seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunData:
    """What the files of a run say.

    Attributes:
        name: As the page calls it.
        path: As the user gave it.
        steps_S: Steps that have a record.
        columns: Metrics by name, and what `derived` makes of them; NaN where a record lacks one.
        clock: Seconds since the start, or since the checkpoint that the run started from.
        max_steps: Where the run was going; None if no record says so.
        summary: Content of summary.json; empty if there is none.
        solved: How many prompts are solved how often, early and late; None without a recording.
        notes: What there is to say about the files.
    """

    name: str
    path: Path
    steps_S: Floats
    columns: Mapping[str, Floats]
    clock: Clock
    max_steps: int | None
    summary: Mapping[str, Any] = field(default_factory=dict)
    solved: Solved | None = None
    notes: tuple[str, ...] = ()

    def column(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values of a metric, where a record has it."""
        values_S = self.columns.get(name)
        if values_S is None:
            return np.empty(0), np.empty(0)
        there_S = np.isfinite(values_S)
        return self.steps_S[there_S], values_S[there_S]

    def has(self, name: str) -> bool:
        """Whether any record has a metric."""
        return self.column(name)[0].size > 0


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads runs and gives them names.

    Args:
        paths: Directories of runs, or their metrics.jsonl.

    Returns:
        The runs, in the same order, with different names.

    Raises:
        ConfigurationError: One does not exist, or has no metrics.jsonl.
    """
    runs = [_read_run(path) for path in paths]
    names = distinct_names([_identity(path) for path in paths])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _identity(path: Path) -> Path:
    """The folder that names a run; a file of another name than metrics.jsonl names itself."""
    whole = path.resolve()
    return whole.parent if whole.is_file() and whole.name == "metrics.jsonl" else whole


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of paths that tell them apart.

    Example:
        >>> distinct_names([Path("/a/seed0"), Path("/b/seed0"), Path("/b/other")])
        ['a/seed0', 'b/seed0', 'other']
    """
    names = [path.name or str(path) for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        names = [
            "/".join(path.parts[-depth:]).replace("//", "/") if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _read_run(path: Path) -> RunData:
    file = find_metrics(path)
    records, notes = read_records(file)
    summary: dict[str, Any] = {}
    solved: Solved | None = None
    if file.name == "metrics.jsonl":
        summary, more = read_summary(file.parent / "summary.json")
        solved, about_recording = read_solved(file.parent)
        notes += [*more, *about_recording]
    steps_S = np.array([record["step"] for record in records])
    clock = measure_seconds(records, origin=_origin(records, summary))
    columns = _columns(records)
    columns |= derived_columns(columns, summary)
    last = number(records[-1].get("max_steps")) if records else None
    goal = None if last is None else int(last)
    return RunData("", path, steps_S, columns, clock, goal, summary, solved, tuple(notes))


def _origin(records: Sequence[Record], summary: Mapping[str, Any]) -> float:
    """The step before the first record: that of the checkpoint, if the records begin there."""
    resumed = number(summary.get("resumed_from_step")) or 0.0
    return resumed if records and resumed < records[0]["step"] else 0.0


def _columns(records: Sequence[Record]) -> dict[str, Floats]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: np.array([r.get(name, np.nan) for r in records], np.float64) for name in names}
