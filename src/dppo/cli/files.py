"""The files that a run writes: metrics.jsonl and summary.json, strict JSON without NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """One JSON object per log call."""

    def __init__(self, path: Path, *, keep_until: int | None):
        """Prepares the file.

        Args:
            path: Where it is; its directory is created.
            keep_until: The step of the checkpoint that a run resumes from: records up to it stay.
                None starts anew.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if keep_until is not None and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= keep_until]
        path.write_text("".join(kept), encoding="utf-8")

    def write(self, *, step: int, max_steps: int, logs: Mapping[str, Any]) -> None:
        """Appends one record: the logs without values that are not finite."""
        record = {"step": step, "max_steps": max_steps, **finite(logs)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False, default=float) + "\n")


def _step(line: str) -> float:
    """The step of a record; infinite for a line that a killed run left half written."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out values that are NaN or infinite: JSON has no word for them.

    Example:
        >>> finite({"a": 1.0, "b": float("nan")})
        {'a': 1.0}
    """
    return {
        key: value
        for key, value in values.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a readable JSON file; what JSON cannot hold is written as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(content), indent=2, allow_nan=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Replaces numbers that are not finite by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
