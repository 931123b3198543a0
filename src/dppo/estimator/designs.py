"""Probability -> selection: the sampling designs, and the generator that feeds them.

First-order inclusion probabilities alone decide unbiasedness, so the designs share their weights
and differ in variance only. Randomness is an argument: a generator is a pure function of what it
is for, so no rank, call order or resume can change a decision.

Suffixes: `_PG` prompts x group, `_N` flat rows in C order.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import Bools, Floats, Ints, as_array, finite, natural, not_empty, one_of
from dppo.errors import InvalidInputError
from dppo.types import Selection, check_inclusion

__all__ = ["generator", "outcomes", "poisson", "stratified_order", "systematic"]

STREAMS = ("completion", "prompt", "shuffle", "order")
DESIGNS = ("systematic", "poisson")
MOST_POISSON_UNITS = 16

INTEGER_TOLERANCE = 1e-12
"""A total this close to a whole number, relatively, is one: what pairwise float64 summation loses.
Stretching the line by it changes a probability by as little."""


def generator(
    seed: int, step: int, *, stream: str, iteration: int = 0, optimizer_step: int = 0
) -> np.random.Generator:
    """The random generator of one decision, a pure function of the arguments.

    Philox keyed by the first 128 bits of blake2b of the arguments, counter 0. Only its
    `random()` is used here; orders are argsorts of it, since numpy does not promise a stable
    `permutation`.

    Args:
        seed: The run's seed, >= 0.
        step: Generation counter, >= 0.
        stream: What is decided: "completion", "prompt", "shuffle" or "order".
        iteration: Pass over the same generation (num_iterations), >= 0.
        optimizer_step: Optimizer step within that pass, >= 0.

    Raises:
        InvalidInputError: An unknown stream, or a number that is negative or not whole.

    Example:
        >>> import dppo
        >>> a = dppo.generator(seed=0, step=17, stream="completion").random()
        >>> a == dppo.generator(seed=0, step=17, stream="completion").random()
        True
    """
    numbers = [
        natural(name, value)
        for name, value in (
            ("seed", seed),
            ("step", step),
            ("iteration", iteration),
            ("optimizer_step", optimizer_step),
        )
    ]
    text = f"dppo/{one_of('stream', stream, STREAMS)}/" + "/".join(map(str, numbers))
    key = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def stratified_order(advantages_PG: ArrayLike, rng: np.random.Generator) -> Ints:
    """Order for the systematic design: groups at random, in a group by sign, then at random.

    Neighbours in the order share their luck, so each group keeps nearly its expected share of
    right and wrong completions (implicit stratification).

    Args:
        advantages_PG: Shape (P, G).
        rng: From `generator`.

    Returns:
        Shape (P * G,). A permutation of the flat C-order indices.

    Example:
        >>> import dppo
        >>> rng = dppo.generator(seed=0, step=0, stream="order")
        >>> sorted(dppo.stratified_order([[1.0, -1.0], [0.5, -0.5]], rng).tolist())
        [0, 1, 2, 3]
    """
    advantages = finite("advantages_PG", advantages_PG, ndim=2)
    not_empty("advantages_PG", advantages)
    prompts, group = advantages.shape[0], advantages.shape[1]
    of_group = np.argsort(_uniform(rng, prompts), kind="stable")
    by_sign = np.sign(advantages) + _uniform(rng, advantages.size).reshape(prompts, group)
    of_row = np.argsort(by_sign, axis=1, kind="stable")
    return (of_group[:, None] * group + of_row[of_group]).ravel().astype(np.int64)


def systematic(
    pi: ArrayLike, rng: np.random.Generator, order: ArrayLike | None = None
) -> Selection:
    """Systematic sampling: one uniform number u, and every unit that a point u, u+1, ... hits.

    Units lie on a line, in `order`, each as long as its probability (Madow 1949). The number kept
    is fixed to within one; if the probabilities sum to a whole number it is exactly that number.

    Args:
        pi: Any shape. Inclusion probabilities in [0, 1].
        rng: From `generator`; one number is drawn.
        order: Permutation of the flat C-order indices; None means C order. Never random by itself:
            see `stratified_order`.

    Raises:
        InvalidInputError: Empty input, a probability outside [0, 1], or `order` no permutation.

    Example:
        >>> import dppo
        >>> rng = dppo.generator(seed=0, step=0, stream="completion")
        >>> int(dppo.systematic([0.5, 0.5, 0.5, 0.5], rng).kept.sum())
        2
    """
    probability = check_inclusion(pi)
    not_empty("pi", probability)
    order_N = _check_order(order, probability.size)
    kept = systematic_kept(probability.ravel(), order_N, rng)
    return Selection(kept.reshape(probability.shape), probability)


def systematic_kept(pi_N: Floats, order_N: Ints, rng: np.random.Generator) -> Bools:
    """`systematic` on arguments that have been checked, flat."""
    return _systematic(pi_N, _line(pi_N, order_N), float(rng.random()))


def poisson(pi: ArrayLike, rng: np.random.Generator) -> Selection:
    """Poisson sampling: an independent coin flip for every unit. The reference design.

    Args:
        pi: Any shape. Inclusion probabilities in [0, 1].
        rng: From `generator`; one number is drawn for each unit, in C order.

    Raises:
        InvalidInputError: Empty input or a probability outside [0, 1].

    Example:
        >>> import dppo
        >>> rng = dppo.generator(seed=0, step=0, stream="completion")
        >>> dppo.poisson([1.0, 0.0], rng).kept.tolist()
        [True, False]
    """
    probability = check_inclusion(pi)
    not_empty("pi", probability)
    return Selection(poisson_kept(probability, rng), probability)


def poisson_kept(pi: Floats, rng: np.random.Generator) -> Bools:
    """`poisson` on probabilities that have been checked."""
    return _uniform(rng, pi.size).reshape(pi.shape) < pi


def outcomes(
    pi: ArrayLike, *, design: str = "poisson", order: ArrayLike | None = None
) -> Iterator[tuple[float, Selection]]:
    """Every outcome of a design with its probability, for exact expectations.

    Args:
        pi: Any shape.
        design: "poisson" (at most 16 uncertain units: 2^n outcomes) or "systematic" (at most
            n + 1 outcomes, any n).
        order: As for `systematic`; only there.

    Returns:
        Iterator over (probability > 0, selection). The probabilities add up to 1.

    Raises:
        InvalidInputError: Unknown design, too many units, or `order` given with "poisson".

    Example:
        >>> import dppo
        >>> sum(p * s.weight for p, s in dppo.outcomes([0.5, 0.25])).tolist()
        [1.0, 1.0]
    """
    one_of("design", design, DESIGNS)
    probability = check_inclusion(pi)
    not_empty("pi", probability)
    if design == "systematic":
        return _systematic_outcomes(probability, _check_order(order, probability.size))
    if order is not None:
        raise InvalidInputError("order has no meaning for the poisson design; leave it out")
    uncertain = np.flatnonzero((probability > 0) & (probability < 1))
    if uncertain.size > MOST_POISSON_UNITS:
        raise InvalidInputError(
            f"pi has {uncertain.size} uncertain units, so 2^{uncertain.size} outcomes; at most "
            f"{MOST_POISSON_UNITS} can be enumerated, or use design='systematic'"
        )
    return _poisson_outcomes(probability, uncertain)


def _uniform(rng: np.random.Generator, count: int) -> Floats:
    return np.asarray(rng.random(count), dtype=np.float64)


def _check_order(order: ArrayLike | None, size: int) -> Ints:
    if order is None:
        return np.arange(size)
    permutation = as_array("order", order)
    if permutation.dtype.kind not in "iu" or not np.array_equal(
        np.sort(permutation, axis=None), np.arange(size)
    ):
        raise InvalidInputError(f"order must be a permutation of 0..{size - 1}, got {order!r}")
    return permutation.ravel().astype(np.int64)


class _Line:
    """The uncertain units on a line: `unit_N[j]` reaches from `start_N[j]` to `end_N[j]`."""

    def __init__(self, unit_N: Ints, pi_N: Floats) -> None:
        self.unit_N = unit_N
        self.end_N = np.cumsum(pi_N)
        if unit_N.size:
            total = float(pi_N.sum())  # pairwise, far closer than the running sum
            if abs(total - round(total)) <= INTEGER_TOLERANCE * total:
                total = float(round(total))  # 3.9999999 would now and then keep one unit too few
            self.end_N = np.minimum(self.end_N * (total / self.end_N[-1]), total)
            self.end_N[-1] = total
        self.start_N = np.concatenate(([0.0], self.end_N[:-1]))

    def hit(self, u: float) -> Bools:
        """Units in which a point u + k lies, k = 0, 1, ...; the unit holds its start."""
        return _points_below(self.end_N, u) > _points_below(self.start_N, u)


def _points_below(x: Floats, u: float) -> Floats:
    """How many of u, u + 1, ... are below x. Exact: x - u would round."""
    whole = np.floor(x)
    return whole + (x - whole > u)


def _line(pi_N: Floats, order_N: Ints) -> _Line:
    """Certain units (pi = 1) and inert ones (pi = 0) do not lie on the line."""
    unit_N = order_N[(pi_N[order_N] > 0) & (pi_N[order_N] < 1)]
    return _Line(unit_N, pi_N[unit_N])


def _systematic(pi_N: Floats, line: _Line, u: float) -> Bools:
    kept = pi_N == 1
    kept[line.unit_N[line.hit(u)]] = True
    return kept


def _systematic_outcomes(pi: Floats, order_N: Ints) -> Iterator[tuple[float, Selection]]:
    line = _line(pi.ravel(), order_N)
    # The outcome changes only where u passes the fractional part of an end point.
    cuts = np.unique(np.concatenate(([0.0, 1.0], line.end_N % 1.0)))
    for low, high in pairwise(cuts.tolist()):
        kept = _systematic(pi.ravel(), line, low)
        yield high - low, Selection(kept.reshape(pi.shape), pi)


def _poisson_outcomes(pi: Floats, uncertain: Ints) -> Iterator[tuple[float, Selection]]:
    flat = pi.ravel()
    for code in range(2**uncertain.size):
        flip = np.array([bool(code >> bit & 1) for bit in range(uncertain.size)], dtype=np.bool_)
        kept = flat == 1
        kept[uncertain[flip]] = True
        chosen = flat[uncertain]
        probability = float(np.prod(np.where(flip, chosen, 1 - chosen)))
        if probability > 0:  # else it underflowed
            yield probability, Selection(kept.reshape(pi.shape), pi)
