"""Rows spread over ranks and bins: near-equal tokens, and the same shapes on every rank.

A *bin* is what a rank runs in one micro-step. All ranks run their j-th bin at the same time, so it
comes as one array of shape (W, R_j), row w for rank w, filled up with `PADDING`. numpy only: every
rank computes the whole of it, alike.

Rows may go to any rank. Ranks are served in *rounds*: W rows, the longest to the rank that carries
the fewest tokens so far. A round changes the gap between two ranks to something between itself and
minus the spread of the round's rows, so the gap never exceeds the largest spread of a round, and
that never the longest row.

Suffixes: `_N` all rows of a generation in global order, `_W` ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dppo.packing.layout import Price, Trees, share, trees

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

PADDING = -1
"""Row index of a row without tokens, there because ranks must run equally many rows."""

EVEN = 1.05
"""Most tokens of a rank, per token of the mean, that splitting shared prompts will not better."""


@dataclass(frozen=True)
class Room:
    """What a packed micro-batch holds."""

    capacity: int
    """Tokens."""
    price: Price
    shares: bool
    """Whether completions to one prompt may be computed with it once."""
    prompt_N: Ints
    """Shape (N,). Prompt tokens of each row."""
    completion_N: Ints
    group_N: Ints
    """Shape (N,). Which prompt."""

    @property
    def filled(self) -> int:
        """Tokens to put in: dense rows are a little wider than what lies in them."""
        return max(int(self.capacity * 0.97), int((self.prompt_N + self.completion_N).max()), 1)

    def branches(self, rows: Ints) -> int:
        """Completions that are best computed with one prompt."""
        return share(*self._of(rows), price=self.price) if self.shares else 1

    def units(self, rows: Ints, *, branches: int) -> Trees:
        """Rows, grouped where they are computed together."""
        found = trees(*self._of(rows), most=branches, longest=self.filled)
        return Trees([rows[members] for members in found.members_T], found.tokens_T)

    def _of(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        return self.prompt_N[rows], self.completion_N[rows], self.group_N[rows]


def spread(
    here_N: Bools,
    key_N: Ints,
    length_N: Ints,
    *,
    ranks: int,
    micro_batch: int,
    room: Room | None,
    most: int,
    at_least: int = 0,
    moves: bool = True,
) -> list[Ints]:
    """The rows that are `here_N`, in as few bins as hold them.

    Args:
        here_N: Shape (N,). Which rows.
        key_N: Shape (N,). In which order, where bins are cut by rows.
        length_N: Shape (N,). Tokens, prompt included.
        ranks: Number of ranks, W.
        micro_batch: Rows of a bin that is not packed.
        room: Of a bin, where it is packed; None: `micro_batch` rows.
        most: Packed bins there may be; more are cut by rows instead.
        at_least: Bins there must be, 0 or 1.
        moves: Whether a row may leave the rank that it was rolled out on.

    Returns:
        For each bin an array of shape (W, R_j): global rows, or `PADDING`.
    """
    rows = np.flatnonzero(here_N)
    if room is not None and moves:
        dense = dense_bins(rows, length_N, room, ranks=ranks, most=most, at_least=at_least)
        if dense is not None:
            return dense
    rows = rows[np.argsort(key_N[rows], kind="stable")]
    if moves:
        table = _in_rounds(rows, length_N, ranks)
    else:
        home = rows // (here_N.size // ranks)
        table = _filled([rows[home == rank] for rank in range(ranks)])
    count = max(-(-table.shape[1] // micro_batch), at_least)
    if count and not table.shape[1]:
        table = np.full((ranks, 1), PADDING)
    return np.array_split(table, count, axis=1) if count else []


def _in_rounds(rows: Ints, tokens_N: Ints, ranks: int) -> Ints:
    """Shape (W, rounds). Deal rows out, W at a time, the most tokens to the lightest rank."""
    rounds = -(-rows.size // ranks)
    table = np.full((rounds, ranks), PADDING, dtype=np.int64)
    table.ravel()[: rows.size] = rows
    tokens = np.where(table == PADDING, 0, tokens_N[table])
    load_W = np.zeros(ranks, dtype=np.int64)
    for number in range(rounds):
        heaviest = np.argsort(-tokens[number], kind="stable")
        lightest = np.argsort(load_W, kind="stable")
        load_W[lightest] += tokens[number, heaviest]
        table[number, lightest] = table[number, heaviest]
    return np.ascontiguousarray(table.T)


def dense_bins(
    rows: Ints, length_N: Ints, room: Room, *, ranks: int, most: int, at_least: int = 0
) -> list[Ints] | None:
    """Split rows into bins of about equal tokens, as few a rank as hold them.

    Where several completions computed with one prompt make a unit too large for ranks to carry
    about the same, fewer are.

    Args:
        rows: Global indices.
        length_N: Shape (N,). Tokens, prompt included.
        room: Of a bin.
        ranks: Number of ranks, W.
        most: Bins there may be on a rank.
        at_least: Bins there must be.

    Returns:
        For each bin an array of shape (W, R_j); None if `most` do not hold them.
    """
    branches = room.branches(rows) if rows.size else 1
    while True:
        units = room.units(rows, branches=branches)
        bins = _fitted(units, room, ranks=ranks, most=most, at_least=at_least)
        if branches == 1 or bins is None or _even(bins, ranks, int(length_N[rows].max())):
            break
        branches //= 2
    if bins is None:
        return None
    members, load = [m for _, m in bins], np.array([load for load, _ in bins], dtype=np.int64)
    bins_of: list[list[int]] = _in_rounds(np.arange(len(bins)), load, ranks).T.tolist()
    return [_filled([members[b] for b in bin_W], at_least=1) for bin_W in bins_of]


def _fitted(
    units: Trees, room: Room, *, ranks: int, most: int, at_least: int
) -> list[tuple[int, Ints]] | None:
    """Load and rows of the bins of all ranks, heaviest first; None if `most` a rank are too few."""
    tokens = int(units.tokens_T.sum())
    for count in range(max(-(-tokens // (ranks * room.filled)), at_least), most + 1):
        bins = _balanced(units, ranks * count)
        if all(load <= room.filled for load, _ in bins):
            return bins
    return None


def _balanced(units: Trees, count: int) -> list[tuple[int, Ints]]:
    """Load and rows of `count` bins, heaviest first (longest processing time; Graham 1969)."""
    bins: list[tuple[int, int, list[Ints]]] = [(0, number, []) for number in range(count)]
    order: list[int] = np.argsort(-units.tokens_T, kind="stable").tolist()
    for unit in order:
        load, number, members = bins[0]
        members.append(units.members_T[unit])
        heapq.heapreplace(bins, (load + int(units.tokens_T[unit]), number, members))
    nothing = np.zeros(0, dtype=np.int64)
    return [(load, np.concatenate([nothing, *members])) for load, _, members in sorted(bins)[::-1]]


def _even(bins: Sequence[tuple[int, Ints]], ranks: int, longest: int) -> bool:
    """Whether ranks carry about the same, however the bins are dealt out in rounds."""
    load = [load for load, _ in bins]
    gap = max((load[i] - load[i + ranks - 1] for i in range(0, len(load), ranks)), default=0)
    return gap <= max((EVEN - 1) * sum(load) / ranks, longest)


def _filled(rows_W: Sequence[Ints], *, at_least: int = 0) -> Ints:
    """Shape (W, R). Rows of each rank, as many on all."""
    width = max(at_least, *(rows.size for rows in rows_W))
    table = np.full((len(rows_W), width), PADDING, dtype=np.int64)
    for place, rows in zip(table, rows_W, strict=True):
        place[: rows.size] = rows
    return table


def held(bins: Sequence[Ints | None], ranks: int) -> list[Ints]:
    """The rows that each rank runs in any of the bins, in global order."""
    parts = [b for b in bins if b is not None]
    if not parts:
        return [np.zeros(0, dtype=np.int64)] * ranks
    table = np.concatenate(parts, axis=1)
    return [np.unique(rows[rows != PADDING]) for rows in table]


def loads(
    bins: Sequence[Ints | None], prompt_N: Ints, completion_N: Ints, group_N: Ints | None = None
) -> Ints:
    """Shape (W,). Tokens that each rank runs.

    Args:
        bins: As `spread` gives them.
        prompt_N: Shape (N,).
        completion_N: Shape (N,).
        group_N: Equal where a bin computes a prompt once; None: nowhere.
    """
    parts = [rows_WR for rows_WR in bins if rows_WR is not None]
    total = np.zeros(len(parts[0]) if parts else 1, dtype=np.int64)
    for rows_WR in parts:
        rank, column = np.nonzero(rows_WR != PADDING)
        rows = rows_WR[rank, column]
        np.add.at(total, rank, completion_N[rows])
        if group_N is not None:
            first = np.unique(rank * group_N.size + group_N[rows], return_index=True)[1]
            rank, rows = rank[first], rows[first]
        np.add.at(total, rank, prompt_N[rows])
    return total
