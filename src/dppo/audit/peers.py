"""Methods of others (`dppo.peers`) as factors on recorded rollouts: biased, for comparison only."""

import numpy as np

from dppo._checks import Floats
from dppo.audit.methods import PRUNE_RATES, Method
from dppo.audit.recording import Recording
from dppo.estimator.advantages import constant_groups
from dppo.peers import rules

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
    """Its factors."""
    chosen = rules.cppo(recording.advantages_PG, keep=share)
    return rules.mean_over(chosen, np.ones(chosen.shape))


def pods(recording: Recording, share: float) -> Floats:
    """Its factors, relative to the advantages of the whole group."""
    chosen, anew = rules.pods(recording.rewards_PG, keep=share)
    has = chosen & (recording.advantages_PG != 0)
    ratio = np.divide(anew, recording.advantages_PG, out=np.zeros(anew.shape), where=has)
    return ratio * rules.mean_over(chosen, np.ones(chosen.shape))


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
    """Algorithm 1 of the paper, to the letter."""
    advantages = recording.advantages_PG
    mean = rules.algorithm_1_mean(advantages, rate=rate)

    def draw(rng: np.random.Generator) -> Floats:
        return rules.algorithm_1(advantages, rate=rate, rng=rng)

    return Method("paper, Algorithm 1", f"r={rate}", mean, draw)
