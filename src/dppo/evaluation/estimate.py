"""Estimates over the items of a benchmark, and over benchmarks. Plain numbers, no framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dppo.errors import InvalidInputError


@dataclass(frozen=True)
class Estimate:
    """A mean and how well it is known.

    Attributes:
        mean: NaN if nothing could be counted.
        standard_error: Over items; NaN for fewer than two.
        count: Items in the mean.
        left_out: Items without a value.
    """

    mean: float
    standard_error: float
    count: int
    left_out: int = 0


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n completions, drawn without replacement, hold a correct one.

    Unbiased for the chance of k fresh completions (Chen et al. 2021, arXiv 2107.03374).

    Args:
        n: Completions of the item.
        correct: How many of them are right.
        k: At most `n`.

    Returns:
        1 - C(n - correct, k) / C(n, k).

    Raises:
        InvalidInputError: k is below 1 or above n, or `correct` is not in 0..n.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise InvalidInputError(f"pass@{k} of {n} completions, {correct} of them correct")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def over_items(values: Sequence[float | None]) -> Estimate:
    """Mean and standard error (ddof 1) of the values there are.

    Example:
        >>> over_items([0.0, 1.0, None])
        Estimate(mean=0.5, standard_error=0.5, count=2, left_out=1)
    """
    there = [value for value in values if value is not None]
    count, left_out = len(there), len(values) - len(there)
    if not count:
        return Estimate(math.nan, math.nan, 0, left_out)
    mean = sum(there) / count
    squares = sum((value - mean) ** 2 for value in there)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan
    return Estimate(mean, error, count, left_out)


def over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of benchmarks, each of the same weight whatever its size.

    The items of different benchmarks are independent, so the squared errors add up.

    Args:
        estimates: One for each benchmark.

    Returns:
        The estimate; NaN if a benchmark has none, for a mean over the others would be of
        something else.
    """
    size = len(estimates)
    error = math.sqrt(sum(one.standard_error**2 for one in estimates)) / size
    return Estimate(
        sum(one.mean for one in estimates) / size,
        error,
        sum(one.count for one in estimates),
        sum(one.left_out for one in estimates),
    )
