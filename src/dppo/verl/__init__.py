r"""Pruning in verl's own trainer: the mode `prune_sync` of verl 0.9.1 (V1, Ray, FSDP).

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=prune_sync \
        +prune.completion_keep=auto +prune.prompt_keep=0.6 ...

The same `dppo.Pruner` as in `dppo.trl`. verl loads `dppo.verl.plugin` through the entry point group
`verl.plugins`; this package imports neither verl nor torch. verl's own `dppo_tv` and `dppo_kl` are
Divergence PPO (arXiv 2602.04879), which is something else.
"""

MODE = "prune_sync"
"""`trainer.v1.trainer_mode`."""

VERL = "0.9.1"
"""The version that this was tested with. What is wrapped is private there."""

__all__ = ["MODE", "VERL"]
