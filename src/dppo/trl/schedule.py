"""Which micro-step trains which row. numpy only: every rank computes the whole of it, alike.

A generation of B rows a rank serves S * mu micro-steps (S = steps_per_generation, mu =
num_iterations). The host trains rows [s*b, (s+1)*b) of its shuffled generation in micro-step
i*S + s of every pass i. Optimizer steps close after every `gradient_accumulation_steps`
micro-steps, wherever a generation happens to begin or end. A *segment* is a run of micro-steps
within one pass and one optimizer step: its survivors may share its micro-batches freely, since
their gradients are added up at the same parameters.

Suffixes: `_N` all rows of a generation in global order, `_R` rows of a micro-batch.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dppo.estimator.designs import generator
from dppo.packing.layout import Price, Trees, share, trees

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PADDING = -1
"""Row index of a row without tokens, there because ranks must run equally many rows."""


@dataclass(frozen=True)
class Segment:
    """Micro-steps [first, last) of a generation, in one pass and one optimizer step."""

    first: int
    last: int
    iteration: int
    optimizer_step: int
    closes: bool
    """Whether an optimizer step follows, or may follow."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank runs in one micro-step."""

    rows_R: Ints
    """Row of the rank's generation, or `PADDING`."""
    weight_R: Floats
    """Horvitz-Thompson weight; 0 for padding."""
    full_tokens_R: Floats
    """Loss tokens of the micro-batch that the row would have been trained in unpruned."""
    segment: Segment


@dataclass(frozen=True)
class Geometry:
    """The sizes that fix which micro-step trains which row."""

    ranks: int
    micro_batch: int
    """Rows of a micro-batch of one rank, b."""
    steps_per_generation: int
    iterations: int
    accumulation: int

    @property
    def rows(self) -> int:
        """Rows of a rank in one generation, b * S."""
        return self.micro_batch * self.steps_per_generation

    @property
    def micro_steps(self) -> int:
        """Micro-steps that one generation serves, S * mu."""
        return self.steps_per_generation * self.iterations


@lru_cache(maxsize=16)
def segments(geometry: Geometry, *, window_left: int) -> tuple[Segment, ...]:
    """Cut the micro-steps of a generation at pass and optimizer-step boundaries.

    Args:
        geometry: The sizes.
        window_left: Micro-steps until the optimizer step under way closes, >= 1.
    """
    total, per_pass = geometry.micro_steps, geometry.steps_per_generation
    closing = np.arange(window_left, total + 1, geometry.accumulation)
    cuts = np.unique(np.concatenate(([0, total], np.arange(0, total, per_pass), closing)))
    cuts = cuts[cuts <= total]
    return tuple(
        Segment(
            first=first,
            last=last,
            iteration=first // per_pass,
            optimizer_step=int((closing <= first).sum()),
            # At the end of an epoch a step also closes early, with the generation.
            closes=bool((closing == last).any()) or last == total,
        )
        for first, last in pairwise(cuts.tolist())
    )


def micro_step_of_rows(geometry: Geometry, *, seed: int, generation: int) -> Ints:
    """Micro-step (0..S-1, within a pass) in which each row would be trained unpruned, shape (N,).

    Drawn for all ranks at once, before any selection, from the stream "shuffle"; a rank's rows stay
    with the rank.
    """
    rng = generator(seed, generation, stream="shuffle")
    key = rng.random(geometry.ranks * geometry.rows).reshape(geometry.ranks, geometry.rows)
    of_place = np.repeat(np.arange(geometry.steps_per_generation), geometry.micro_batch)
    micro_step = np.empty(key.shape, dtype=np.int64)
    np.put_along_axis(micro_step, np.argsort(key, axis=1, kind="stable"), of_place[None], axis=1)
    return micro_step.ravel()


def optimizer_step_of_rows(
    micro_step_N: Ints, cut: Sequence[Segment], geometry: Geometry, iteration: int
) -> Ints:
    """Optimizer step that trains each row in pass `iteration`, shape (N,)."""
    of_micro_step = np.empty(geometry.micro_steps, dtype=np.int64)
    for segment in cut:
        of_micro_step[segment.first : segment.last] = segment.optimizer_step
    return of_micro_step[iteration * geometry.steps_per_generation + micro_step_N]


def original_tokens(loss_tokens_N: Ints, micro_step_N: Ints, geometry: Geometry) -> Floats:
    """Loss tokens of each row's micro-batch before pruning, shape (N,)."""
    rank_N = np.repeat(np.arange(geometry.ranks), geometry.rows)
    batch_N = rank_N * geometry.steps_per_generation + micro_step_N
    return np.bincount(batch_N, weights=loss_tokens_N)[batch_N].astype(np.float64)


def even_bins(rows: Ints, *, most: int, capacity: int, at_least: int = 0) -> list[Ints]:
    """Split `rows`, in order, into as few bins as hold `most` rows, filled up with `PADDING`.

    The number of bins and their sizes depend on `most` alone, the largest number of rows on any
    rank, so that they are the same on all ranks.
    """
    count = max(-(-most // capacity), at_least)
    if count == 0:
        return []
    ends = np.cumsum([len(part) for part in np.array_split(np.empty(max(most, 1)), count)])
    padded = np.concatenate((rows, np.full(ends[-1] - rows.size, PADDING, dtype=np.int64)))
    return np.split(padded, ends[:-1])


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

    def units(self, rows_W: Sequence[Ints]) -> list[Trees]:
        """Rows of every rank, grouped where they are better computed together."""

        def of(rows: Ints) -> tuple[Ints, Ints, Ints]:
            return self.prompt_N[rows], self.completion_N[rows], self.group_N[rows]

        most = share(*of(np.concatenate(rows_W)), price=self.price) if self.shares else 1
        found = [trees(*of(rows), most=most, longest=self.filled) for rows in rows_W]
        return [
            Trees([rows[members] for members in unit.members_T], unit.tokens_T)
            for rows, unit in zip(rows_W, found, strict=True)
        ]


def dense_bins(
    rows_W: Sequence[Ints], room: Room, *, most: int, at_least: int = 0
) -> list[list[Ints]] | None:
    """Split the rows of every rank into bins of about equal tokens, as few as hold them.

    The number of bins, and the rows of a bin, are the same on all ranks (filled up with `PADDING`,
    which a packed forward does not compute). Largest unit first, into the emptiest bin.

    Args:
        rows_W: Of each rank, global indices.
        room: Of a bin.
        most: Bins there may be.
        at_least: Bins there must be.

    Returns:
        The bins of each rank; None if `most` bins do not hold them.
    """
    units = room.units(rows_W)
    tokens = max(int(unit.tokens_T.sum()) for unit in units)
    for count in range(max(-(-tokens // room.filled), at_least), most + 1):
        split = [_balanced(unit, count) for unit in units]
        if all(load <= room.filled for bins in split for load, _ in bins):
            sizes = [max(1, *(len(bins[i][1]) for bins in split)) for i in range(count)]
            return [
                [_filled(b, n) for (_, b), n in zip(bins, sizes, strict=True)] for bins in split
            ]
    return None


def _balanced(units: Trees, count: int) -> list[tuple[int, Ints]]:
    """Load and rows of `count` bins, heaviest first (longest processing time; Graham 1969)."""
    bins: list[tuple[int, int, list[Ints]]] = [(0, number, []) for number in range(count)]
    for unit in np.argsort(-units.tokens_T, kind="stable").tolist():
        load, number, members = heapq.heappop(bins)
        members = [*members, units.members_T[unit]]
        heapq.heappush(bins, (load + int(units.tokens_T[unit]), number, members))
    nothing = np.zeros(0, dtype=np.int64)
    return [(load, np.concatenate([nothing, *members])) for load, _, members in sorted(bins)[::-1]]


def _filled(rows: Ints, size: int) -> Ints:
    return np.concatenate((rows, np.full(size - rows.size, PADDING, dtype=np.int64)))


def row_bins(
    here_N: Bools,
    key_N: Ints,
    *,
    geometry: Geometry,
    rank: int,
    room: Room | None,
    most: int,
    at_least: int = 0,
) -> list[Ints]:
    """The rows of a rank that are `here_N`, in as few bins as hold them; as many on every rank.

    Args:
        here_N: Shape (N,). Which rows.
        key_N: Shape (N,). In which order, where bins are cut by rows.
        geometry: The sizes.
        rank: Whose bins to return.
        room: Of a bin, where it is packed; None: `micro_batch` rows.
        most: Bins there may be.
        at_least: Bins there must be.

    Returns:
        Rows of the rank's generation, or `PADDING`.
    """
    rows_W = [np.flatnonzero(here_B) for here_B in here_N.reshape(geometry.ranks, geometry.rows)]
    start = rank * geometry.rows
    if room is not None:
        of_all = [rows + r * geometry.rows for r, rows in enumerate(rows_W)]
        dense = dense_bins(of_all, room, most=most, at_least=at_least)
        if dense is not None:
            return [np.where(rows == PADDING, PADDING, rows - start) for rows in dense[rank]]
    mine = rows_W[rank]
    return even_bins(
        mine[np.argsort(key_N[start + mine], kind="stable")],
        most=max(rows.size for rows in rows_W),
        capacity=geometry.micro_batch,
        at_least=at_least,
    )


def layout(
    segment: Segment,
    kept_N: Bools,
    weight_N: Floats,
    *,
    micro_step_N: Ints,
    full_tokens_N: Floats,
    length_N: Ints,
    geometry: Geometry,
    rank: int,
    sort: bool,
    room: Room | None = None,
) -> list[MicroBatch | None]:
    """Lay the survivors of a segment out over its micro-steps, as few as will hold them.

    All ranks get the same number of micro-batches of the same number of rows. They come last in
    the segment, where gradients are synchronised; what is not needed is None. A segment that
    closes an optimizer step has at least one, if only of padding, so that the step acts on
    zero gradients as the full batch would, not on missing ones.

    Args:
        segment: The micro-steps.
        kept_N: Shape (N,). Survivors of the pass.
        weight_N: Shape (N,).
        micro_step_N: As `micro_step_of_rows` gives it.
        full_tokens_N: As `original_tokens` gives it.
        length_N: Shape (N,). Tokens of each row, prompt included.
        geometry: The sizes.
        rank: Whose micro-batches to return.
        sort: Longest first, so that rows of like length share a micro-batch; else random order.
        room: Of a micro-batch, where its rows are packed; None: as many rows as before.
    """
    position_N = segment.iteration * geometry.steps_per_generation + micro_step_N
    here_N = kept_N & (position_N >= segment.first) & (position_N < segment.last)
    bins = row_bins(
        here_N,
        -length_N if sort else micro_step_N,
        geometry=geometry,
        rank=rank,
        room=room,
        most=segment.last - segment.first,
        at_least=int(segment.closes),
    )
    start = rank * geometry.rows
    result: list[MicroBatch | None] = [None] * (segment.last - segment.first - len(bins))
    for rows_R in bins:
        real_R, global_R = rows_R != PADDING, start + rows_R
        weight_R = np.where(real_R, weight_N[global_R], 0.0)
        full_tokens_R = np.where(real_R, full_tokens_N[global_R], 1.0)
        result.append(MicroBatch(rows_R, weight_R, full_tokens_R, segment))
    return result
