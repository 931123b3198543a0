"""Methods of others, for comparison only: without inclusion probabilities, so biased.

What they drop or keep is stated by their papers or code; the factor is what their loss then
multiplies a survivor's gradient by, relative to the full batch's loss.

* CPPO (Lin et al., arXiv 2503.22342; its code): the k largest |A| of the whole batch, and the mean
  over them.
* PODS (Xu et al., arXiv 2504.13818): of each group the m completions of largest reward variance,
  advantages normalised anew on them.
* DAPO's dynamic sampling (Yu et al., arXiv 2503.14476): groups without signal left out, the batch
  refilled, so that the mean is over groups with signal.
* GRESO (Zheng et al., arXiv 2506.02177): prompts whose earlier visit had no signal are skipped
  with a probability, before the rollout; no weight.
* Algorithm 1 of the paper, to the letter: of a group's completions with |A| below its mean a fixed
  fraction r, rounded down, is dropped; the others of these are weighted by 1 / (1 - r).
"""

import numpy as np

from dppo._checks import Bools, Floats
from dppo.audit.methods import PRUNE_RATES, Method
from dppo.audit.recording import Recording
from dppo.estimator.advantages import constant_groups

__all__ = ["biased_methods"]

KEPT = (0.5, 0.25)
"""Shares of the completions that CPPO and PODS train on."""
SKIP = 0.5
"""Probability with which GRESO begins to skip a prompt whose latest visit had no signal."""


def biased_methods(recording: Recording) -> list[Method]:
    """All of them that the recording has what is needed for."""
    found = [_fixed("CPPO", f"{share:g}", cppo(recording, share)) for share in KEPT]
    found += [_fixed("PODS", f"{share:g}", pods(recording, share)) for share in KEPT]
    live_P = (recording.advantages_PG != 0).any(axis=1)
    if live_P.any():
        refill = len(live_P) / int(live_P.sum())
        factor = np.repeat(live_P[:, None] * refill, recording.rewards_PG.shape[1], axis=1)
        found.append(_fixed("DAPO filter", "all live", factor, rollout=refill))
    if recording.earlier_rewards_PG is not None:
        found.append(greso(recording))
    return found + [algorithm_1(recording, rate) for rate in PRUNE_RATES]


def _fixed(name: str, rate: str, factor: Floats, *, rollout: float = 1.0) -> Method:
    return Method(name, rate, factor, lambda rng: factor, rollout=rollout)


def cppo(recording: Recording, share: float) -> Floats:
    """The int(N share) largest |A|; ties by place."""
    size = np.abs(recording.advantages_PG).ravel()
    count = max(int(size.size * share), 1)
    factor = np.zeros(size.size)
    factor[np.argsort(-size, kind="stable")[:count]] = size.size / count
    return factor.reshape(recording.advantages_PG.shape)


def pods(recording: Recording, share: float) -> Floats:
    """In each group the i best and m - i worst, i of the largest variance of rewards; m >= 2.

    Of the scored ones; a group with fewer than two is left out.
    """
    rewards, advantages = recording.rewards_PG, recording.advantages_PG
    group = rewards.shape[1]
    factor = np.zeros(rewards.shape)
    for row, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        scored = np.flatnonzero(~np.isnan(reward))
        if scored.size < 2:
            continue
        count = min(max(int(group * share), 2), scored.size)  # of one there is no variance
        order = scored[np.argsort(-reward[scored], kind="stable")]
        worst = scored.size - count
        choices = [np.r_[order[:best], order[worst + best :]] for best in range(count + 1)]
        chosen = max(choices, key=lambda rows: float(np.var(reward[rows])))
        anew = (reward[chosen] - reward[chosen].mean()) / (reward[chosen].std() + 1e-4)
        has = advantage[chosen] != 0
        ratio = np.divide(anew, advantage[chosen], out=np.zeros(count), where=has)
        factor[row, chosen] = ratio * group / count
    return factor


def greso(recording: Recording) -> Method:
    """Prompts are skipped as after one visit without signal."""
    assert recording.earlier_rewards_PG is not None  # the caller has looked
    earlier = recording.earlier_rewards_PG
    silent_P = constant_groups(earlier)
    probability_P = np.where(silent_P, 1 - SKIP, 1.0)
    count, group = recording.rewards_PG.shape
    # The batch is refilled with other prompts, so the mean is over those rolled out.
    scale = count / float(probability_P.sum())
    mean = np.repeat(probability_P[:, None] * scale, group, axis=1)

    def draw(rng: np.random.Generator) -> Floats:
        kept_P = rng.random(count) < probability_P
        return np.repeat(kept_P[:, None] * scale, group, axis=1)

    return Method("GRESO", f"skip {SKIP}", mean, draw)


def algorithm_1(recording: Recording, rate: float) -> Method:
    """Which of the low ones are dropped is random here; their ties leave it open."""
    size = np.abs(recording.advantages_PG)
    low = size < size.mean(axis=1, keepdims=True)
    dropped_P = np.floor(rate * low.sum(axis=1)).astype(np.int64)
    count_P = np.maximum(low.sum(axis=1), 1)
    kept_share = ((count_P - dropped_P) / count_P)[:, None]
    mean = np.where(low, kept_share / (1 - rate), 1.0)

    def draw(rng: np.random.Generator) -> Floats:
        key = np.where(low, rng.random(size.shape), np.inf)
        rank = np.argsort(np.argsort(key, axis=1), axis=1)
        out: Bools = rank < dropped_P[:, None]
        return np.where(out, 0.0, np.where(low, 1 / (1 - rate), 1.0))

    return Method("paper, Algorithm 1", f"r={rate}", mean, draw)
