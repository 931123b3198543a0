"""`completion_keep="auto"`: what the controller is told of a run, and its rates read again.

Times are those since the previous decision: the training of the generation before, and the rollout
and rewards of this one; the largest of any rank. With `auto_cost="tokens"` a generated token costs
what a trained one costs, so that rates follow from the rollouts alone.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo.errors import ConfigurationError
from dppo.estimator.keep_rate import GRID, KeepRate
from dppo.pruner import Pruner
from dppo.trl.clock import PhaseClock
from dppo.trl.decision import Rows

LOGGED = "dppo/auto/rate"
"""Metric that holds the rate, and is read to replay it."""


class AutoKeep:
    """The rate of each optimizer step.

    Args:
        args: A `DPPOConfig` with `completion_keep="auto"`.
        clock: Of the run.
    """

    def __init__(self, args: Any, clock: PhaseClock) -> None:
        self.controller = KeepRate()
        self._clock, self._by_tokens = clock, args.auto_cost == "tokens"
        self._passes = args.num_iterations
        self._before: dict[str, float] | None = None
        path = args.completion_keep_replay
        self._replayed = None if path is None else replayed_rates(path)
        self._source = path

    def begin(self) -> None:
        """Training begins, or goes on: what the clock has counted before is another run's."""
        self._before = None

    def at(self, step: int) -> float:
        """The rate of an optimizer step, counted from 0.

        Raises:
            ConfigurationError: It is replayed, and the recorded run has none for this step.
        """
        if self._replayed is None:
            return self.controller.at(step)
        if step not in self._replayed:
            raise ConfigurationError(
                f"completion_keep_replay={self._source} has no {LOGGED} for optimizer step {step}; "
                f"it has {len(self._replayed)}, up to step {max(self._replayed)}. Its run must "
                "have the same batch settings and logging_steps=1"
            )
        return self._replayed[step]

    def measure(self, rows: Rows, pruner: Pruner, accelerator: Any) -> None:
        """A generation is rolled out, and the one before it trained on.

        Args:
            rows: Of this generation.
            pruner: It still tells of the generation before.
            accelerator: To take the largest times of all ranks.
        """
        if self._by_tokens:
            generated = float(rows.completion_tokens.sum())
            computed = generated + float(rows.prompt_tokens.sum())
            self.controller.measure(fixed=generated, train=computed * self._passes, kept_cost=1.0)
            return
        self._clock.enter(self._clock.phase)  # brings its seconds up to date
        now, before = dict(self._clock.seconds), self._before
        self._before = now
        kept_cost = pruner.metrics().get("cost/keep", 0.0)
        spent = {name: now[name] - (before or now)[name] for name in now}
        fixed = spent["rollout"] + spent["score"] + spent["prune"]
        mine = torch.tensor([[fixed, spent["train"]]], device=accelerator.device)
        fixed, train = accelerator.gather(mine).float().cpu().numpy().max(axis=0).tolist()
        if before is not None:
            self.controller.measure(fixed=fixed, train=train, kept_cost=kept_cost)

    def remember(self, pruner: Pruner) -> None:
        """A generation was decided on."""
        variance_R, cost_R = pruner.prospects(GRID)
        self.controller.remember(variance_R=variance_R, cost_R=cost_R)

    def metrics(self, rate: float) -> dict[str, float]:
        """The rate, and why.

        Args:
            rate: Of the latest generation; 1 while pruning is annealed.
        """
        values = {"rate": rate}
        share, efficiency_R = self.controller.rollout_share, self.controller.efficiency_R()
        if share is not None:
            values["fixed_share"] = share
        if efficiency_R is not None:
            values["best"] = GRID[int(efficiency_R.argmax())]
            values["gain"] = float(efficiency_R.max())
        return values


def replayed_rates(path: str | Path) -> dict[int, float]:
    """The rates of a recorded run, by optimizer step.

    Args:
        path: The `metrics.jsonl` of `dppo train`, or a `trainer_state.json` of a checkpoint.

    Raises:
        ConfigurationError: It cannot be read, holds no rates, or means of several.
    """
    try:
        text = Path(path).read_text()
        if str(path).endswith(".jsonl"):
            logs = [json.loads(line) for line in text.splitlines()]
        else:
            logs = json.loads(text)["log_history"]
        rates = {int(log["step"]) - 1: float(log[LOGGED]) for log in logs if LOGGED in log}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"completion_keep_replay={path} cannot be read ({error}); give the metrics.jsonl of "
            "dppo train, or the trainer_state.json of a checkpoint"
        ) from error
    if not rates:
        raise ConfigurationError(
            f"completion_keep_replay={path} holds no {LOGGED}: its run had a fixed completion_keep"
        )
    between = {step: rate for step, rate in rates.items() if not np.isclose(GRID, rate).any()}
    if between:
        step, rate = min(between.items())
        raise ConfigurationError(
            f"completion_keep_replay={path}: {rate:.4g} at step {step} is a mean of several rates; "
            "the run to be replayed must have logging_steps=1"
        )
    return {step: GRID[int(np.abs(np.array(GRID) - rate).argmin())] for step, rate in rates.items()}
