"""GRESO (Zheng et al., arXiv 2506.02177; its code): skip prompts that had no signal lately."""

from collections.abc import Sequence

import numpy as np

from dppo._checks import Floats

__all__ = ["SkipRates"]

EASY, HARD = 0.98, 0.11
"""Mean reward of a visit from which, and up to which, a prompt counts as solved or hopeless."""
START, STEP, LOWEST, HIGHEST = 0.5, 0.01, 0.05, 0.95
EXPLORE = 0.01
"""Smallest probability of a visit."""
TARGET = {"easy": 0.25 / 3, "hard": 0.25 * 2 / 3}
"""Shares of prompts without signal among those rolled out."""


class SkipRates:
    """With what probability a prompt is visited, from its run of visits without signal.

    A prompt whose last c visits were all solved (hopeless) is visited with probability
    max(p^c, 0.01). p is one number for solved and one for hopeless prompts, moved by 0.01 a step so
    that their shares come near the target. Assumes rewards of 0 and 1.

    Example:
        >>> rates = SkipRates()
        >>> rates.observe([7], np.array([[1.0, 1.0]]), adapt=False)
        >>> rates.probability(7), rates.probability(8)
        (0.5, 1.0)
    """

    def __init__(self) -> None:
        self.p = dict.fromkeys(TARGET, START)
        self._runs: dict[int, tuple[str, int]] = {}

    def probability(self, prompt: int) -> float:
        """Of a visit."""
        kind, count = self._runs.get(prompt, ("", 0))
        return max(self.p[kind] ** count, EXPLORE) if count else 1.0

    def observe(self, prompts: Sequence[int], rewards_PG: Floats, *, adapt: bool) -> None:
        """Take note of a step's rollouts.

        Args:
            prompts: Ids, P of them.
            rewards_PG: Shape (P, G). NaN: no score.
            adapt: Whether to move the two numbers; not in the first pass over the data.
        """
        scored = ~np.isnan(rewards_PG)
        mean_P = np.where(scored, rewards_PG, 0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
        kinds = ["easy" if m >= EASY else "hard" if m <= HARD else "" for m in mean_P.tolist()]
        for prompt, kind in zip(prompts, kinds, strict=True):
            before, count = self._runs.get(prompt, ("", 0))
            self._runs[prompt] = (kind, count + 1 if kind == before else 1) if kind else ("", 0)
        if adapt:
            for kind, target in TARGET.items():
                share = kinds.count(kind) / len(kinds)
                moved = self.p[kind] + (STEP if share < target else -STEP)
                self.p[kind] = min(max(moved, LOWEST), HIGHEST)
