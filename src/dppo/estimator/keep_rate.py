"""The keep rate, chosen while training: the one of a grid that promises most progress per second.

Of every generation it is known, for every rate of the grid, which variance v that rate would add
and which share c of the training cost it would keep (`Pruner.prospects`); the run measures the
seconds of what pruning cannot shorten and of training. So the predicted efficiency is

    e(r) = 1 / ((1 + v(r)) (fixed + train c(r)))

with v(r) at most 0.3. A rate is chosen before its rows are drawn, so it cannot bias the estimate.

Suffix: `_R` rates of the grid.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo._checks import Floats, finite
from dppo.errors import ConfigurationError, InvalidInputError

__all__ = ["GRID", "KeepRate"]

GRID = (1.0, 0.85, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
"""Rates to choose from. Neighbours differ by at most 30 % of the cost."""
START = 0.5
MOST_VARIANCE = 0.3
ENTRY_VARIANCE = 0.25
"""Below which a lower rate is tried; between the two it is kept, and does not come and go."""
LEAST_GAIN = 0.02
"""Predicted, below which the rate stays where it is; twice as much to turn back."""
REST = 5
"""Optimizer steps from one move to the next, at least."""
MEMORY = 20
"""Generations that are remembered. Times come as their median: of 20 that are off by a factor of up
to 2 it is off by about a tenth, which changes e between neighbours by less than `LEAST_GAIN`."""


@dataclass(frozen=True)
class Move:
    """A rate, from an optimizer step on."""

    step: int
    rate: float


class KeepRate:
    """Chooses the rate from what generations cost and promise; moves one notch at a time.

    Example:
        >>> from dppo.estimator.keep_rate import GRID, KeepRate
        >>> auto = KeepRate()
        >>> for step in range(30):
        ...     rate = auto.at(step)
        ...     auto.remember(variance_R=[0.0] * 8, cost_R=GRID)
        ...     auto.measure(fixed=1.0, train=3.0 * rate, kept_cost=rate)
        >>> auto.at(30)  # variance costs nothing here
        0.12
    """

    def __init__(self) -> None:
        self._variance: deque[Floats] = deque(maxlen=MEMORY)
        self._cost: deque[Floats] = deque(maxlen=MEMORY)
        self._fixed: deque[float] = deque(maxlen=MEMORY)
        self._train: deque[float] = deque(maxlen=MEMORY)
        self._moves = [Move(0, START)]
        self._looked_at = -1

    def at(self, step: int) -> float:
        """The rate of an optimizer step; the same however often it is asked for.

        Args:
            step: Of the optimizer, from 0; never one before the latest.
        """
        if step > self._looked_at:
            self._looked_at = step
            rate = self._next(step)
            if rate != self._moves[-1].rate:
                self._moves.append(Move(step, rate))
        return self._moves[-1].rate

    def remember(self, *, variance_R: Any, cost_R: Any) -> None:
        """What each rate of the grid would have done to a generation.

        Args:
            variance_R: Variance that it would add, relative, >= 0.
            cost_R: Share of the training cost that it would keep, in [0, 1].

        Raises:
            InvalidInputError: They are not as many as `GRID`, or not finite.
        """
        for name, values, memory in (
            ("variance_R", variance_R, self._variance),
            ("cost_R", cost_R, self._cost),
        ):
            checked = finite(name, values, ndim=1)
            if checked.shape != (len(GRID),):
                raise InvalidInputError(f"{name} must have {len(GRID)} values, got {checked.size}")
            memory.append(checked)

    def measure(self, *, fixed: float, train: float, kept_cost: float) -> None:
        """Seconds (or tokens) of a generation; nothing is learned of one that kept nothing.

        Args:
            fixed: What pruning completions cannot shorten.
            train: Training, with what was kept.
            kept_cost: Share of the training cost that was kept.
        """
        if kept_cost > 0 and fixed >= 0 and train > 0:
            self._fixed.append(float(fixed))
            self._train.append(float(train) / kept_cost)

    @property
    def rollout_share(self) -> float | None:
        """Share of an unpruned step that pruning completions cannot shorten; None: not known."""
        if not self._train:
            return None
        fixed, train = float(np.median(self._fixed)), float(np.median(self._train))
        return fixed / (fixed + train)

    def efficiency_R(self) -> Floats | None:
        """Predicted progress per second of each rate against that of 1; None: not known yet.

        0 where the rate would add too much variance.
        """
        share = self.rollout_share
        if share is None or not self._cost:
            return None
        variance_R, cost_R = np.mean(self._variance, axis=0), np.mean(self._cost, axis=0)
        efficiency_R = 1 / ((1 + variance_R) * (share + (1 - share) * cost_R))
        grid_R = np.array(GRID)
        most_R = np.where(grid_R < self._moves[-1].rate, ENTRY_VARIANCE, MOST_VARIANCE)
        allowed_R = (variance_R <= most_R) | (grid_R == 1)
        return np.where(allowed_R, efficiency_R / efficiency_R[0], 0.0)

    def _next(self, step: int) -> float:
        last = self._moves[-1]
        efficiency_R = self.efficiency_R()
        if efficiency_R is None or step - last.step < REST:
            return last.rate
        now, best = GRID.index(last.rate), int(efficiency_R.argmax())
        direction = 1 if best > now else -1
        before = GRID.index(self._moves[-2].rate) if len(self._moves) > 1 else now
        back = (now - before) * direction < 0
        gain = LEAST_GAIN * (2 if back else 1)
        if efficiency_R[best] <= efficiency_R[now] * (1 + gain):
            return last.rate
        return GRID[now + direction]

    def state_dict(self) -> dict[str, Any]:
        """State, JSON-ready."""
        return {
            "grid": list(GRID),
            "variance": [values.tolist() for values in self._variance],
            "cost": [values.tolist() for values in self._cost],
            "fixed": list(self._fixed),
            "train": list(self._train),
            "moves": [[move.step, move.rate] for move in self._moves],
            "looked_at": self._looked_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ConfigurationError: It is of another grid.
        """
        if list(state["grid"]) != list(GRID):
            raise ConfigurationError(f"the saved rates {state['grid']} are not {list(GRID)}")
        fresh = KeepRate()
        fresh._variance.extend(np.array(values) for values in state["variance"])
        fresh._cost.extend(np.array(values) for values in state["cost"])
        fresh._fixed.extend(state["fixed"])
        fresh._train.extend(state["train"])
        fresh._moves = [Move(int(step), float(rate)) for step, rate in state["moves"]]
        fresh._looked_at = int(state["looked_at"])
        vars(self).update(vars(fresh))
