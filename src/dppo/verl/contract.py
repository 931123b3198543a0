"""What of verl is wrapped or relied on; checked before anything runs."""

import inspect
from importlib.metadata import version
from typing import Any

from dppo.errors import UnsupportedHostError
from dppo.verl import VERL

TRAINER = {
    "_submit_batch_to_rollout": ("self", "batch"),
    "_step_once": ("self", "metrics", "timing_raw", "sample_batch_size"),
    "_get_required_batch_multiple": ("self", "dp_size"),
    "_balance_batch": ("self", "batch", "metrics", "logging_prefix", "keep_minibatch"),
    "_compute_advantage": ("self", "batch", "metrics"),
    "_update_actor": ("self", "batch", "metrics"),
    "_save_checkpoint": ("self",),
    "_load_checkpoint": ("self",),
    "_setup": ("self",),
    "_init_dataloader": ("self",),
}
"""Methods of `PPOTrainer` that are wrapped, with their parameters."""


def check_contract() -> None:
    """Refuse a verl that was not tested, or that lacks what is wrapped.

    Raises:
        UnsupportedHostError: Names what, and what to install.
    """
    found = version("verl")
    if found != VERL:
        raise UnsupportedHostError(
            f"dppo.verl wraps private methods of verl {VERL}, and verl {found} is installed; "
            f"pip install verl=={VERL}, or set trainer.v1.trainer_mode=sync to train unpruned"
        )
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils import losses

    for name, expected in TRAINER.items():
        _check(f"PPOTrainerSync.{name}", getattr(PPOTrainerSync, name, None), expected)
    _check("losses.ppo_loss", losses.ppo_loss, ("config", "model_output", "data", "dp_group"))
    _check(
        "ActorRolloutRefWorker.set_loss_fn",
        getattr(ActorRolloutRefWorker, "set_loss_fn", None),
        ("self", "loss_fn"),
    )


def _check(name: str, method: Any, expected: tuple[str, ...]) -> None:
    found = None if method is None else tuple(inspect.signature(method).parameters)
    if found != expected:
        raise UnsupportedHostError(
            f"this verl {VERL} has {name}{found or ' not at all'}, not {name}{expected}; "
            "is it a modified installation?"
        )
