"""Which rows share a bin.

*Window-greedy*: when a bin opens it takes the oldest unplaced item; then, as long as one fits, the
largest of the `window` oldest unplaced items that does. So an item is placed at most `window`
bins after it came into view, and the order of the items changes only so far (the paper's Dense
Prompt Packing, arXiv 2603.04135, section 4.3, is window-based and greedy; its details are ours).

*Bucket*: items of like length side by side in rectangles of at most so many tokens.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo._checks import as_floats, natural, reject
from dppo.errors import InvalidInputError

__all__ = ["Packing", "bucket", "pack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Packing:
    """Bins of items, every item in exactly one of them.

    Example:
        >>> import dppo
        >>> [bin.tolist() for bin in dppo.pack([6, 5, 4, 3], capacity=10).bins]
        [[0, 2], [1, 3]]
    """

    bins: list[Ints]
    """Indices of the items of each bin, in the order in which they lie in it."""
    lengths: Ints
    """Shape (N,). Tokens of each item."""
    capacity: int
    """Tokens that a bin holds; an item that is longer has a bin of its own."""

    @property
    def token_density(self) -> float:
        """Real tokens per token of the bins: sum(lengths) / sum of the bins' sizes.

        A bin's size is its capacity, or its longest item if that is longer; the last bin ends where
        its items do. 1.0 where there is no token.
        """
        sizes = [max(self.capacity, int(self.lengths[b].max())) for b in self.bins[:-1]]
        sizes += [int(self.lengths[b].sum()) for b in self.bins[-1:]]
        total = int(self.lengths.sum())
        return total / sum(sizes) if total else 1.0

    @property
    def bin_of_item(self) -> Ints:
        """Shape (N,). The bin that each item is in: what restores the input order."""
        place = np.empty(self.lengths.size, dtype=np.int64)
        for number, items in enumerate(self.bins):
            place[items] = number
        return place


def pack(lengths: ArrayLike, *, capacity: int = 1024, window: int = 64) -> Packing:
    """Pack items into bins, window-greedy; deterministic, in linear time.

    Args:
        lengths: Shape (N,). Tokens of each item, whole numbers >= 0, oldest item first.
        capacity: Tokens of a bin, >= 1. A longer item gets a bin of its own.
        window: How many of the oldest unplaced items may be chosen from, >= 1.

    Raises:
        InvalidInputError: A length is negative or no whole number, or an option is below 1.

    Example:
        >>> import dppo
        >>> dppo.pack([700, 400, 300, 600], capacity=1000, window=4).token_density
        1.0
    """
    sizes = _lengths(lengths)
    if natural("capacity", capacity) < 1 or natural("window", window) < 1:
        raise InvalidInputError(f"capacity={capacity} and window={window} must be at least 1")
    return Packing(_window_greedy(sizes.tolist(), capacity, window), sizes, capacity)


def _window_greedy(sizes: list[int], capacity: int, window: int) -> list[Ints]:
    count = len(sizes)
    # Items in view as length * count + (count - 1 - index): largest first, then oldest.
    view: list[int] = []
    placed = bytearray(count)
    oldest, entered = 0, 0
    bins: list[Ints] = []
    while True:
        while oldest < count and placed[oldest]:
            oldest += 1
        if oldest == count:
            return bins
        while entered < count and len(view) < window:
            insort(view, sizes[entered] * count + count - 1 - entered)
            entered += 1
        item = oldest
        del view[bisect_right(view, sizes[item] * count + count - 1 - item) - 1]
        items, room = [item], capacity - sizes[item]
        placed[item] = 1
        while room >= 0:  # below 0: longer than the capacity
            if entered < count:
                insort(view, sizes[entered] * count + count - 1 - entered)
                entered += 1
            fitting = bisect_right(view, room * count + count - 1) - 1
            if fitting < 0:
                break
            length, reverse = divmod(view.pop(fitting), count)
            items.append(count - 1 - reverse)
            placed[items[-1]] = 1
            room -= length
        bins.append(np.array(items, dtype=np.int64))


def bucket(lengths: ArrayLike, *, budget: int, most_rows: int | None = None) -> list[Ints]:
    """Rectangular batches of items of like length: rows times the longest row is at most `budget`.

    Args:
        lengths: Shape (N,). Tokens of each item, whole numbers >= 0.
        budget: Tokens of a batch, padding included, >= 1. A longer item has a batch of its own.
        most_rows: Rows of a batch; None: as many as fit.

    Returns:
        Indices of the items of each batch, longest first.

    Raises:
        InvalidInputError: A length is negative or no whole number, or an option is below 1.

    Example:
        >>> from dppo.packing import bucket
        >>> [batch.tolist() for batch in bucket([2, 9, 8, 3], budget=18)]
        [[1, 2], [3, 0]]
    """
    sizes = _lengths(lengths)
    if natural("budget", budget) < 1 or (
        most_rows is not None and natural("most_rows", most_rows) < 1
    ):
        raise InvalidInputError(f"budget={budget} and most_rows={most_rows} must be at least 1")
    order = np.argsort(-sizes, kind="stable")
    starts, width = [0], 1
    for place, length in enumerate(sizes[order].tolist()):
        rows = place - starts[-1]
        if rows == 0:
            width = max(length, 1)
        elif (rows + 1) * width > budget or rows == most_rows:
            starts.append(place)
            width = max(length, 1)
    ends = [*starts, sizes.size] if sizes.size else []
    return [order[first:last] for first, last in pairwise(ends)]


def _lengths(value: ArrayLike) -> Ints:
    lengths = as_floats("lengths", value) if np.size(value) else np.zeros(0)
    if lengths.ndim != 1:
        raise InvalidInputError(f"lengths must have 1 dimension, got shape {lengths.shape}")
    whole = (lengths >= 0) & (lengths == np.floor(lengths)) & (lengths < 2**53)
    reject("lengths", lengths, ~whole, "must be whole numbers >= 0")
    return lengths.astype(np.int64)
