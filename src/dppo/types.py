"""The values that the statistics pass on.

Suffixes name axes: `_P` prompts, `_PG` prompts x group, `_N` flat rows.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import Bools, Floats, Ints, as_bools, finite, reject

__all__ = ["Advantages", "CompletionChoice", "Selection"]


@dataclass(frozen=True, eq=False)
class Advantages:
    """Group-relative advantages, frozen before anything is pruned; the arrays are read-only.

    Example:
        >>> import dppo
        >>> dppo.group_advantages([[1.0, 0.0]]).live_P.tolist()
        [True]
    """

    values_PG: Floats
    """Shape (P, G). The advantage; exactly 0 where unscored and in dead groups."""
    live_P: Bools
    """Shape (P,). Scorable, and the rewards of the group are not all the same."""
    live_PG: Bools
    """Shape (P, G). In a live group, scored, and the advantage is not exactly 0."""
    scored_PG: Bools
    """Shape (P, G). The completion has a reward (not NaN)."""
    scorable_P: Bools
    """Shape (P,). The group has at least two scores."""

    def __post_init__(self) -> None:
        freeze(self)


@dataclass(frozen=True, eq=False)
class Selection:
    """What was kept, inseparable from the probabilities with which it was kept.

    Attributes:
        kept: Boolean array: the units that survive.
        pi: Float array of the same shape: first-order inclusion probability of each unit, in
            (0, 1], or exactly 0 where the unit is inert (its gradient is exactly zero).
        weight: `kept / pi`, the Horvitz-Thompson weight; 0 where `pi` is 0.

    Raises:
        InvalidInputError: The shapes differ, a probability is not in [0, 1], a unit was kept
            though its probability is 0, or one with probability 1 was not kept.

    Example:
        >>> import dppo
        >>> dppo.Selection([True, False], [0.5, 0.25]).weight.tolist()
        [2.0, 0.0]
    """

    kept: Bools
    pi: Floats
    weight: Floats = field(init=False)

    def __init__(self, kept: ArrayLike, pi: ArrayLike) -> None:
        """Check the invariants, copy the arrays and make them read-only."""
        probability = check_inclusion(pi).copy()
        flags = as_bools("kept", kept, probability.shape)
        never = probability < np.finfo(np.float64).tiny  # below it, 1 / pi overflows
        reject("pi", probability, flags & never, "must be > 0 where kept")
        reject("pi", probability, ~flags & (probability == 1), "must be < 1 where not kept")
        weight = np.divide(flags, probability, out=np.zeros_like(probability), where=flags)
        for name, array in (("kept", flags), ("pi", probability), ("weight", weight)):
            object.__setattr__(self, name, array)
        freeze(self)


@dataclass(frozen=True, eq=False)
class CompletionChoice:
    """The completions of one generation that are trained on, for one pass over it.

    `pi` and `weight` are of both phases, pi_q * pi_i|q; with no prompt phase pi_q is 1. The arrays
    are read-only.

    Example:
        >>> import dppo
        >>> pruner = dppo.Pruner(dppo.PruneConfig(completion_rule="inert"), seed=0)
        >>> pruner.select_completions([[1.0, 0.0], [1.0, 1.0]], step=0).kept.tolist()
        [[True, True], [False, False]]
    """

    kept: Bools
    """Shape (P, G)."""
    pi: Floats
    """Shape (P, G). Inclusion probability over both phases; 0 exactly where inert."""
    weight: Floats
    """Shape (P, G). `kept / pi`."""
    pi_completion: Floats
    """Shape (P, G). Inclusion probability given that the prompt was rolled out."""
    advantages: Floats
    """Shape (P, G). The advantages that belong to the weights; exactly 0 in dead groups."""
    live: Bools
    """Shape (P, G). Whether the completion has a gradient at all."""
    norm: Floats
    """Shape (P, G). The assumed gradient norm, for predictions of variance; 0 where not live."""
    reason: Ints
    """Shape (P, G). Index into `dppo.pruner.DROP_REASONS` where not kept, -1 where kept."""
    dropped: dict[str, int]
    """Completions not kept, counted by reason; the counts add up to all that are not kept."""

    def __post_init__(self) -> None:
        freeze(self)


def freeze(result: object) -> None:
    """Make every array of a result read-only: what was decided stays decided."""
    for value in vars(result).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


def check_inclusion(pi: ArrayLike, *, name: str = "pi", ndim: int | None = None) -> Floats:
    """Return `pi` as float64 after checking that every entry is a probability."""
    probability = finite(name, pi, ndim=ndim)
    reject(name, probability, (probability < 0) | (probability > 1), "must be in [0, 1]")
    return probability
