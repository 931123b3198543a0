"""Options and versions of runs: which differ, and which all have alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dppo.report.read import RunData

_UNSET = ("null", "[]", "")
Table = list[tuple[str, list[str | None]]]


def compared_options(runs: Sequence[RunData]) -> tuple[Table, Table]:
    """Options that were not at their defaults, and versions.

    Args:
        runs: Those with a summary count; a run in progress has not said what it runs with.

    Returns:
        What differs, a cell for each run; and what is set alike in all, one cell.
    """
    found = [_options(run) for run in runs]
    names = dict.fromkeys(name for options in found for name in options)
    told = [options for options in found if options]
    differ: Table = []
    same: Table = []
    for name in names:
        if len({options.get(name) for options in told}) > 1:
            differ.append((name, [options.get(name) for options in found]))
        else:
            same.append((name, [told[0][name]]))
    return differ, same


def _options(run: RunData) -> dict[str, str]:
    config, versions = run.summary.get("config"), run.summary.get("versions")
    command = run.summary.get("command")
    found: dict[str, str] = {}
    if command:
        found["command"] = command if isinstance(command, str) else _plain(command)
    if isinstance(config, dict):
        found |= {str(name): _plain(value) for name, value in config.items()}
    if isinstance(versions, dict):
        found |= {f"version of {name}": str(value) for name, value in versions.items()}
    return {name: value for name, value in found.items() if value not in _UNSET}


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return json.dumps(value)
