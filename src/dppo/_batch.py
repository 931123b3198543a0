"""The checked input of one completion decision, and why a row of it may not be kept.

Suffixes: `_P` prompts, `_PG` prompts x group.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import (
    Bools,
    Floats,
    Ints,
    as_bools,
    as_floats,
    finite,
    non_negative,
    reject,
    same_shape,
)
from dppo.errors import InvalidInputError
from dppo.estimator.advantages import check_rewards, constant_groups, group_advantages
from dppo.types import Selection

DROP_REASONS = (
    "all_right",
    "all_wrong",
    "constant",
    "masked",
    "unscorable",
    "zero_advantage",
    "sampled_out",
)
"""Why a completion is not trained on, in the order in which they are logged. The first six have no
gradient: every reward of the group is 1, or 0, or the same other value; no token of the completion
is in the loss; it has no score, or its group fewer than two; its advantage happens to be 0."""


@dataclass(frozen=True)
class Batch:
    """Prompts x group, everything checked; advantages exactly 0 in dead groups."""

    advantages_PG: Floats
    scored_PG: Bools
    live_PG: Bools
    cost_PG: Floats
    reason_PG: Ints
    """Index into `DROP_REASONS` that applies if the row is not kept."""


def make_batch(
    rewards_PG: ArrayLike,
    *,
    advantages_PG: ArrayLike | None,
    lengths_PG: ArrayLike | None,
    prompt_lengths_P: ArrayLike | None,
    live: ArrayLike | None,
    masked_PG: ArrayLike | None,
    dead_P: ArrayLike | None,
    advantage_floor: float,
) -> Batch:
    """Check the arguments of `Pruner.select_completions` that describe the rows."""
    rewards = check_rewards(rewards_PG)
    shape = rewards.shape
    scored = ~np.isnan(rewards)
    scorable = scored.sum(axis=1) >= 2
    equal = constant_groups(rewards_PG)
    dead = scorable & equal if dead_P is None else as_bools("dead_P", dead_P, shape[:1])
    if advantages_PG is None:
        advantages = group_advantages(rewards_PG).values_PG
    else:
        advantages = finite("advantages_PG", advantages_PG, ndim=2)
        same_shape("advantages_PG", advantages, shape)
    advantages = np.where(dead[:, None], 0.0, advantages)
    masked = as_bools("masked_PG", np.zeros(shape) if masked_PG is None else masked_PG, shape)
    if live is not None:
        live_PG = as_bools("live", live, shape)
    elif non_negative("advantage_floor", advantage_floor) > 0:
        live_PG = np.ones(shape, dtype=np.bool_)
    else:
        live_PG = advantages != 0
    # A row that the caller calls inert though it has an advantage is out of the loss.
    masked = masked | (~live_PG & (advantages != 0))
    live_PG = live_PG & ~masked
    return Batch(
        advantages_PG=advantages,
        scored_PG=scored,
        live_PG=live_PG,
        cost_PG=_cost(lengths_PG, prompt_lengths_P, shape),
        reason_PG=_reasons(
            live_PG,
            masked,
            unscorable=~scored | ~scorable[:, None],
            dead=dead[:, None],
            value=np.where(equal, np.fmax.reduce(rewards, axis=1), np.nan)[:, None],
        ),
    )


def prompt_inclusion(prompts: Selection, count: int) -> Floats:
    """Inclusion probability of each of the `count` prompts that were rolled out, shape (P,)."""
    pi = prompts.pi[prompts.kept]
    if pi.shape != (count,):
        raise InvalidInputError(
            f"prompts keeps {pi.size} prompts, but rewards_PG has {count} rows; pass the rollouts "
            "of the kept prompts only, in window order"
        )
    return pi


def optimizer_steps(value: ArrayLike | None, shape: tuple[int, ...]) -> Ints:
    """Which optimizer step trains each row; all of them step 0 if `value` is None."""
    if value is None:
        return np.zeros(shape, dtype=np.int64)
    steps = as_floats("optimizer_step_PG", value)
    same_shape("optimizer_step_PG", steps, shape)
    whole = (steps >= 0) & (steps == np.floor(steps))
    reject("optimizer_step_PG", steps, ~whole, "must be whole numbers >= 0")
    return steps.astype(np.int64)


def count_reasons(reason_PG: Ints) -> dict[str, int]:
    """Rows that are not kept, by reason (-1: kept); the counts add up to all of them."""
    counts = np.bincount(reason_PG[reason_PG >= 0], minlength=len(DROP_REASONS)).tolist()
    return dict(zip(DROP_REASONS, counts, strict=True))


def _cost(lengths: ArrayLike | None, prompts: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
    if lengths is None:
        if prompts is not None:
            raise InvalidInputError("prompt_lengths_P needs lengths_PG: the cost is their sum")
        return np.ones(shape)
    cost = finite("lengths_PG", lengths, ndim=2)
    same_shape("lengths_PG", cost, shape)
    reject("lengths_PG", cost, cost < 0, "must be >= 0")
    if prompts is not None:
        prompt = finite("prompt_lengths_P", prompts, ndim=1)
        same_shape("prompt_lengths_P", prompt, shape[:1])
        reject("prompt_lengths_P", prompt, prompt < 0, "must be >= 0")
        cost = cost + prompt[:, None]
    return np.maximum(cost, 1.0)  # an empty completion to an unknown prompt still takes a forward


def _reasons(live: Bools, masked: Bools, *, unscorable: Bools, dead: Bools, value: Floats) -> Ints:
    """First rule that matches; `value` is the reward that a whole group has, NaN if it differs."""
    rules = (
        (live, "sampled_out"),
        (masked, "masked"),
        (unscorable, "unscorable"),
        (dead & (value == 1), "all_right"),
        (dead & (value == 0), "all_wrong"),
        (dead, "constant"),
    )
    index = [DROP_REASONS.index(name) for _, name in rules]
    where = [np.broadcast_to(rule, live.shape) for rule, _ in rules]
    return np.select(where, index, DROP_REASONS.index("zero_advantage")).astype(np.int64)
