"""What is relied on in the host: its version, and the signatures of the methods that are wrapped.

Checked at import, so that a host that moved on is refused with a sentence instead of training on
something else.
"""

import inspect
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from dppo.errors import UnsupportedHostError

LOWEST, BELOW = "1.16", "1.17"

WRAPPED = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_get_grad_norm": ("model", "grad_norm"),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images"),
        *("pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes"),
        *("token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_get_train_sampler": ("dataset",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_prepare_inputs": ("generation_batch",),
    "_save_checkpoint": ("model", "trial"),
    "get_train_dataloader": (),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
}
"""Every method of `GRPOTrainer` that `DPPOTrainer` wraps, with its parameters after self."""

ATTRIBUTES = (
    *("_buffered_inputs", "_current_train_step_time", "_entropy_bonus_enabled", "_logs"),
    *("_metrics", "_step", "_tokenizer", "aux_loss_enabled", "beta", "eos_token_ids"),
    *("importance_sampling_level", "loss_type", "mask_truncated_completions"),
    *("multi_objective_aggregation", "num_generations", "num_iterations", "reward_func_names"),
    *("reward_weights",),
    *("scale_rewards", "shuffle_dataset", "temperature", "use_vllm"),
)
"""Every attribute of a constructed `GRPOTrainer` that is read or written."""

HEAD_TILE = "_CHUNKED_LOGPROB_CHUNK_SIZE"
"""Words of the vocabulary that the host's head computes at once (`packed.small_tiles`)."""


def check_host() -> None:
    """Check version and signatures.

    Raises:
        UnsupportedHostError: TRL is missing, outside the tested range, or a wrapped method is gone
            or has other parameters; the message says which and what to do.
    """
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise UnsupportedHostError(
            "dppo.trl needs TRL, which is not installed; install dppo with its extra 'trl'"
        ) from None
    check_version(installed)
    from trl.trainer import utils  # noqa: PLC0415 - its version fits
    from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: PLC0415

    check_signatures(GRPOTrainer)
    if not isinstance(getattr(utils, HEAD_TILE, None), int):
        raise UnsupportedHostError(
            f"trl.trainer.utils has no {HEAD_TILE}, by which the memory of packed rows is bounded; "
            f"install trl>={LOWEST},<{BELOW} unmodified"
        )


def check_version(installed: str) -> None:
    """Refuse a TRL version outside the tested range."""
    if not Version(LOWEST) <= Version(Version(installed).base_version) < Version(BELOW):
        raise UnsupportedHostError(
            f"dppo.trl is tested with trl>={LOWEST},<{BELOW}, but {installed} is installed. It "
            f"wraps private methods, so another version may silently train something else: "
            f"pip install 'trl>={LOWEST},<{BELOW}', or a newer dppo"
        )


def check_signatures(host: type) -> None:
    """Refuse a host class whose wrapped methods are missing or take other parameters."""
    wrong: list[str] = []
    for name, expected in WRAPPED.items():
        method = getattr(host, name, None)
        if method is None:
            wrong.append(f"{name} is missing")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != expected:
            wrong.append(f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})")
    if wrong:
        raise UnsupportedHostError(
            f"{host.__name__} is not the one dppo.trl was tested with: "
            + "; ".join(wrong)
            + f". Install trl>={LOWEST},<{BELOW} unmodified"
        )


def check_attributes(trainer: object) -> None:
    """Refuse a constructed host trainer that lacks an attribute that is relied on."""
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise UnsupportedHostError(
            f"GRPOTrainer has no attribute {', '.join(missing)}; install trl>={LOWEST},<{BELOW} "
            "unmodified"
        )
