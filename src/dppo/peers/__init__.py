"""The selection rules of others, for comparison only: BIASED, and apart from the estimator.

They have no inclusion probabilities, or do not use them. What they keep is stated by their papers
or code; `dppo.audit` measures their bias on recorded rollouts, `dppo.trl.peers` trains with them.
"""

from dppo.peers.rules import (
    algorithm_1,
    algorithm_1_mean,
    cppo,
    mean_over,
    pods,
    silent_groups,
)
from dppo.peers.skipping import SkipRates

__all__ = [
    "SkipRates",
    "algorithm_1",
    "algorithm_1_mean",
    "cppo",
    "mean_over",
    "pods",
    "silent_groups",
]
