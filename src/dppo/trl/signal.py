"""What the rewards of a generation say: advantages as the host makes them, and groups without any.

Suffixes: `_N` rows of the generation, `_P` prompts, `_PG` prompts x group, `_F` reward functions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.estimator.advantages import constant_groups, group_advantages

Floats = NDArray[np.float64]
HOST_EPSILON = 1e-4


@dataclass(frozen=True)
class Signal:
    """What the rewards say."""

    rewards_PG: NDArray[np.floating[Any]]
    advantages_PG: Floats
    dead_P: NDArray[np.bool_]
    """Groups whose advantage is float dust, to be set to exactly 0."""
    alive_PG: NDArray[np.bool_]
    """Rows to which the host may give an advantage."""


def signal(
    rewards_NF: NDArray[np.float32],
    weights_F: NDArray[np.float32],
    *,
    group: int,
    scale: str,
    aggregation: str,
    signal_reward: int | None = None,
) -> Signal:
    """Rewards and advantages per group, as the host aggregates several reward functions.

    Args:
        rewards_NF: Of every reward function, NaN for no score.
        weights_F: Of the reward functions.
        group: Completions of a prompt, G.
        scale: The host's `scale_rewards`.
        aggregation: The host's `multi_objective_aggregation`.
        signal_reward: Column whose constant groups have no signal, whatever the others say. A
            group to which it gave fewer than two scores (None, as for another task) is not
            constant in it and is left alone.
    """
    told = _signal(rewards_NF, weights_F, group=group, scale=scale, aggregation=aggregation)
    if signal_reward is None:
        return told
    of_one = rewards_NF[:, signal_reward].reshape(-1, group)
    judged = (~np.isnan(of_one)).sum(axis=1) >= 2
    dead = told.dead_P | (judged & constant_groups(of_one))
    keep = ~dead[:, None]
    return Signal(told.rewards_PG, told.advantages_PG * keep, dead, told.alive_PG & keep)


def _signal(
    rewards_NF: NDArray[np.float32],
    weights_F: NDArray[np.float32],
    *,
    group: int,
    scale: str,
    aggregation: str,
) -> Signal:
    unscored = np.isnan(rewards_NF).all(axis=1)
    total = np.nansum(rewards_NF * weights_F, axis=1)
    total[unscored] = np.nan
    rewards_PG = total.reshape(-1, group)
    if aggregation == "sum_then_normalize":
        adv = group_advantages(rewards_PG, scale=scale, epsilon=HOST_EPSILON)
        dead = adv.scorable_P & ~adv.live_P
        return Signal(rewards_PG, adv.values_PG, dead, adv.scored_PG & adv.live_P[:, None])
    values = np.zeros(rewards_PG.shape)
    constant = np.ones(len(rewards_PG), dtype=np.bool_)
    for rewards, weight in zip(rewards_NF.T, weights_F.tolist(), strict=True):
        of_one = rewards.reshape(-1, group)
        values += weight * group_advantages(of_one, epsilon=HOST_EPSILON).values_PG
        constant &= constant_groups(of_one)
    scored = ~np.isnan(rewards_PG)
    pool = values[scored]
    mean = float(pool.mean()) if pool.size else 0.0
    spread = float(pool.std(ddof=1)) if pool.size > 1 else 0.0
    # A batch mean that is not dust gives even a constant group an advantage.
    dust = 8 * float(np.finfo(rewards_NF.dtype).eps) * float(np.abs(pool).max(initial=0.0))
    dead = constant & (abs(mean) <= dust)
    alive = scored & ~dead[:, None]
    advantages = np.where(alive, (values - mean) / (spread + HOST_EPSILON), 0.0)
    return Signal(rewards_PG, advantages, dead, alive)
