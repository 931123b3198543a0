"""Size -> inclusion probability. Three rules; any positive probabilities give an unbiased estimate.

A probability is exactly 0 only for an inert row (size 0, not live), whose gradient is zero.

Suffixes: `_PG` prompts x group.
"""

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import Bools, Floats, as_bools, finite, not_empty, reject, same_shape, share

__all__ = ["proportional_inclusion", "threshold_inclusion", "uniform_inclusion"]

SMALLEST_RELATIVE_SIZE = 1e-12
"""Sizes below this share of the largest are raised to it, and c is at least `keep` (it is, but for
rounding), so that no live row ever gets probability 0."""


def proportional_inclusion(
    size_PG: ArrayLike, *, keep: float, cost: ArrayLike | None = None
) -> Floats:
    """Inclusion probability proportional to size, pi = min(1, c * size).

    c solves sum(pi * cost) = keep * sum(cost) over the live rows (size > 0). Rows whose
    probability reaches 1 are kept for certain and c is solved for the rest (Saerndal, Swensson,
    Wretman, *Model Assisted Survey Sampling*, 3.6.2).

    Args:
        size_PG: Any shape. >= 0; 0 only where the row is inert.
        keep: Expected kept share of the live cost, in (0, 1]. 1 keeps every live row.
        cost: Shape of `size_PG`. > 0 for live rows; None means that all rows cost the same.

    Returns:
        Shape of `size_PG`. All zero if every row is inert.

    Raises:
        InvalidInputError: Empty input, a size that is negative or not finite, keep outside (0, 1].

    Example:
        >>> import dppo
        >>> dppo.proportional_inclusion([3.0, 1.0, 0.0], keep=0.5).tolist()
        [0.75, 0.25, 0.0]
    """
    keep = share("keep", keep)
    size = finite("size_PG", size_PG)
    not_empty("size_PG", size)
    reject("size_PG", size, size < 0, "must be >= 0")
    live = size > 0
    if cost is None:
        costs = np.ones(size.shape)
    else:
        costs = finite("cost", cost)
        same_shape("cost", costs, size.shape)
        reject("cost", costs, live & (costs <= 0), "must be > 0 where size > 0")
    pi = np.zeros(size.shape)
    if keep == 1:
        pi[live] = 1.0
    elif live.any():
        pi[live] = _proportional(size[live], costs[live], keep)
    return pi


def _proportional(size: Floats, cost: Floats, keep: float) -> Floats:
    """Solve for c over flat live rows; linear but for one sort."""
    size = size / size.max()  # a common factor changes nothing, and overflow is impossible
    size = np.maximum(size, SMALLEST_RELATIVE_SIZE)
    order = np.argsort(-size, kind="stable")
    size_d, cost_d = size[order], cost[order] / cost.sum()
    # With the k largest certain, c_k = (keep - their cost) / (size-weighted cost of the rest).
    certain_cost = np.concatenate(([0.0], np.cumsum(cost_d)[:-1]))
    rest = np.cumsum((size_d * cost_d)[::-1])[::-1]
    factor = (keep - certain_cost) / rest
    fits = factor * size_d <= 1  # then no further row reaches 1
    k = int(np.argmax(fits)) if fits.any() else size_d.size  # by rounding, keep is 1
    c = factor[k] if k < size_d.size else 1.0
    pi = np.clip(c * size_d, keep * SMALLEST_RELATIVE_SIZE, 1.0)
    pi[:k] = 1.0
    result = np.empty_like(pi)
    result[order] = pi
    return result


def threshold_inclusion(
    advantages_PG: ArrayLike,
    *,
    prune_rate: float,
    live: ArrayLike | None = None,
    scored: ArrayLike | None = None,
) -> Floats:
    """The paper's rule (arXiv 2603.04135, 4.2), as independent coin flips with known probability.

    pi = 1 - prune_rate where |A| is below the mean |A| of its group, 1 elsewhere, 0 iff not live.
    The paper's algorithm removes a fixed fraction, rounded down, of the low ones and weights by
    1 / (1 - prune_rate); that is biased (by a factor 1.33 for three low rows at rate 0.5), so the
    rule here gives probabilities and leaves drawing and weighting to the design.

    Args:
        advantages_PG: Shape (P, G).
        prune_rate: The paper's r_o, in [0, 1).
        live: Shape (P, G). Default: advantage != 0.
        scored: Shape (P, G). Rows that count in the group's mean; default all.

    Returns:
        Shape (P, G).

    Raises:
        InvalidInputError: Shapes differ, a value is not finite, or prune_rate outside [0, 1).

    Example:
        >>> import dppo
        >>> dppo.threshold_inclusion([[1.5, -0.5, -0.5, -0.5]], prune_rate=0.7).round(2).tolist()
        [[1.0, 0.3, 0.3, 0.3]]
    """
    rate = share("prune_rate", prune_rate, zero=True, one=False)
    advantages = finite("advantages_PG", advantages_PG, ndim=2)
    not_empty("advantages_PG", advantages)
    shape = advantages.shape
    live_PG: Bools = advantages != 0 if live is None else as_bools("live", live, shape)
    counted = np.ones(shape, np.bool_) if scored is None else as_bools("scored", scored, shape)
    magnitude = np.abs(advantages)
    total = np.where(counted, magnitude, 0.0).sum(axis=1, keepdims=True)
    mean = total / np.maximum(counted.sum(axis=1, keepdims=True), 1)
    # Half right, half wrong puts every |A| on the mean: float dust must not decide who is below.
    low = magnitude < mean * (1 - 1e-6)
    return np.where(live_PG, np.where(low, 1.0 - rate, 1.0), 0.0)


def uniform_inclusion(live_PG: ArrayLike, *, keep: float) -> Floats:
    """The same probability for every live row: pi = keep, 0 iff not live.

    Args:
        live_PG: Any shape, boolean.
        keep: In (0, 1]; 1 is the lossless rule that drops inert rows only.

    Returns:
        Shape of `live_PG`.

    Raises:
        InvalidInputError: Empty input or keep outside (0, 1].

    Example:
        >>> import dppo
        >>> dppo.uniform_inclusion([[True, False]], keep=0.5).tolist()
        [[0.5, 0.0]]
    """
    live = as_bools("live_PG", live_PG)
    not_empty("live_PG", live)
    return np.where(live, share("keep", keep), 0.0)
