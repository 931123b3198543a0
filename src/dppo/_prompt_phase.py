"""The first phase: which candidate prompts are rolled out, decided from their history.

Suffixes: `_M` candidate prompts, `_P` prompts that were rolled out, `_PG` prompts x group.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo._checks import Floats, as_floats, finite, natural, reject, same_shape, share
from dppo.config import PruneConfig
from dppo.errors import HostDriftError, InvalidInputError
from dppo.estimator.designs import generator, systematic
from dppo.estimator.history import PromptHistory, check_visit, prompt_keys
from dppo.estimator.windows import (
    prompt_sizes,
    random_order,
    threshold_prompt_sizes,
    window_inclusion,
    window_size,
)
from dppo.types import Selection

PromptIds = Sequence[int | str] | NDArray[Any]

USUAL_GROUP = 8
"""Completions per prompt assumed until a group has been seen."""


class PromptPhase:
    """History, and the observations that are not due yet."""

    def __init__(self, config: PruneConfig, *, seed: int) -> None:
        self.config, self.seed = config, seed
        self.history = PromptHistory()
        self._group = USUAL_GROUP
        self._pending: list[tuple[int, NDArray[Any], Floats, Floats | None]] = []
        self._last_window = -1

    @property
    def used(self) -> bool:
        """Whether anything was observed or chosen."""
        return bool(len(self.history) or self._pending or self._last_window >= 0)

    @property
    def earliest(self) -> int:
        """The first generation that can still be observed."""
        return max(self._last_window - self.config.observation_lag, 0)

    def window_size(self, count: int) -> int:
        """See `Pruner.window_size`."""
        return window_size(count, keep=self.config.prompt_keep)

    def select(
        self,
        prompt_ids: PromptIds,
        *,
        count: int,
        step: int,
        keep: float | None = None,
        solve_rate: ArrayLike | None = None,
    ) -> Selection:
        """See `Pruner.select_prompts`."""
        natural("step", step)
        keep = self.config.prompt_keep if keep is None else share("keep", keep)
        if step < self._last_window:
            raise InvalidInputError(
                f"the window of generation {step} comes after that of generation "
                f"{self._last_window}, whose history it must not know"
            )
        candidates = prompt_keys(prompt_ids).size
        expected = window_size(count, keep=keep)
        if candidates != expected:
            raise InvalidInputError(
                f"prompt_ids has {candidates} candidates, but count={count} at prompt_keep="
                f"{keep} draws from a window of {expected} (window_size)"
            )
        believed = None if solve_rate is None else _solve_rates(solve_rate, candidates)
        self._apply(step - 1 - self.config.observation_lag)
        self._last_window = max(self._last_window, step)
        pi = window_inclusion(self._sizes(prompt_ids, candidates, believed), count=count)
        # Its own key: the stream "order" is that of the completions of this generation.
        shuffled = generator(self.seed, step, stream="prompt", iteration=1)
        order = random_order(shuffled, candidates)
        chosen = systematic(pi, generator(self.seed, step, stream="prompt"), order=order)
        if int(chosen.kept.sum()) != count:
            raise HostDriftError(f"drew {int(chosen.kept.sum())} prompts instead of {count}")
        return chosen

    def observe(
        self, prompt_ids: PromptIds, rewards_PG: ArrayLike, lengths_PG: ArrayLike | None, step: int
    ) -> None:
        """See `Pruner.observe`."""
        natural("step", step)
        if step < self.earliest:
            raise InvalidInputError(
                f"the observation of generation {step} comes too late: the window of generation "
                f"{self._last_window} was chosen without it. Observe in time, or raise "
                "observation_lag"
            )
        check_visit(prompt_ids, rewards_PG, lengths_PG)
        rewards: NDArray[Any] = np.array(rewards_PG)
        lengths = None if lengths_PG is None else as_floats("lengths_PG", lengths_PG).copy()
        self._pending.append((step, np.array(prompt_ids), rewards, lengths))

    def state_dict(self) -> dict[str, Any]:
        """History, pending observations and position."""
        return {
            "history": self.history.state_dict(),
            "pending": list(self._pending),
            "group": self._group,
            "last_window": self._last_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.history.load_state_dict(state["history"])
        self._pending = [tuple(entry) for entry in state["pending"]]
        self._group, self._last_window = state["group"], state["last_window"]

    def _apply(self, latest: int) -> None:
        """Let the history know what was observed up to generation `latest`, in their order."""
        self._pending.sort(key=lambda entry: entry[0])
        while self._pending and self._pending[0][0] <= latest:
            _, ids, rewards, lengths = self._pending.pop(0)
            scale = self.config.advantage_scale
            self.history.observe(ids, rewards, lengths_PG=lengths, scale=scale)
            self._group = rewards.shape[1]

    def _sizes(self, prompt_ids: PromptIds, candidates: int, believed: Floats | None) -> Floats:
        rule = self.config.prompt_rule
        if rule == "uniform":
            return np.ones(candidates)
        if rule == "threshold":
            magnitude, average = self.history.magnitude(prompt_ids)
            if believed is not None:
                expected = 2 * np.sqrt(believed * (1 - believed))  # mean |A| of right and wrong
                average = average if len(self.history) else float(expected.mean())
                magnitude = np.where(np.isnan(magnitude), expected, magnitude)
            rate = self.config.prompt_prune_rate
            return threshold_prompt_sizes(magnitude, average, prune_rate=rate)
        signal, cost = self.history.predict(
            prompt_ids,
            group=self._group,
            scale=self.config.advantage_scale,
            solve_rate_P=believed,
        )
        return prompt_sizes(signal, cost)


def _solve_rates(value: ArrayLike, candidates: int) -> Floats:
    rates = finite("solve_rate", value, ndim=1)
    same_shape("solve_rate", rates, (candidates,))
    reject("solve_rate", rates, (rates < 0) | (rates > 1), "must be in [0, 1]")
    return rates
