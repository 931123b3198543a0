"""DPPO on TRL: `DPPOTrainer` is `GRPOTrainer` that trains on a random part of the completions.

Not the Divergence PPO trainer that TRL 1.0-1.6 shipped as `trl.experimental.dppo.DPPOTrainer`.
"""

from dppo.trl import contract

contract.check_host()

from dppo.trl.config import DPPOConfig  # noqa: E402 - the host is checked before it is subclassed
from dppo.trl.trainer import DPPOTrainer  # noqa: E402

__all__ = ["DPPOConfig", "DPPOTrainer"]
