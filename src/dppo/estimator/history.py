r"""What is remembered of each prompt, and what it predicts of the next visit.

The next rollout of a prompt has a gradient only if its rewards differ. For rewards of two values
(right and wrong) with solve rate p that has probability 1 - p^G - (1-p)^G, so what must be
predicted is p. The counts of past visits are a sample of it; the prior is fitted to all prompts
(empirical Bayes, Beta-binomial; Casella 1985), so that a prompt that was all wrong once is
predicted to be like the others that were, not hopeless:

    p | counts  ~  Beta(a + right, b + wrong)
    E[signal]   =  1 - E[p^G] - E[(1-p)^G]

For other rewards the prediction is the mean signal of past visits, shrunk towards that of all
prompts. Old visits are discounted, for the policy moves. A bad prediction costs variance, not bias.

Suffixes: `_P` prompts, `_PG` prompts x group.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo._checks import (
    Floats,
    as_array,
    as_floats,
    finite,
    natural,
    not_empty,
    reject,
    same_shape,
    share,
)
from dppo.errors import InvalidInputError
from dppo.estimator.advantages import check_rewards, group_advantages

__all__ = ["PromptHistory"]

Keys = NDArray[np.uint64]

DISCOUNT = 0.9
"""Weight of a visit relative to the one after it. In simulation (`benchmarks/prompt_rules.py`) no
worse than 1 for a policy that stands still, and better than 1 or 0.7 for one that drifts."""

PRIOR_VISITS = 2.0
"""Visits that the mean of all prompts counts for, where rewards have more than two values."""

STRENGTH = (0.05, 100.0)
"""Bounds of a + b of the fitted prior."""

FEW_PROMPTS = 8
"""Below this many known prompts nothing is fitted: the prior is Beta(1/2, 1/2)."""

LEAST_PRIOR = 0.05
"""Smallest pseudo-count of right or wrong completions."""

MOST_ID = 2**63 - 1
"""Keys above it are hashes of texts."""

COLUMNS = ("visits", "scores", "reward", "signal", "magnitude", "cost")
"""Discounted sums per prompt: visits, scored completions, their rewards; per visit the mean squared
and the mean absolute advantage, and the mean cost."""


class PromptHistory:
    """Discounted statistics of every prompt that was rolled out, by a stable id.

    32 bytes a prompt. An id is a whole number below 2^63 or a text; texts are hashed to 63 bits.

    Args:
        discount: See `DISCOUNT`.

    Example:
        >>> from dppo.estimator.history import PromptHistory
        >>> history = PromptHistory()
        >>> history.observe(["easy", "hard"], [[1.0, 1.0], [0.0, 1.0]])
        >>> len(history)
        2
    """

    def __init__(self, *, discount: float = DISCOUNT) -> None:
        self.discount = share("discount", discount)
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._sums: NDArray[np.float32] = np.empty((len(COLUMNS), 0), dtype=np.float32)
        self._values: list[float] = []  # distinct rewards seen, at most three
        # Over all prompts, kept up to date so that a window costs no pass over them: sums of the
        # columns; sums of mean rewards, of their squares, of their sampling variances.
        self._totals = np.zeros(len(COLUMNS))
        self._moments = np.zeros(3)

    def __len__(self) -> int:
        """Prompts that have been observed."""
        return self._keys.size

    def observe(
        self,
        prompt_ids: Sequence[int | str] | NDArray[Any],
        rewards_PG: ArrayLike,
        *,
        lengths_PG: ArrayLike | None = None,
        scale: str = "group",
    ) -> None:
        """Add one visit to each of the prompts.

        Args:
            prompt_ids: One id for each row. An id that comes twice (a data set may hold a prompt
                twice) is visited twice, in the order of the rows.
            rewards_PG: Shape (P, G). NaN means no score; a prompt without any is passed over.
            lengths_PG: Shape (P, G). Cost of each completion; None: all the same.
            scale: How advantages are scaled, see `group_advantages`.

        Raises:
            InvalidInputError: Wrong shapes, or an id that is none.
        """
        keys, rewards = check_visit(prompt_ids, rewards_PG, lengths_PG)
        visit = _visit(rewards_PG, lengths_PG, scale)
        seen = visit[COLUMNS.index("scores")] > 0
        keys, visit = keys[seen], visit[:, seen]
        if not keys.size:
            return
        self._note_values(rewards[~np.isnan(rewards)])
        self._insert(np.unique(keys))
        earlier = _earlier(keys)
        for turn in range(int(earlier.max()) + 1):
            self._add(keys[earlier == turn], visit[:, earlier == turn])

    def _add(self, keys: Keys, visit: Floats) -> None:
        """One visit to each of the known `keys`, no key twice."""
        place = np.searchsorted(self._keys, keys)
        before = self._sums[:, place]
        self._sums[:, place] = self.discount * before.astype(np.float64) + visit
        after = self._sums[:, place]
        self._totals += after.sum(axis=1, dtype=np.float64) - before.sum(axis=1, dtype=np.float64)
        self._moments += self._moments_of(after) - self._moments_of(before)

    def predict(
        self,
        prompt_ids: Sequence[int | str] | NDArray[Any],
        *,
        group: int,
        scale: str = "group",
        solve_rate_P: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Predicted signal and cost of the next visit, each relative, shape (P,).

        The signal is the mean squared advantage of the group: the second moment of its gradient,
        up to a factor that all prompts share.

        Args:
            prompt_ids: The prompts.
            group: Completions of the next visit, G.
            scale: How advantages are scaled.
            solve_rate_P: Shape (P,), in [0, 1]. What is believed of each prompt beforehand, worth
                one visit (`PRIOR_VISITS` where rewards have more than two values), in place of the
                prior fitted to all prompts.
        """
        sums = self._lookup(prompt_ids)
        visits, scores, reward, signal, _, cost = sums
        overall = self._overall()
        shrink = visits + PRIOR_VISITS
        predicted_cost = (cost + PRIOR_VISITS * overall["cost"]) / shrink
        if len(self._values) > 2:
            expected = overall["signal"] * _relative_signal(solve_rate_P, group)
            shrunk = (signal + PRIOR_VISITS * expected) / shrink
            return np.maximum(shrunk, np.finfo(np.float64).tiny), predicted_cost
        low, high = self._range()
        right = np.clip((reward - low * scores) / (high - low), 0.0, scores)
        prior_right, prior_wrong = self._prior_counts(solve_rate_P, group)
        a, b = prior_right + right, prior_wrong + (scores - right)
        if scale == "group":
            live = 1.0 - _power_moment(a, b, group) - _power_moment(b, a, group)
            return np.maximum(live, np.finfo(np.float64).tiny), predicted_cost
        return a * b / ((a + b) * (a + b + 1)), predicted_cost

    def visited(self, prompt_ids: Sequence[int | str] | NDArray[Any]) -> NDArray[np.bool_]:
        """Which of the prompts have been observed, shape (P,)."""
        return self._lookup(prompt_ids)[0] > 0

    def magnitude(self, prompt_ids: Sequence[int | str] | NDArray[Any]) -> tuple[Floats, float]:
        """Mean |A| of the past visits of each prompt, NaN if there were none; and that of all."""
        visits, _, _, _, magnitude, _ = self._lookup(prompt_ids)
        known = np.divide(magnitude, visits, out=np.full_like(visits, np.nan), where=visits > 0)
        return known, self._overall()["magnitude"]

    def prior(self) -> tuple[float, float]:
        """A and b of the Beta prior of the solve rate, fitted by moments to all prompts."""
        if len(self) < FEW_PROMPTS:
            return 0.5, 0.5
        mean, square, sampling = self._moments / len(self)
        mean = float(np.clip(mean, 1e-3, 1 - 1e-3))
        between = max(float(square - mean**2 - sampling), 1e-4)
        strength = float(np.clip(mean * (1 - mean) / between - 1, *STRENGTH))
        return mean * strength, (1 - mean) * strength

    def _prior_counts(
        self, solve_rate_P: Floats | None, group: int
    ) -> tuple[Floats | float, Floats | float]:
        if solve_rate_P is None:
            return self.prior()
        # A belief of exactly 0 or 1 must not abandon the prompt.
        right, wrong = group * solve_rate_P, group * (1 - solve_rate_P)
        return np.maximum(right, LEAST_PRIOR), np.maximum(wrong, LEAST_PRIOR)

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers; `load_state_dict` restores exactly what was saved."""
        return {
            "discount": self.discount,
            "values": list(self._values),
            "totals": self._totals.copy(),
            "moments": self._moments.copy(),
            "keys": self._keys.copy(),
            "sums": self._sums.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            InvalidInputError: The arrays do not belong together.
        """
        keys = np.array(state["keys"], dtype=np.uint64)  # copies: sums are updated in place
        sums = np.array(state["sums"], dtype=np.float32)
        same_shape("sums", sums, (len(COLUMNS), keys.size))
        self.discount = share("discount", state["discount"])
        self._values = [float(v) for v in state["values"]]
        self._totals = np.array(state["totals"], dtype=np.float64)
        self._moments = np.array(state["moments"], dtype=np.float64)
        self._keys, self._sums = keys, sums

    def _note_values(self, rewards: Floats) -> None:
        if len(self._values) > 2:
            return
        before = self._range()
        self._values = sorted({*self._values, *np.unique(rewards)[:3].tolist()})[:3]
        if self._range() != before:
            self._moments = self._moments_of(self._sums)

    def _range(self) -> tuple[float, float]:
        """The two values of a reward; 0 and 1 until two have been seen."""
        if len(self._values) == 2:
            return self._values[0], self._values[1]
        return min(0.0, *self._values, 0.0), max(1.0, *self._values, 1.0)

    def _moments_of(self, sums: NDArray[np.float32]) -> Floats:
        scores, reward = sums[1].astype(np.float64), sums[2].astype(np.float64)
        known = scores > 0
        scores, reward = scores[known], reward[known]
        low, high = self._range()
        mean = np.clip((reward / scores - low) / (high - low), 0.0, 1.0)
        sampling = mean * (1 - mean) / np.maximum(scores - 1, 1.0)
        return np.array([mean.sum(), (mean**2).sum(), sampling.sum()])

    def _overall(self) -> dict[str, float]:
        totals = dict(zip(COLUMNS, self._totals.tolist(), strict=True))
        visits = totals["visits"]
        return {name: totals[name] / visits if visits > 0 else 1.0 for name in COLUMNS[3:]}

    def _insert(self, keys: Keys) -> None:
        place = np.searchsorted(self._keys, keys)
        bounded = np.minimum(place, max(self._keys.size - 1, 0))
        new = np.ones(keys.size, bool) if not len(self) else self._keys[bounded] != keys
        if new.any():
            added = np.sort(keys[new])
            at = np.searchsorted(self._keys, added)
            self._keys = np.insert(self._keys, at, added)
            self._sums = np.insert(self._sums, at, np.float32(0), axis=1)

    def _lookup(self, prompt_ids: Sequence[int | str] | NDArray[Any]) -> Floats:
        keys = prompt_keys(prompt_ids)
        if not len(self):
            return np.zeros((len(COLUMNS), keys.size))
        place = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        known = self._keys[place] == keys
        return np.where(known, self._sums[:, place], 0.0).astype(np.float64)


def check_visit(
    prompt_ids: Sequence[int | str] | NDArray[Any],
    rewards_PG: ArrayLike,
    lengths_PG: ArrayLike | None,
) -> tuple[Keys, Floats]:
    """Keys and rewards of a visit, after checking that its arrays belong together."""
    rewards = check_rewards(rewards_PG)
    keys = prompt_keys(prompt_ids)
    same_shape("prompt_ids", keys, rewards.shape[:1])
    if lengths_PG is not None:
        lengths = finite("lengths_PG", lengths_PG, ndim=2)
        same_shape("lengths_PG", lengths, rewards.shape)
        reject("lengths_PG", lengths, lengths < 0, "must be >= 0")
    return keys, rewards


def prompt_keys(prompt_ids: Sequence[int | str] | NDArray[Any]) -> Keys:
    """Ids as 64-bit keys: numbers as they are, texts hashed with the highest bit set."""
    array = as_array("prompt_ids", prompt_ids)
    if array.ndim != 1:
        raise InvalidInputError(f"prompt_ids must have 1 dimension, got shape {array.shape}")
    not_empty("prompt_ids", array)
    if array.dtype.kind in "iu":
        natural("prompt_ids", int(array.min()))
        reject("prompt_ids", array, array > MOST_ID, "must be below 2^63")
        return array.astype(np.uint64)
    mixed = not isinstance(prompt_ids, np.ndarray) and any(
        not isinstance(prompt_id, str) for prompt_id in prompt_ids
    )
    if array.dtype.kind != "U" or mixed:
        raise InvalidInputError(
            f"prompt_ids must be whole numbers or texts, got dtype {array.dtype}"
        )
    hashes = [
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for text in array.tolist()
    ]
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64) | np.uint64(1 << 63)


def _earlier(keys: Keys) -> NDArray[np.int64]:
    """How often each key has come before, shape (P,): 0 at its first place."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.arange(keys.size)
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    earlier = np.empty(keys.size, dtype=np.int64)
    earlier[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return earlier


def _relative_signal(solve_rate_P: Floats | None, group: int) -> Floats | float:
    """Chance that a group has a signal, relative to the mean of these prompts; 1 if not known."""
    if solve_rate_P is None:
        return 1.0
    live = 1 - solve_rate_P**group - (1 - solve_rate_P) ** group
    return np.maximum(live, LEAST_PRIOR) / float(np.maximum(live, LEAST_PRIOR).mean())


def _visit(rewards_PG: ArrayLike, lengths_PG: ArrayLike | None, scale: str) -> Floats:
    """One visit in the order of `COLUMNS`, shape (6, P)."""
    adv = group_advantages(rewards_PG, scale=scale)
    scored = adv.scored_PG
    count = scored.sum(axis=1).astype(np.float64)
    divisor = np.maximum(count, 1.0)
    rewards = np.where(scored, as_floats("rewards_PG", rewards_PG), 0.0)
    cost = np.ones_like(count)
    if lengths_PG is not None:
        lengths = as_floats("lengths_PG", lengths_PG)
        same_shape("lengths_PG", lengths, scored.shape)
        cost = np.maximum(lengths.mean(axis=1), 1.0)
    squared = (adv.values_PG**2).sum(axis=1) / divisor
    absolute = np.abs(adv.values_PG).sum(axis=1) / divisor
    visits = np.ones_like(count)
    return np.stack([visits, count, rewards.sum(axis=1), squared, absolute, cost])


def _power_moment(a: Floats, b: Floats, power: int) -> Floats:
    """E[p^power] for p ~ Beta(a, b): the product of (a + j) / (a + b + j)."""
    result = np.ones_like(a)
    for j in range(power):
        result *= (a + j) / (a + b + j)
    return result
