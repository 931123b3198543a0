"""What `DPPOConfig` refuses: values outside their range, and combinations that cannot be exact."""

from pathlib import Path
from typing import Any

import torch

from dppo.errors import ConfigurationError, UnsupportedLossError
from dppo.estimator.weights import check_prompt_pruning, loss_denominator


def check_auto(config: Any) -> None:
    """Refuse options of `completion_keep="auto"` that are none, or without it."""
    one_of("auto_cost", config.auto_cost, ("time", "tokens"))
    replay = config.completion_keep_replay
    if replay is None:
        return
    if not config.chooses_keep:
        raise ConfigurationError(
            f"completion_keep_replay={replay!r} needs completion_keep='auto' and a rule with a "
            f"rate; got completion_keep={config.completion_keep!r}, "
            f"completion_rule={config.completion_rule!r}"
        )
    if not Path(replay).is_file():
        raise ConfigurationError(f"completion_keep_replay={replay!r} is no file")


def check_exact(config: Any) -> None:
    """Refuse what couples the rows of a batch, so that no weight per row makes it exact."""
    loss_denominator(config.loss_type)
    off = "or switch pruning and packing off (completion_keep=1.0, prompt_keep=1.0, packing='none')"
    if config.top_entropy_quantile < 1:
        raise ConfigurationError(
            f"top_entropy_quantile={config.top_entropy_quantile} picks tokens by a quantile over "
            f"the micro-batch, which pruning and packing change; set it to 1.0, {off}"
        )
    if config.use_adaptive_entropy:
        raise ConfigurationError(
            "use_adaptive_entropy=True steers by the entropy of the rows it sees, which pruning "
            f"and packing change; use a fixed entropy_coef, {off}"
        )


def couples_rows(config: Any) -> bool:
    """Whether `check_exact` would refuse."""
    try:
        check_exact(config)
    except (ConfigurationError, UnsupportedLossError):
        return True
    return False


def check_recording(config: Any) -> None:
    """Refuse to record rollouts where nothing looks at them."""
    if config.record_rollouts is not None and not (config.decides or config.packs_unpruned):
        raise ConfigurationError(
            f"record_rollouts={config.record_rollouts!r} records what pruning is decided from, and "
            "with completion_keep=1.0 and packing='none' nothing is. completion_keep='shadow' "
            "decides, and trains on everything"
        )
    size = config.record_gradients
    if size is None:
        return
    if size < 1:
        raise ConfigurationError(f"record_gradients={size}: must be >= 1, 1024 for example")
    if config.record_rollouts is None:
        raise ConfigurationError(
            f"record_gradients={size} has no file to write to; set record_rollouts to its path"
        )
    if couples_rows(config):
        raise ConfigurationError(
            f"record_gradients={size} takes the loss apart by completions, which "
            "top_entropy_quantile < 1, use_adaptive_entropy=True and an unknown loss_type do not "
            "allow; change that, or set it to None"
        )


def check_audit(config: Any) -> None:
    """Refuse to audit a step that there is not, or that prunes nothing."""
    if config.audit_redraws < 2:
        raise ConfigurationError(
            f"audit_redraws={config.audit_redraws}: an error takes at least 2; 32 is the default"
        )
    step = config.audit_step
    if step is None:
        return
    if step < 1:
        raise ConfigurationError(f"audit_step={step}: steps are counted from 1")
    if 0 < config.max_steps < step:
        raise ConfigurationError(
            f"audit_step={step} is after the last step, max_steps={config.max_steps}"
        )
    if not config.prunes_completions:
        raise ConfigurationError(
            f"audit_step={step} draws the pruning of completions again, and with "
            f"completion_keep={config.completion_keep!r} none are; give a rate or 'auto'"
        )


def check_annealing(config: Any) -> None:
    """Refuse steps and shares outside their range."""
    if config.prune_warmup_steps < 0:
        raise ConfigurationError(f"prune_warmup_steps={config.prune_warmup_steps}: must be >= 0")
    if not 0 <= config.prune_until <= 1:
        raise ConfigurationError(f"prune_until={config.prune_until}: must be between 0 and 1")


def check_prompt_phase(config: Any) -> None:
    """Refuse what prompt pruning would make wrong, or could not do at all."""
    off = "or set prompt_keep=1.0"
    check_prompt_pruning(config.loss_type, entropy_coef=config.entropy_coef)
    if config.shadows:
        raise ConfigurationError(
            f"completion_keep={config.completion_keep!r} trains as if nothing were pruned, "
            f"but prompt_keep={config.prompt_keep} prunes prompts; give a rate or 1.0, {off}"
        )
    if config.ignore_data_skip:
        raise ConfigurationError(
            "ignore_data_skip=True would roll out the prompts of this epoch again after a resume; "
            f"skipping costs no generation here. Set it to False, {off}"
        )
    if config.prompt_id_column is not None and config.remove_unused_columns:
        raise ConfigurationError(
            f"remove_unused_columns=True removes the column {config.prompt_id_column!r} "
            "(prompt_id_column) from the rows; set it to False"
        )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among `allowed`."""
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def has_accelerator() -> bool:
    """Whether there is anything but a CPU."""
    return torch.accelerator.is_available()
