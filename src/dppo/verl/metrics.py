"""What a step logs: `dppo/*` under the names that they have in TRL.

verl's statistics of scores, advantages and lengths are of all completions, for a step hands all of
them over. Those of the update are of survivors, who are chosen, and move to `dppo/kept/*`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dppo.estimator.diagnostics import StepTimes
from dppo.pruner import Pruner
from dppo.verl.plan import Plan, Rollouts, metrics_of

TRAINING = ("old_log_prob", "ref", "adv", "update_actor")
"""verl's timers of what pruning shortens."""

OF_SURVIVORS = ("loss", "pg_clipfrac", "ppo_kl", "entropy")
"""In verl's names: means over the survivors of a mini-batch, or of a micro-batch."""


class StepMetrics:
    """Of one step after the other."""

    def __init__(self) -> None:
        self._pruned, self._times = 0.0, StepTimes()
        self._last: dict[str, float] = {}

    @contextmanager
    def pruning(self) -> Iterator[None]:
        """Count the seconds of this block as pruning."""
        began = time.perf_counter()
        yield
        self._pruned = time.perf_counter() - began

    def decided(
        self,
        metrics: dict[str, Any],
        pruner: Pruner,
        plan: Plan,
        rollouts: Rollouts,
        *,
        rate: float | None,
    ) -> None:
        """A step was decided on."""
        self._last = pruner.metrics()
        found = {**self._last, **metrics_of(plan, rollouts)}
        if rate is not None:
            found["auto/rate"] = rate
        metrics.update({f"dppo/{name}": value for name, value in found.items()})

    def phases(self, timing_raw: dict[str, float]) -> dict[str, float]:
        """Seconds of a step."""
        return {
            "rollout": timing_raw.get("gen", 0.0),
            "score": timing_raw.get("reward", 0.0),
            "prune": self._pruned,
            "train": sum(timing_raw.get(name, 0.0) for name in TRAINING),
        }

    def times(self, metrics: dict[str, Any], timing_raw: dict[str, float], *, shadow: bool) -> None:
        """A step is over; in shadow mode it trained on everything."""
        spent = self.phases(timing_raw)
        metrics.update({f"dppo/time/{phase}": seconds for phase, seconds in spent.items()})
        kept = self._last["cost/keep"]
        self._times.add(
            fixed=spent["rollout"] + spent["score"],
            train=spent["train"],
            kept=1.0 if shadow else kept,
        )
        if "variance/inflation" in self._last:
            found = self._times.efficiency(self._last["variance/inflation"], kept)
            if found is not None:
                metrics["dppo/efficiency/predicted"] = found
        if "actor/entropy" in metrics and not shadow:  # of the old log-probs' pass
            metrics["dppo/kept/entropy"] = metrics.pop("actor/entropy")

    def updated(self, metrics: dict[str, Any], found: dict[str, Any]) -> None:
        """The actor was updated; verl tells of the rows that it was given."""
        for name, value in found.items():
            last = name.rsplit("/", 1)[-1]
            kept = any(part in last for part in OF_SURVIVORS)
            metrics[f"dppo/kept/{last}" if kept else name] = value
