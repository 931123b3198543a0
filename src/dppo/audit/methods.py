"""Ways to thin a generation, as random factors of the completions' gradients.

A method draws a factor for every completion: 0 where it is left out. It is unbiased if every
factor's mean is 1 where there is a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dppo._checks import Floats
from dppo.audit.recording import Recording
from dppo.estimator.designs import poisson, stratified_order, systematic
from dppo.estimator.inclusion import proportional_inclusion, threshold_inclusion, uniform_inclusion
from dppo.estimator.sizes import completion_sizes

__all__ = ["Method", "unbiased_methods"]

RATES = (0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.21, 0.18, 0.15, 0.12, 0.1, 0.08)
"""Kept shares of the live cost at which a rule is looked at."""
PRUNE_RATES = (0.3, 0.5, 0.7, 0.9)
"""r of the paper's rule."""

Draw = Callable[[np.random.Generator], Floats]


@dataclass(frozen=True, eq=False)
class Method:
    """One way at one rate."""

    name: str
    rate: str
    mean_PG: Floats
    """Mean of the factor."""
    draw: Draw
    pi_PG: Floats | None = None
    """Inclusion probabilities, where factors are 1/pi or 0."""
    independent: bool = False
    """Whether completions are drawn independently, so that the variance has a closed form."""
    rollout: float = 1.0
    """Rollouts against those of the full batch."""


def unbiased_methods(recording: Recording, *, design: str = "systematic") -> list[Method]:
    """The rules of this library, and the best possible one where gradients are recorded.

    Args:
        recording: The completions.
        design: "systematic" (stratified) or "poisson".
    """
    advantages, cost = recording.advantages_PG, recording.cost_PG
    live = advantages != 0
    found = [_drawn("inert", "all live", uniform_inclusion(live, keep=1.0), advantages, design)]
    sizes = {"|A|/sqrt(cost)": completion_sizes(advantages, cost=cost)}
    if recording.surprisal_PG is not None:
        surprisal = recording.surprisal_PG
        sizes["proportional"] = completion_sizes(advantages, surprisal=surprisal, cost=cost)
    if recording.gradients_PGK is not None:
        norm = np.linalg.norm(recording.gradients_PGK, axis=2)
        sizes["oracle"] = norm / np.sqrt(cost)
    for rate in RATES:
        pi = uniform_inclusion(live, keep=rate)
        found.append(_drawn("uniform", f"{rate:.2f}", pi, advantages, design))
        for name, size in sizes.items():
            pi = proportional_inclusion(size, keep=rate, cost=cost)
            found.append(_drawn(name, f"{rate:.2f}", pi, advantages, design))
    scored = ~np.isnan(recording.rewards_PG)
    for rate in PRUNE_RATES:
        pi = threshold_inclusion(advantages, prune_rate=rate, live=live, scored=scored)
        found.append(_drawn("paper, corrected", f"r={rate}", pi, advantages, design))
    return found


def _drawn(name: str, rate: str, pi: Floats, advantages: Floats, design: str) -> Method:
    def draw(rng: np.random.Generator) -> Floats:
        if design == "poisson":
            return poisson(pi, rng).weight
        return systematic(pi, rng, order=stratified_order(advantages, rng)).weight

    return Method(name, rate, (pi > 0).astype(np.float64), draw, pi, design == "poisson")


def names(methods: Sequence[Method]) -> list[str]:
    """Names in the order in which they come."""
    return list(dict.fromkeys(method.name for method in methods))
