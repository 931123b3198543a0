"""Group-relative advantages, dead groups and inert rows. Frozen before anything is pruned.

Estimator: A_qi = (r_qi - mean_i r_qi) / (std + epsilon), mean and sample standard deviation over
the scored completions of the group, as the hosts compute it. The advantages are the full group's:
recomputing them on survivors would change the gradient that is estimated.

Degenerate cases: fewer than two scores make a group unscorable, equal scores make it dead; both
get advantage exactly 0, and so does a score that is the group's mean but for rounding, because what
floating point leaves there is dust, not signal.

Suffixes: `_P` prompts, `_PG` prompts x group.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo._checks import Bools, Floats, as_floats, non_negative, not_empty, one_of, reject
from dppo.errors import InvalidInputError
from dppo.types import Advantages

__all__ = ["check_rewards", "constant_groups", "group_advantages"]

SCALES = ("group", "batch", "none")


def group_advantages(
    rewards_PG: ArrayLike, *, scale: str = "group", epsilon: float = 1e-4
) -> Advantages:
    """Center and scale the rewards of each group.

    Args:
        rewards_PG: Shape (P, G), G >= 2. NaN means "no score": the completion is left out of the
            group's statistics and gets advantage 0, never reward 0. Pad ragged groups with NaN.
        scale: "group" divides by the group's sample standard deviation (ddof 1), "batch" by that
            of all scored rewards, "none" not at all (Dr. GRPO).
        epsilon: Added to the standard deviation (TRL 1e-4, verl 1e-6).

    Returns:
        The advantages with the flags that say which of them carry signal.

    Raises:
        InvalidInputError: The batch is empty, G is 1, a reward is infinite, or an option unknown.

    Example:
        >>> import dppo
        >>> adv = dppo.group_advantages([[1.0, 0.0], [1.0, 1.0]], scale="none")
        >>> adv.values_PG.tolist(), adv.live_P.tolist()
        ([[0.5, -0.5], [0.0, 0.0]], [True, False])
    """
    one_of("scale", scale, SCALES)
    epsilon = non_negative("epsilon", epsilon)
    rewards = check_rewards(rewards_PG)
    scored_PG = ~np.isnan(rewards)
    scorable_P = scored_PG.sum(axis=1) >= 2
    live_P = scorable_P & ~constant_groups(rewards_PG)

    values = np.where(scored_PG, rewards, 0.0)
    count = np.maximum(scored_PG.sum(axis=1, keepdims=True), 1)
    mean = values.sum(axis=1, keepdims=True) / count
    centered = np.where(scored_PG, rewards - mean, 0.0)
    largest = np.abs(values).max(axis=1, keepdims=True)
    centered[np.abs(centered) <= _dust(rewards_PG) * largest] = 0.0
    if scale != "none":
        spread = _spread(centered, scored_PG, rewards, scale) + epsilon
        centered = np.divide(centered, spread, out=np.zeros_like(centered), where=spread > 0)
    values_PG = np.where(live_P[:, None], centered, 0.0)
    return Advantages(
        values_PG=values_PG,
        live_P=live_P,
        live_PG=(values_PG != 0) & live_P[:, None] & scored_PG,
        scored_PG=scored_PG,
        scorable_P=scorable_P,
    )


def constant_groups(rewards_PG: ArrayLike) -> Bools:
    """Say which groups have no spread: max - min <= 8 eps max|r| over the scored rewards.

    eps is that of the dtype of the rewards as given (float32 rewards are judged as float32), for
    the rounding happened there. A standard deviation is no test: of eight equal float32 rewards
    it may come out as 1e-9 or as 0.

    Args:
        rewards_PG: Shape (P, G), NaN for "no score".

    Returns:
        Shape (P,). True also where fewer than two rewards are scored.

    Example:
        >>> from dppo.estimator.advantages import constant_groups
        >>> constant_groups([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2]]).tolist()
        [True, False]
    """
    rewards = check_rewards(rewards_PG)
    enough = (~np.isnan(rewards)).sum(axis=1) >= 2
    high = np.fmax.reduce(rewards, axis=1)  # fmax and fmin pass over NaN
    low = np.fmin.reduce(rewards, axis=1)
    largest = np.fmax.reduce(np.abs(rewards), axis=1)
    return ~enough | (high - low <= _dust(rewards_PG) * largest)


def _dust(rewards_PG: ArrayLike) -> float:
    """8 machine epsilons of the dtype the rewards arrived in: relative differences below it."""
    given: NDArray[Any] = np.asarray(rewards_PG)
    dtype: Any = given.dtype if given.dtype.kind == "f" else np.float64
    return 8 * float(np.finfo(dtype).eps)


def check_rewards(rewards_PG: ArrayLike) -> Floats:
    """Return the rewards as float64, shape (P, G); NaN is allowed, G = 1 and infinity are not."""
    rewards = as_floats("rewards_PG", rewards_PG, ndim=2)
    not_empty("rewards_PG", rewards)
    reject("rewards_PG", rewards, np.isinf(rewards), "must be finite or NaN (no score)")
    if rewards.shape[1] < 2:
        raise InvalidInputError(
            f"rewards_PG has shape {rewards.shape}: a group needs at least 2 completions, for a "
            "single one has no baseline to be better than"
        )
    return rewards


def _spread(centered: Floats, scored: Bools, rewards: Floats, scale: str) -> Floats:
    """Sample standard deviation per group, shape (P, 1), or of the batch, shape (1, 1)."""
    if scale == "batch":
        pool = rewards[scored]
        return np.full((1, 1), pool.std(ddof=1) if pool.size > 1 else 0.0)
    freedom = np.maximum(scored.sum(axis=1, keepdims=True) - 1, 1)
    return np.sqrt((centered**2).sum(axis=1, keepdims=True) / freedom)
