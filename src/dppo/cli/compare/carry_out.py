"""Carries out what of a comparison has not been carried out yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dppo.cli.compare import Plan
from dppo.cli.compare.rounds import Workers
from dppo.cli.compare.trainers import settings
from dppo.cli.progress import ProgressReporter
from dppo.errors import ConfigurationError


def carry_out(plan: Plan) -> tuple[list[str], bool]:
    """Run every round, and print the settings of every method first.

    Args:
        plan: What to run.

    Returns:
        The runs that failed, as METHOD/seed-N; and whether there were any to do.

    Raises:
        ConfigurationError: The folder holds a run with other settings.
    """
    todo = {
        seed: {name: job for name, job in jobs.items() if not _is_done(job)}
        for seed, jobs in plan.jobs.items()
    }
    first = next(iter(plan.jobs.values()))
    for method in plan.methods:
        print(f"{method.name}: {method.text}")
        print(f"    {_readable(settings(first[method.name]))}")
    runs = sum(len(jobs) for jobs in plan.jobs.values())
    left = sum(len(jobs) for jobs in todo.values())
    print(f"{runs} runs, {left} of them to do; results in {plan.folder}", flush=True)
    return (_rounds(plan, todo, plan.total // runs * left) if left else []), left > 0


def _rounds(plan: Plan, todo: dict[int, dict[str, Any]], total: int) -> list[str]:
    failed: list[str] = []
    where = {"seed": 0, "method": "start"}
    done = 0

    def advance(method: str) -> None:
        nonlocal done
        done += 1
        where["method"] = method
        reporter.advance(done)

    names = [method.name for method in plan.methods]
    reporter = ProgressReporter(phase=lambda: f"seed {where['seed']}, {where['method']}")
    with reporter, Workers(names, plan.folder) as workers:
        reporter.start_stage("step of all runs", total=total)
        for seed, jobs in todo.items():
            where["seed"] = seed
            errors = workers.run_round(jobs, advance=advance)
            for name, error in errors.items():
                failed.append(f"{name}/seed-{seed}")
                print(f"\n{failed[-1]} failed: {error.strip().splitlines()[-1]}", flush=True)
    return failed


def _is_done(job: dict[str, Any]) -> bool:
    path = Path(job["folder"]) / "summary.json"
    if not path.is_file():
        return False
    saved = json.loads(path.read_text(encoding="utf-8"))["job"]
    now = json.loads(json.dumps(job, default=str))
    changed = sorted(key for key in now if saved.get(key) != now[key] and key != "folder")
    if changed:
        raise ConfigurationError(
            f"{path.parent} holds a run with other settings ({', '.join(changed)} differ); give "
            "another --output-dir, or remove it"
        )
    return True


def _readable(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(values.items()))
