"""Seconds of optimizer steps, from what a record says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PHASES = ("rollout", "score", "prune", "train")
TIMES = tuple(f"dppo/time/{phase}" for phase in PHASES)
_TRAINING = ("reward", "loss", *TIMES)


@dataclass(frozen=True, eq=False)
class Clock:
    """Seconds of optimizer steps, evaluations and saves left out.

    Attributes:
        wall_S: Sums up to each record; None if a record says nothing about time.
        source: Names of the metrics that they are made of.
        cpu: Processor seconds of all steps; None if not every record has them.
        phases: Seconds of all steps by phase; empty if not recorded.
    """

    wall_S: NDArray[np.float64] | None
    source: tuple[str, ...]
    cpu: float | None
    phases: Mapping[str, float]


def measure_seconds(records: Sequence[Mapping[str, float]], *, origin: float) -> Clock:
    """Adds up the seconds.

    Args:
        records: In order of their steps.
        origin: The step before the first record.

    Returns:
        The seconds.
    """
    steps, wall, cpu, trained_to = [origin], [0.0], 0.0, origin
    phases = dict.fromkeys(PHASES, 0.0)
    sources: dict[str, None] = {}
    for record in records:
        trained = any(name in record for name in _TRAINING)
        if not trained and "step_seconds" not in record:
            continue  # an evaluation
        count = record["step"] - trained_to  # averages are over the steps since the last ones
        spent, source = _spent(record, count)
        if source is None:
            return Clock(None, (), None, {})
        sources[source] = None
        steps.append(record["step"])
        wall.append(wall[-1] + spent)
        cpu += record.get("step_cpu_seconds", np.nan)
        if trained:
            trained_to = record["step"]
            for phase, name in zip(PHASES, TIMES, strict=True):
                phases[phase] += count * record.get(name, np.nan)
    if not sources:
        return Clock(None, (), None, {})
    at_S = np.interp([record["step"] for record in records], steps, wall)
    known = {phase: seconds for phase, seconds in phases.items() if np.isfinite(seconds)}
    return Clock(at_S, tuple(sources), cpu if np.isfinite(cpu) else None, known)


def _spent(record: Mapping[str, float], count: float) -> tuple[float, str | None]:
    """Seconds since the record before, and where they come from."""
    if "step_seconds" in record:
        return record["step_seconds"], "step_seconds"
    if any(name in record for name in TIMES):
        return count * sum(record.get(name, 0.0) for name in TIMES), "dppo/time/*"
    if "step_time" in record:  # the host's own, without the optimizer
        return count * record["step_time"], "step_time"
    return 0.0, None
