"""Dynamic Pruning Policy Optimization: GRPO-style training made cheaper, its gradient unchanged.

Zhu et al., "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization",
arXiv 2603.04135. Not Divergence PPO, not Diffusion-Policy Policy Optimization.

This package needs numpy only. The trainers are in `dppo.trl`.
"""

from dppo.config import PruneConfig
from dppo.errors import (
    ConfigurationError,
    DPPOError,
    HostDriftError,
    InvalidInputError,
    UnsupportedHostError,
    UnsupportedLossError,
)
from dppo.estimator.advantages import group_advantages
from dppo.estimator.designs import generator, outcomes, poisson, stratified_order, systematic
from dppo.estimator.diagnostics import effective_sample_size, pruning_variance
from dppo.estimator.inclusion import (
    proportional_inclusion,
    threshold_inclusion,
    uniform_inclusion,
)
from dppo.estimator.sizes import completion_norms, completion_sizes, surprisal_norm
from dppo.packing import Packing, pack
from dppo.pruner import Pruner
from dppo.types import Advantages, CompletionChoice, Selection

__version__ = "0.1.0"

# In the order of the documentation: along the way from rewards to weights.
__all__ = [
    "group_advantages",
    "surprisal_norm",
    "completion_norms",
    "completion_sizes",
    "proportional_inclusion",
    "threshold_inclusion",
    "uniform_inclusion",
    "generator",
    "stratified_order",
    "systematic",
    "poisson",
    "Selection",
    "outcomes",
    "effective_sample_size",
    "pruning_variance",
    "pack",
    "Packing",
    "Pruner",
    "PruneConfig",
    "Advantages",
    "CompletionChoice",
    "DPPOError",
    "InvalidInputError",
    "ConfigurationError",
    "UnsupportedLossError",
    "UnsupportedHostError",
    "HostDriftError",
    "__version__",
]
