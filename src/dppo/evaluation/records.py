"""Records of an evaluation: JSON lines, written as they come, that a stopped run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dppo.errors import ConfigurationError

GREEDY, SAMPLED = "greedy", "sampled"


class RecordFile:
    """The records of one model on one benchmark.

    Attributes:
        records: By mode and item. One with an "error" does not count as done, and a later
            record takes its place.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there; drops a last line that a killed run left half written.

        Raises:
            ConfigurationError: Another line cannot be read.
        """
        self._path = path
        self.records: dict[tuple[str, int], dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                self.records[record["mode"], record["item"]] = record
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}, is not a record of an evaluation ({error}); remove "
                    "the line, or give another --output-dir"
                ) from error

    def is_done(self, mode: str, item: int, *, prompt: Any) -> bool:
        """Whether an item need not be generated again.

        Args:
            mode: GREEDY or SAMPLED.
            item: Its number.
            prompt: As it is now.

        Raises:
            ConfigurationError: The record is of another prompt: the data have changed.
        """
        record = self.records.get((mode, item))
        if record is None or "error" in record:
            return False
        if record["prompt"] != prompt:
            raise ConfigurationError(
                f"{self._path}: item {item} has another prompt than the data set has now; give "
                "another --output-dir"
            )
        return True

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record, and holds it."""
        self.records[record["mode"], record["item"]] = record
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of an evaluation, or refuses others in the same directory.

    Args:
        folder: The output directory.
        settings: What the records depend on.

    Raises:
        ConfigurationError: Names what changed.
    """
    path, wanted = folder / "settings.json", json.loads(json.dumps(settings))
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        changed = [
            f"{name} was {before.get(name)!r}, is {value!r}"
            for name, value in wanted.items()
            if before.get(name) != value
        ]
        if changed:
            raise ConfigurationError(
                f"{folder} holds an evaluation with other settings: {'; '.join(changed)}. Give "
                "another --output-dir"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
