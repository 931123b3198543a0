"""Which micro-step trains which row. numpy only: every rank computes the whole of it, alike.

A generation of N = W * b * S rows (W ranks, b rows a micro-batch, S = steps_per_generation) serves
S * mu micro-steps (mu = num_iterations). Rows have an order, drawn for all ranks at once: the next
W * b of it are trained in micro-step i*S + s of every pass i, by whichever rank. So the optimizer
step that trains a row depends on the order and on the rows of an optimizer step alone, not on how
many ranks share them. Optimizer steps close after every `gradient_accumulation_steps`
micro-steps, wherever a generation happens to begin or end. A *segment* is a run of micro-steps
within one pass and one optimizer step: its survivors may share its micro-batches freely, since
their gradients are added up at the same parameters.

Suffixes: `_N` all rows of a generation in global order, `_R` rows of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dppo.estimator.designs import generator
from dppo.packing.spread import PADDING, Room, spread

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    """Global row, or `PADDING`."""
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
    def rows_of_all(self) -> int:
        """Rows of all ranks in one generation, N."""
        return self.ranks * self.rows

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


def order_of_rows(geometry: Geometry, *, seed: int, generation: int, moves: bool = True) -> Ints:
    """Place of each row in the order in which they would be trained unpruned, shape (N,).

    Drawn before any selection, from the stream "shuffle". Place p is trained in micro-step
    p // (W b) of a pass, in micro-batch p // b of all ranks'.

    Args:
        geometry: The sizes.
        seed: Of the run.
        generation: Generation counter.
        moves: Whether a row may leave the rank that it was rolled out on; else each rank's rows
            have an order of their own, and the steps follow from the number of ranks.
    """
    key_N = generator(seed, generation, stream="shuffle").random(geometry.rows_of_all)
    place_N = np.empty(key_N.size, dtype=np.int64)
    order_N = np.argsort(key_N, kind="stable")
    if not moves:
        home = order_N // geometry.rows
        of_rank = [order_N[home == rank] for rank in range(geometry.ranks)]
        shape = (geometry.ranks, geometry.steps_per_generation, geometry.micro_batch)
        order_N = np.stack(of_rank).reshape(shape).swapaxes(0, 1).ravel()
    place_N[order_N] = np.arange(key_N.size)
    return place_N


def micro_step_of_rows(place_N: Ints, geometry: Geometry) -> Ints:
    """Micro-step (0..S-1, within a pass) in which each row would be trained, shape (N,)."""
    return place_N // (geometry.ranks * geometry.micro_batch)


def optimizer_step_of_rows(
    micro_step_N: Ints, cut: Sequence[Segment], geometry: Geometry, iteration: int
) -> Ints:
    """Optimizer step that trains each row in pass `iteration`, shape (N,)."""
    of_micro_step = np.empty(geometry.micro_steps, dtype=np.int64)
    for segment in cut:
        of_micro_step[segment.first : segment.last] = segment.optimizer_step
    return of_micro_step[iteration * geometry.steps_per_generation + micro_step_N]


def original_tokens(loss_tokens_N: Ints, place_N: Ints, geometry: Geometry) -> Floats:
    """Loss tokens of each row's micro-batch before pruning, shape (N,)."""
    batch_N = place_N // geometry.micro_batch
    return np.bincount(batch_N, weights=loss_tokens_N)[batch_N].astype(np.float64)


def layout(
    segment: Segment,
    kept_N: Bools,
    *,
    micro_step_N: Ints,
    length_N: Ints,
    geometry: Geometry,
    sort: bool,
    room: Room | None = None,
    moves: bool = True,
) -> list[Ints | None]:
    """Lay the survivors of a segment out over its micro-steps, as few as will hold them.

    They come last in the segment, where gradients are synchronised; what is not needed is None. A
    segment that closes an optimizer step has at least one, if only of padding, so that the step
    acts on zero gradients as the full batch would, not on missing ones.

    Args:
        segment: The micro-steps.
        kept_N: Shape (N,). Survivors of the pass.
        micro_step_N: As `micro_step_of_rows` gives it.
        length_N: Shape (N,). Tokens of each row, prompt included.
        geometry: The sizes.
        sort: Longest first, so that rows of like length share a micro-batch; else random order.
        room: Of a micro-batch, where its rows are packed; None: as many rows as before.
        moves: Whether a row may leave the rank that it was rolled out on.

    Returns:
        Rows of the micro-batches of all ranks, as `spread` gives them.
    """
    position_N = segment.iteration * geometry.steps_per_generation + micro_step_N
    bins = spread(
        kept_N & (position_N >= segment.first) & (position_N < segment.last),
        -length_N if sort else micro_step_N,
        length_N,
        ranks=geometry.ranks,
        micro_batch=geometry.micro_batch,
        room=room,
        most=segment.last - segment.first,
        at_least=int(segment.closes),
        moves=moves,
    )
    return [*[None] * (segment.last - segment.first - len(bins)), *bins]


def micro_batch_of(
    rows_R: Ints, weight_N: Floats, full_tokens_N: Floats, segment: Segment
) -> MicroBatch:
    """What a rank runs of these rows, `PADDING` among them."""
    real_R = rows_R != PADDING
    weight_R = np.where(real_R, weight_N[rows_R], 0.0)
    return MicroBatch(rows_R, weight_R, np.where(real_R, full_tokens_N[rows_R], 1.0), segment)
