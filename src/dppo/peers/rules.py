"""Which completions other methods train on, and what they then multiply a gradient by.

* CPPO (Lin et al., arXiv 2503.22342; its code): the k largest |A| of the whole batch, and the mean
  over them.
* PODS (Xu et al., arXiv 2504.13818): of each group the m completions of largest reward variance,
  advantages normalised anew on them, and the mean over them.
* DAPO's dynamic sampling (Yu et al., arXiv 2503.14476): groups without signal left out, the batch
  refilled, so that the mean is over groups with signal.
* Algorithm 1 of the paper (arXiv 2603.04135), to the letter: of a group's completions with |A|
  below its mean a fixed fraction r, rounded down, is dropped; the others of these are weighted by
  1 / (1 - r).

A factor is relative to the full batch's loss: 0 for what is dropped.
"""

import numpy as np

from dppo._checks import Bools, Floats
from dppo.estimator.advantages import constant_groups

__all__ = ["algorithm_1", "algorithm_1_mean", "cppo", "mean_over", "pods", "silent_groups"]


def mean_over(chosen_PG: Bools, share_PG: Floats) -> Floats:
    """Factor of a loss that is averaged over the chosen completions only.

    Args:
        chosen_PG: Shape (P, G). What is averaged over.
        share_PG: Shape (P, G). What a completion counts in the denominator: 1, or its tokens.

    Example:
        >>> mean_over(np.array([[True, False]]), np.ones((1, 2))).tolist()
        [[2.0, 0.0]]
    """
    left = float(share_PG[chosen_PG].sum())
    return np.where(chosen_PG, float(share_PG.sum()) / left if left > 0 else 0.0, 0.0)


def cppo(advantages_PG: Floats, *, keep: float) -> Bools:
    """The int(N keep) largest |A|, at least one; ties by place. Shape (P, G)."""
    size = np.abs(advantages_PG).ravel()
    chosen = np.zeros(size.size, dtype=np.bool_)
    chosen[np.argsort(-size, kind="stable")[: max(int(size.size * keep), 1)]] = True
    return chosen.reshape(advantages_PG.shape)


def pods(rewards_PG: Floats, *, keep: float) -> tuple[Bools, Floats]:
    """In each group the i best and m - i worst, i of the largest variance of rewards; m >= 2.

    Of the scored ones; a group with fewer than two is left out.

    Returns:
        The chosen completions and their advantages, normalised anew; both of shape (P, G).
    """
    group = rewards_PG.shape[1]
    kept, anew = np.zeros(rewards_PG.shape, dtype=np.bool_), np.zeros(rewards_PG.shape)
    for row, reward in enumerate(rewards_PG):
        scored = np.flatnonzero(~np.isnan(reward))
        if scored.size < 2:
            continue
        count = min(max(int(group * keep), 2), scored.size)  # of one there is no variance
        order = scored[np.argsort(-reward[scored], kind="stable")]
        worst = scored.size - count
        choices = [np.r_[order[:best], order[worst + best :]] for best in range(count + 1)]
        chosen = max(choices, key=lambda rows: float(np.var(reward[rows])))
        kept[row, chosen] = True
        anew[row, chosen] = (reward[chosen] - reward[chosen].mean()) / (reward[chosen].std() + 1e-4)
    return kept, anew


def silent_groups(rewards_PG: Floats) -> Bools:
    """Groups that DAPO's dynamic sampling throws away: rewards that do not differ. Shape (P,)."""
    return constant_groups(rewards_PG) | ((~np.isnan(rewards_PG)).sum(axis=1) < 2)


def algorithm_1(advantages_PG: Floats, *, rate: float, rng: np.random.Generator) -> Floats:
    """Factors of the paper's Algorithm 1. Shape (P, G).

    Which of the low ones are dropped is random here; their ties leave it open.
    """
    low, dropped_P = _low(advantages_PG, rate)
    key = np.where(low, rng.random(low.shape), np.inf)
    rank = np.argsort(np.argsort(key, axis=1), axis=1)
    out: Bools = rank < dropped_P[:, None]
    return np.where(out, 0.0, np.where(low, 1 / (1 - rate), 1.0))


def algorithm_1_mean(advantages_PG: Floats, *, rate: float) -> Floats:
    """Their means, which are 1 only where r times the number of low ones is whole. Shape (P, G)."""
    low, dropped_P = _low(advantages_PG, rate)
    count_P = np.maximum(low.sum(axis=1), 1)
    return np.where(low, ((count_P - dropped_P) / count_P)[:, None] / (1 - rate), 1.0)


def _low(advantages_PG: Floats, rate: float) -> tuple[Bools, np.ndarray]:
    size = np.abs(advantages_PG)
    low = size < size.mean(axis=1, keepdims=True)
    return low, np.floor(rate * low.sum(axis=1)).astype(np.int64)
