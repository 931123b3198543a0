"""From what a rollout returned to what is trained: one decision per generation, alike on all ranks.

Suffixes: `_N` all rows of the generation in global order, `_B` rows of this rank, `_PG` prompts x
group (the global order, reshaped: groups are contiguous), `_F` reward functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.estimator.sizes import DEFAULT_ADVANTAGE_FLOOR
from dppo.estimator.weights import Kind, loss_denominator, prompt_phase_factor
from dppo.packing.spread import Room, loads, spread
from dppo.pruner import DROP_REASONS, Pruner
from dppo.trl import schedule
from dppo.trl.schedule import Geometry, MicroBatch, Segment
from dppo.trl.signal import Signal
from dppo.trl.windows import Window
from dppo.types import CompletionChoice

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The gathered facts of a generation, every field of shape (N,)."""

    prompt_tokens: NDArray[np.int64]
    completion_tokens: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    """Tokens under the loss mask: 0 where truncated and masked, without tool results."""
    surprisal: Floats
    """Surprisal norm, NaN where the rollout gave no log-probs."""
    prompt_hash: NDArray[np.int64] | None = None
    """Equal where prompts are; None: not known."""

    @classmethod
    def from_facts(cls, facts_N5: Floats) -> "Rows":
        """Columns as `Rollout.facts` lays them out."""
        prompt, completion, loss, same = facts_N5[:, [0, 1, 2, 4]].T.astype(np.int64)
        return cls(prompt, completion, loss, facts_N5[:, 3], same)

    def groups(self, size: int) -> NDArray[np.int64]:
        """Shape (N,). Equal where the prompt is that of the group and the same, token by token."""
        group_N = np.arange(self.prompt_tokens.size) // size
        if self.prompt_hash is None:
            return group_N
        pairs = np.stack((group_N, self.prompt_hash), axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].ravel()


@dataclass(frozen=True)
class Basis:
    """All that a generation is decided from, the same on every rank; a decision follows from it."""

    generation: int
    window_left: int
    """Micro-steps until the optimizer step under way closes."""
    keep: float | None
    """Rate in place of the configured one."""
    facts_N5: Floats
    """As `Rollout.facts` lays them out, of all ranks."""
    rewards_NF: NDArray[np.float32]

    def to_dict(self) -> dict[str, Any]:
        """Numbers and arrays."""
        return dict(vars(self))


@dataclass(frozen=True)
class Decision:
    """What of a generation is trained, in which micro-step and with which weight."""

    generation: int
    choices: list[CompletionChoice]
    """One for every pass over the generation."""
    dead_N: NDArray[np.bool_]
    rows: Rows
    segments: Sequence[Segment]
    micro_step_N: NDArray[np.int64]
    full_tokens_N: Floats
    """Loss tokens of each row's micro-batch before pruning."""
    training: list[NDArray[np.int64] | None]
    """Rows of every micro-step on every rank, see `spread`; None where nothing is left to run."""
    scoring: list[NDArray[np.int64]]
    """The same of the old and reference passes: rows that any pass trains on."""
    micro_batches: list[MicroBatch | None]
    """This rank's, one for every micro-step."""
    rewards_PG: NDArray[np.floating[Any]]
    window: Window | None
    """The candidates whose prompts these are, if prompts were drawn."""
    capacity: int | None = None
    """Tokens of a packed micro-batch."""
    shared_N: NDArray[np.int64] | None = None
    """Equal where completions may be computed with one prompt; None: nowhere."""

    @cached_property
    def digest(self) -> int:
        """Of what ranks must agree on, 63 bits: who is kept, and who runs what when."""
        state = blake2b(f"{self.generation}".encode(), digest_size=8)
        for part in (*(c.kept for c in self.choices), *self.training, *self.scoring):
            state.update(b"-" if part is None else f"{part.shape}".encode() + part.tobytes())
        return int.from_bytes(state.digest(), "little") >> 1

    @cached_property
    def imbalance(self) -> float:
        """Tokens of the rank that has most to train on, over the mean, less 1.

        A prompt counts once for the completions that are computed with it.
        """
        rows, group_N = self.rows, self.shared_N
        load_W = loads(self.training, rows.prompt_tokens, rows.completion_tokens, group_N)
        return float(load_W.max() / load_W.mean()) - 1 if load_W.any() else 0.0

    def prompt_factor(self, kind: Kind) -> float:
        """What to multiply gradients by, because the host divides by what was rolled out."""
        if self.window is None:
            return 1.0
        return prompt_phase_factor(
            kind,
            self.window.pi,
            candidates=len(self.window.ids_M),
            tokens_P=self.rows.loss_tokens.reshape(self.rewards_PG.shape).sum(axis=1),
        )

    @cached_property
    def reward(self) -> float:
        """Estimate of the mean reward of the candidates; without a window, the mean reward."""
        scored_PG = ~np.isnan(self.rewards_PG)
        count_P = scored_PG.sum(axis=1)
        mean_P = np.where(scored_PG, self.rewards_PG, 0.0).sum(axis=1) / np.maximum(count_P, 1)
        weight_P = np.ones(len(mean_P)) if self.window is None else 1 / self.window.pi
        prompts = len(mean_P) if self.window is None else len(self.window.ids_M)
        judged = prompts - float(weight_P[count_P == 0].sum())
        return float((weight_P * mean_P).sum()) / judged if judged > 0 else float("nan")

    @property
    def padded_density(self) -> float:
        """Real per computed tokens of the host's path, which pads the whole generation alike."""
        width, length_N = self._padded
        return float(length_N.sum()) / (width * length_N.size) if width else 1.0

    @property
    def padded_attended(self) -> float:
        """Pairs of tokens for which it computes attention, per pair of which one sees the other."""
        width, length_N = self._padded
        pairs = float((length_N * (length_N + 1)).sum()) / 2
        return width**2 * length_N.size / pairs if pairs else 1.0

    @property
    def _padded(self) -> tuple[int, NDArray[np.int64]]:
        rows = self.rows
        width = int(rows.prompt_tokens.max() + rows.completion_tokens.max())
        return width, rows.prompt_tokens + rows.completion_tokens

    @property
    def group_shares(self) -> dict[str, float]:
        """Shares of the groups whose scores are all 1, all 0, and that have no signal."""
        scored = ~np.isnan(self.rewards_PG)
        judged = scored.any(axis=1)

        def share(value: float) -> float:
            return float((judged & ((self.rewards_PG == value) | ~scored).all(axis=1)).mean())

        dead = ~self.choices[0].live.any(axis=1) | self.dead_N.reshape(scored.shape)[:, 0]
        return {"all_right": share(1.0), "all_wrong": share(0.0), "dead": float(dead.mean())}

    @property
    def kept_rewards(self) -> NDArray[np.floating[Any]]:
        """Rewards of the survivors of the first pass."""
        rewards = self.rewards_PG[self.choices[0].kept]
        return rewards[~np.isnan(rewards)]

    @property
    def observed_PG(self) -> NDArray[np.floating[Any]]:
        """Rewards as a history should know them: those of a group without signal do not differ.

        They may have differed where `signal_reward` says that there is none.
        """
        dead_PG = self.dead_N.reshape(self.rewards_PG.shape) & ~np.isnan(self.rewards_PG)
        return np.where(dead_PG, np.fmax.reduce(self.rewards_PG, axis=1)[:, None], self.rewards_PG)

    def denominators(self, segment: Segment, geometry: Geometry, *, rank: int) -> dict[str, float]:
        """Rows and loss tokens of a segment before pruning, of one rank.

        Where prompts were pruned, rows are the candidates' and tokens an estimate of theirs.
        """
        first = segment.iteration * geometry.steps_per_generation
        place = first + self.micro_step_N
        here = (place >= segment.first) & (place < segment.last)
        mine = np.arange(len(here)) // geometry.rows == rank
        tokens = self.rows.loss_tokens * (here & mine)
        live = self.choices[segment.iteration].live.ravel()
        rows = float((here & mine).sum())
        if self.window is not None:
            tokens = tokens * np.repeat(1 / self.window.pi, self.rewards_PG.shape[1])
            rows *= len(self.window.ids_M) / len(self.window.ids)
        return {
            "rows": rows,
            "tokens": float(tokens.sum()),
            "live_tokens": float((tokens * live).sum()),
        }

    def kept_per_micro_step(self) -> float:
        """Mean number of survivors per micro-step, empty ones included, all ranks."""
        return sum(int(c.kept.sum()) for c in self.choices) / len(self.micro_batches)

    @cached_property
    def tokens_by_reason(self) -> dict[str, float]:
        """Completion tokens not trained on, by reason, averaged over the passes."""
        tokens = self.rows.completion_tokens
        sums = [
            np.bincount(c.reason.ravel() + 1, weights=tokens, minlength=len(DROP_REASONS) + 1)[1:]
            for c in self.choices
        ]
        return dict(zip(DROP_REASONS, np.mean(sums, axis=0).tolist(), strict=True))


def decide(
    pruner: Pruner,
    told: Signal,
    rows: Rows,
    *,
    geometry: Geometry,
    rank: int,
    generation: int,
    window_left: int,
    loss_type: str,
    other_terms: bool,
    sort: bool,
    room: Room | None = None,
    keep: float | None = None,
    window: Window | None = None,
    order_seed: int | None = None,
    moves: bool = True,
) -> Decision:
    """Choose the survivors of every pass and lay them out over the micro-steps.

    Args:
        pruner: Makes the draws.
        told: What the rewards say.
        rows: What the rollout says.
        geometry: Sizes of the run.
        rank: Whose micro-batches to lay out; the choices do not depend on it.
        generation: Generation counter.
        window_left: Micro-steps until the optimizer step under way closes.
        loss_type: The host's.
        other_terms: Whether a term of the loss (KL, entropy) acts where the advantage is 0.
        sort: Whether rows of like length share micro-batches.
        room: Of a micro-batch, where its rows are packed; None: as many rows as before.
        keep: Rate in place of the configured one.
        window: The candidates that the prompts were drawn from.
        order_seed: Of which micro-step trains which row; None: the pruner's.
        moves: Whether a row may leave the rank that it was rolled out on.
    """
    shape = told.rewards_PG.shape
    cut = schedule.segments(geometry, window_left=window_left)
    order_seed = pruner.seed if order_seed is None else order_seed
    place_N = schedule.order_of_rows(geometry, seed=order_seed, generation=generation, moves=moves)
    micro_step_N = schedule.micro_step_of_rows(place_N, geometry)
    full_tokens_N = schedule.original_tokens(rows.loss_tokens, place_N, geometry)
    length_N = rows.prompt_tokens + rows.completion_tokens
    masked_PG = (rows.loss_tokens == 0).reshape(shape)
    own_divisor = loss_denominator(loss_type).kind == "micro-batch tokens"
    choices = [
        pruner.select_completions(
            told.rewards_PG,
            step=generation,
            advantages_PG=told.advantages_PG,
            prompts=None if window is None else window.selection,
            surprisal_PG=_surprisal(rows.surprisal, shape),
            lengths_PG=length_N.reshape(shape),
            # The host rounds in float32: a row whose advantage is exactly 0 here may be 1e-8 there.
            live=np.ones(shape) if other_terms else told.alive_PG,
            iteration=iteration,
            optimizer_step_PG=schedule.optimizer_step_of_rows(
                micro_step_N, cut, geometry, iteration
            ).reshape(shape),
            masked_PG=masked_PG,
            dead_P=told.dead_P,
            advantage_floor=DEFAULT_ADVANTAGE_FLOOR if other_terms else 0.0,
            denominator_PG=np.maximum(full_tokens_N, 1).reshape(shape) if own_divisor else None,
            keep=keep,
        )
        for iteration in range(geometry.iterations)
    ]
    training: list[NDArray[np.int64] | None] = []
    micro_batches: list[MicroBatch | None] = []
    for segment in cut:
        choice = choices[segment.iteration]
        bins = schedule.layout(
            segment,
            choice.kept.ravel(),
            micro_step_N=micro_step_N,
            length_N=length_N,
            geometry=geometry,
            sort=sort,
            room=room,
            moves=moves,
        )
        training += bins
        weight_N = choice.weight.ravel()
        micro_batches += [
            None
            if rows_WR is None
            else schedule.micro_batch_of(rows_WR[rank], weight_N, full_tokens_N, segment)
            for rows_WR in bins
        ]
    scoring = spread(
        np.logical_or.reduce([c.kept.ravel() for c in choices]),
        -length_N,
        length_N,
        ranks=geometry.ranks,
        micro_batch=geometry.micro_batch,
        room=room,
        most=geometry.steps_per_generation,
        moves=moves,
    )
    return Decision(
        generation=generation,
        choices=choices,
        dead_N=np.repeat(told.dead_P, shape[1]),
        rows=rows,
        segments=cut,
        micro_step_N=micro_step_N,
        full_tokens_N=full_tokens_N,
        training=training,
        scoring=scoring,
        micro_batches=micro_batches,
        rewards_PG=told.rewards_PG,
        window=window,
        capacity=None if room is None else room.capacity,
        shared_N=room.group_N if room is not None and room.shares else None,
    )


def _surprisal(surprisal_N: Floats, shape: tuple[int, ...]) -> Floats | None:
    """None if no row has one; a row that lacks it is taken for a typical one."""
    if np.isnan(surprisal_N).all():
        return None
    typical = np.nanmedian(surprisal_N)
    return np.where(np.isnan(surprisal_N), typical, surprisal_N).reshape(shape)
