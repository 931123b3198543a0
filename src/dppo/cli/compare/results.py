"""Writes and prints what a comparison says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dppo.cli.compare import Plan
from dppo.cli.compare.analysis import analyse
from dppo.cli.compare.curves import Run
from dppo.cli.compare.methods import BASELINE
from dppo.cli.compare.pictures import draw
from dppo.cli.compare.text import lines
from dppo.cli.compare.trainers import make_config, settings
from dppo.cli.files import write_json
from dppo.cli.origin import NAMES, origin
from dppo.errors import ConfigurationError


def report(plan: Plan, failed: list[str], *, command: str, ran: bool) -> None:
    """Analyse the runs there are; write comparison.json and pictures, print the table.

    Args:
        plan: The comparison.
        failed: Runs that failed.
        command: What was typed.
        ran: Whether there were runs; else commit, machine and versions are those of before.
    """
    runs: dict[str, dict[int, Run]] = {method.name: {} for method in plan.methods}
    for seed, jobs in plan.jobs.items():
        for name, job in jobs.items():
            folder = Path(job["folder"])
            if (folder / "summary.json").is_file():
                runs[name][seed] = Run.read(folder)
    if failed:
        print(f"failed: {', '.join(failed)}; error.txt in each folder says why")
    if not runs[BASELINE]:
        print(f"no run of {BASELINE} has ended, so there is nothing to compare with")
        return
    first = next(iter(plan.jobs.values()))
    packed = {
        m.name
        for m in plan.methods
        if getattr(make_config(first[m.name]), "packing", "none") != "none"
    }
    rows = analyse(runs, packed=packed)
    content = {
        "command": command,
        **_origin(plan.folder / "comparison.json", anew=ran),
        "seeds": sorted(plan.jobs),
        "failed": failed,
        "methods": {
            method.name: {"text": method.text, "settings": settings(first[method.name])}
            for method in plan.methods
        },
        "rows": rows,
    }
    write_json(plan.folder / "comparison.json", content)
    print("\n" + "\n".join(lines(rows)) + "\n")
    try:
        draw(rows, plan.folder)
    except ConfigurationError as error:
        print(f"no pictures: {error}")
    print(f"files    {plan.folder}")


def _origin(path: Path, *, anew: bool) -> dict[str, Any]:
    """Of what code and machine the runs are."""
    if not anew and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        return {name: before[name] for name in NAMES}
    return origin()
