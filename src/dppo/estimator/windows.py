"""Which prompts of a window of candidates are rolled out: exactly `count` of them.

The trainer needs fixed shapes, so the sum of the inclusion probabilities is a whole number and the
systematic design returns exactly that many.

Suffixes: `_M` candidate prompts.
"""

import math

import numpy as np

from dppo._checks import Floats, Ints, finite, natural, reject, same_shape, share
from dppo.errors import InvalidInputError
from dppo.estimator.inclusion import proportional_inclusion

__all__ = ["prompt_sizes", "threshold_prompt_sizes", "window_inclusion", "window_size"]


def window_size(count: int, *, keep: float) -> int:
    """Candidates from which `count` prompts are drawn, floor(count / keep + 1/2).

    Example:
        >>> from dppo.estimator.windows import window_size
        >>> window_size(32, keep=0.6)
        53
    """
    if natural("count", count) == 0:
        raise InvalidInputError("count must be at least 1, got 0")
    return math.floor(count / share("keep", keep) + 0.5)


def prompt_sizes(signal_M: Floats, cost_M: Floats) -> Floats:
    """Size of each candidate, sqrt(predicted second moment of its gradient / predicted cost).

    Args:
        signal_M: Shape (M,). Predicted second moment, > 0, in any unit.
        cost_M: Shape (M,). Predicted cost, > 0, in any unit.
    """
    signal, cost = finite("signal_M", signal_M, ndim=1), finite("cost_M", cost_M, ndim=1)
    same_shape("cost_M", cost, signal.shape)
    reject("signal_M", signal, signal <= 0, "must be > 0: a prompt is never abandoned")
    reject("cost_M", cost, cost <= 0, "must be > 0")
    return np.sqrt(signal / cost)


def threshold_prompt_sizes(magnitude_M: Floats, average: float, *, prune_rate: float) -> Floats:
    """The paper's rule as sizes: 1 - prune_rate where |A| was below average, else 1.

    Args:
        magnitude_M: Shape (M,). Mean |A| of past visits, NaN for a prompt without any.
        average: The mean over all prompts.
        prune_rate: The paper's r_q, in [0, 1).
    """
    rate = share("prune_rate", prune_rate, zero=True, one=False)
    # Float dust must not decide who is below where all are alike.
    return np.where(magnitude_M < average * (1 - 1e-6), 1.0 - rate, 1.0)


def window_inclusion(size_M: Floats, *, count: int) -> Floats:
    """Pi = min(1, c * size) with sum(pi) = count exactly.

    Example:
        >>> import numpy as np
        >>> from dppo.estimator.windows import window_inclusion
        >>> window_inclusion(np.array([3.0, 1.0]), count=1).tolist()
        [0.75, 0.25]
    """
    if not 1 <= count <= size_M.size:
        raise InvalidInputError(f"count={count}: must be between 1 and {size_M.size} candidates")
    if count == size_M.size:
        return np.ones(size_M.size)
    pi = proportional_inclusion(size_M, keep=count / size_M.size)
    open_M = pi < 1
    rest = count - int((~open_M).sum())
    pi[open_M] *= rest / pi[open_M].sum()  # the solver's sum is right but for rounding
    return np.minimum(pi, 1.0)


def random_order(rng: np.random.Generator, count: int) -> Ints:
    """A random permutation of 0..count-1."""
    return np.argsort(np.asarray(rng.random(count)), kind="stable").astype(np.int64)
