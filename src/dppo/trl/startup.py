"""Checks before training: of the data before weights are loaded, of the model after."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.trainer.utils import get_config_model_id

from dppo.errors import ConfigurationError
from dppo.trl import prompts, supply
from dppo.trl.clock import PhaseClock
from dppo.trl.config import DPPOConfig
from dppo.trl.reward_contract import checked_rewards
from dppo.trl.reward_failures import Failures

logger = logging.getLogger(__name__)


class StepClock(TrainerCallback):
    """Counts what an optimizer step spends outside rollout, scoring and pruning as training."""

    def __init__(self, clock: PhaseClock, *, when_over: Callable[[], None]) -> None:
        self.clock, self.when_over = clock, when_over

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing runs yet, whatever an interrupted training has left."""
        self.clock.enter("idle")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-step begins."""
        self.clock.enter("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped; what is logged now is still of this step."""
        self.clock.enter("idle")
        self.when_over()


def checked(given: dict[str, Any], failures: Failures) -> dict[str, Any]:
    """Check the arguments of the trainer before weights are loaded.

    Args:
        given: By the names of `GRPOTrainer`.
        failures: What to do where a reward function raises.

    Returns:
        The same, reward functions wrapped, prompts that do not fit left out if so configured.

    Raises:
        ConfigurationError: See `prompts` and `reward_contract`.
    """
    dataset = given.get("train_dataset")
    own_data = bool(given.get("environment_factory"))  # the prompts come from the environments
    rollout_func = given.get("rollout_func")  # what it returns is passed to reward functions, too
    _check_tokenizer(given.get("processing_class"))
    evaluated = given.get("eval_dataset")
    if not own_data:
        for part in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
            prompts.check_prompt_column(part)
    if dataset is not None and not own_data:
        prompts.check_prompt_column(dataset)
        if not rollout_func:
            dataset = _fitting(dataset, given)
        supply.check_supply(dataset, given["args"])
    if given["args"].prunes_prompts and (dataset is None or own_data):
        raise ConfigurationError(
            f"prompt_keep={given['args'].prompt_keep} draws prompts from a train_dataset, and "
            f"there is {'an environment_factory' if own_data else 'none'}; set prompt_keep=1.0"
        )
    columns = getattr(dataset, "column_names", None)
    if own_data or rollout_func or not isinstance(columns, list):
        columns = None
    rewards = checked_rewards(given.get("reward_funcs"), columns, failures)
    return {**given, "train_dataset": dataset, "reward_funcs": rewards}


def _fitting(dataset: Any, given: dict[str, Any]) -> Any:
    """The data set without, or refused for, prompts that leave no room for a completion."""
    model, args, tokenizer = given["model"], given["args"], given.get("processing_class")
    remote = {"trust_remote_code": args.trust_remote_code}
    config = model.config if not isinstance(model, str) else _config(model, args, remote)
    limit = prompts.prompt_limit(
        getattr(config.get_text_config(), "max_position_embeddings", None),
        max_prompt=args.max_prompt_length,
        max_completion=args.max_completion_length or 0,
    )
    if limit is None or not isinstance(dataset, Dataset):
        return dataset
    if {"image", "images"} & set(dataset.column_names):
        return dataset  # images take a number of tokens that only the host knows
    if tokenizer is None:
        name = model if isinstance(model, str) else get_config_model_id(config)
        tokenizer = AutoTokenizer.from_pretrained(name, **remote)
        _check_tokenizer(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return dataset
    template: dict[str, Any] = {"tools": given.get("tools") or None}
    if isinstance(args.chat_template_kwargs, dict):
        template |= args.chat_template_kwargs
    lengths = prompts.prompt_lengths(dataset, tokenizer, template)
    return prompts.fitting_prompts(dataset, lengths, limit=limit, action=args.overlong_prompts)


def _check_tokenizer(tokenizer: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigurationError(
            "the tokenizer has neither a pad nor an end-of-sequence token: completions of unequal "
            "length cannot be batched. Set tokenizer.pad_token, and eos_token if the model has one"
        )


def _config(model: str, args: DPPOConfig, remote: dict[str, Any]) -> Any:
    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    return AutoConfig.from_pretrained(model, revision=options.get("revision"), **remote)


def check_model(trainer: Any) -> None:
    """Refuse or remark on what about the model would surprise.

    Raises:
        ConfigurationError: Nothing is trainable, or the auxiliary loss of a mixture of experts
            is active, which no weight per completion makes exact.
    """
    model = trainer.model
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError(
            "0 trainable parameters: a PEFT adapter is loaded frozen unless is_trainable=True is "
            "passed to PeftModel.from_pretrained"
        )
    if trainer.args.prunes and trainer.aux_loss_enabled:
        raise ConfigurationError(
            "the router's auxiliary loss is a statistic of all tokens of a micro-batch, which "
            "pruning changes; set router_aux_loss_coef=0, or switch pruning off "
            "(completion_keep=1.0, prompt_keep=1.0)"
        )
    if trainer.args.packing in {"varlen", "bucket"} and trainer.aux_loss_enabled:
        raise ConfigurationError(
            "the router's auxiliary loss is a statistic of the tokens of a micro-batch, which "
            f"packing={trainer.args.packing!r} changes; set router_aux_loss_coef=0, or "
            "packing='none'"
        )
    signal = trainer.args.signal_reward
    if signal is not None:
        if signal not in trainer.reward_func_names:
            raise ConfigurationError(
                f"signal_reward={signal!r} is none of the reward functions; they are "
                f"{', '.join(trainer.reward_func_names)}"
            )
        logger.warning(
            "signal_reward=%s changes the objective: groups that are constant in it get advantage "
            "0, whatever the other rewards say",
            signal,
        )
    if not trainer.args.disable_dropout:
        active = active_dropout(model)
        if active:
            warnings.warn(
                f"dropout is active in {', '.join(active)}: ratios start away from 1 and old and "
                "new log-probs differ by noise. Set disable_dropout=True",
                stacklevel=3,
            )
    if trainer.beta != 0:
        logger.info("KL reference: %s", describe_reference(trainer))


def packs_without_pruning(trainer: Any) -> bool:
    """Whether micro-batches are packed though nothing is pruned, which must change no statistic."""
    args = trainer.args
    if args.packing != "auto":
        return args.packs_unpruned
    return args.packs_unpruned and not trainer.aux_loss_enabled and not trainer._is_vlm


def active_dropout(model: nn.Module) -> list[str]:
    """Dropout modules and configuration entries with a rate above 0, at most five names."""
    modules = [
        name for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.p > 0
    ]
    config = getattr(model, "config", None)
    rates = vars(config).items() if config is not None else ()
    entries = [
        f"config.{name}"
        for name, rate in rates
        if name.endswith(("dropout", "pdrop"))
        and not name.startswith(("summary_", "classifier_"))
        and isinstance(rate, float)
        and rate > 0
    ]
    names = entries + modules
    return names[:5] + ([f"{len(names) - 5} more"] if len(names) > 5 else [])


def describe_reference(trainer: Any) -> str:
    """What the KL term compares the policy with."""
    if trainer.ref_model is not None:
        return f"a copy of {get_config_model_id(trainer.model.config) or 'the model'} as loaded"
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    if "ref" in adapters:
        return "the adapter as it was loaded"
    return "the base model with the adapter switched off"


def base_model(model: Any) -> Any:
    """The model whose `generate` samples: without a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
