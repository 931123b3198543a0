"""`DPPOConfig`: `GRPOConfig` plus what to prune."""

import logging
from dataclasses import dataclass, field

import torch
from trl.trainer.grpo_config import GRPOConfig

from dppo.config import PruneConfig
from dppo.errors import ConfigurationError
from dppo.estimator.weights import loss_denominator

__all__ = ["DPPOConfig"]

logger = logging.getLogger(__name__)

PACKINGS = ("auto", "none")
OVERLONG = ("error", "drop")


@dataclass
class DPPOConfig(GRPOConfig):
    r"""Configuration of [`DPPOTrainer`]: everything `GRPOConfig` takes, and the fields below.

    > Parameters that control pruning

    Parameters:
        completion_keep (`float` or `str`, *optional*, defaults to `0.5`):
            Expected share of the live training cost that is kept. `1.0` switches pruning off: the
            host's own code runs, bit for bit. `"shadow"` decides and logs what a rate of 0.5 would
            save but trains on everything; `"shadow:0.25"` tries another rate. The rules
            `"threshold"` and `"inert"` have no use for the rate itself.
        completion_rule (`str`, *optional*, defaults to `"proportional"`):
            `"proportional"` to the assumed gradient norm per square root of cost; `"threshold"`,
            the paper's rule; `"uniform"`; `"inert"`, lossless: only completions without a gradient
            are left out. `completion_keep` sets the rate of the first and third.
        completion_prune_rate (`float`, *optional*, defaults to `0.7`):
            The paper's r_o, for `completion_rule="threshold"`.
        sampling_design (`str`, *optional*, defaults to `"systematic"`):
            `"systematic"` or `"poisson"`.
        prompt_keep (`float`, *optional*, defaults to `1.0`):
            Share of the candidate prompts that is rolled out. This version takes `1.0` only.
        signal_reward (`str`, *optional*):
            Name of a reward function. Groups whose completions all get the same score from it have
            advantage 0, whatever the other rewards say: length or format shaping then cannot make a
            signal of an all-wrong group. This changes the objective, also with pruning off.
        packing (`str`, *optional*, defaults to `"auto"`):
            How the survivors of an optimizer step share its micro-batches: `"auto"` sorts them by
            length, so that little padding is computed; `"none"` leaves them in random order.

    > Parameters that control the prompts

    Parameters:
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens, chat template included. Default: what the model's context
            leaves beside `max_completion_length`, where the model states a context.
        overlong_prompts (`str`, *optional*, defaults to `"error"`):
            `"error"` refuses a data set with a longer prompt before training, `"drop"` leaves
            those prompts out and says how many.

    Raises:
        ConfigurationError: A value is outside its range, or the loss cannot be pruned exactly.

    Example:
        >>> from dppo.trl import DPPOConfig
        >>> DPPOConfig("out", completion_keep=0.25, report_to="none").completion_rule
        'proportional'
    """

    # Typed like the host's own `dict | str | None` fields, so that its argument parser reads text.
    completion_keep: float | str | None = field(
        default=0.5,
        metadata={
            "help": "Expected share of the live training cost that is kept, in (0, 1]. 1.0: "
            "pruning off. 'shadow' or 'shadow:0.25': decide and log what that rate (0.5) would "
            "save, but train on everything."
        },
    )
    completion_rule: str = field(
        default="proportional",
        metadata={"help": "'proportional', 'threshold' (the paper's), 'uniform' or 'inert'."},
    )
    completion_prune_rate: float = field(
        default=0.7, metadata={"help": "The paper's r_o, for completion_rule='threshold'."}
    )
    sampling_design: str = field(
        default="systematic", metadata={"help": "'systematic' or 'poisson'."}
    )
    prompt_keep: float = field(
        default=1.0,
        metadata={"help": "Share of candidate prompts rolled out; this version takes 1.0 only."},
    )
    signal_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of a reward function whose constant groups get advantage 0, whatever the "
            "other rewards say. Changes the objective, also with pruning off."
        },
    )
    packing: str = field(
        default="auto",
        metadata={"help": "'auto': survivors share micro-batches by length; 'none': at random."},
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt in tokens, chat template included. Default: the model's "
            "context minus max_completion_length."
        },
    )
    overlong_prompts: str = field(
        default="error",
        metadata={"help": "'error' or 'drop': what to do with longer prompts, before training."},
    )

    def __post_init__(self) -> None:
        """Check the fields of this class, then the host's; then that the two fit together."""
        self.completion_keep = _completion_keep(self.completion_keep)
        _one_of("packing", self.packing, PACKINGS)
        _one_of("overlong_prompts", self.overlong_prompts, OVERLONG)
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ConfigurationError(f"max_prompt_length={self.max_prompt_length}: must be >= 1")
        if self.bf16 is None and not self.fp16 and not _has_accelerator():
            self.bf16 = False
            self.dataloader_pin_memory = False  # there is nothing to pin it for
            logger.info("no accelerator found: training in float32 (set bf16=True to override)")
        super().__post_init__()
        if self.prompt_keep != 1:
            raise ConfigurationError(
                f"prompt_keep={self.prompt_keep!r}: this version of the trainer prunes completions "
                "only; set prompt_keep=1.0"
            )
        if self.prunes:
            _check_exact(self)
        self.prune_config()

    @property
    def prunes(self) -> bool:
        """Whether completions are pruned; not in shadow mode."""
        return isinstance(self.completion_keep, float) and self.completion_keep != 1

    @property
    def decides(self) -> bool:
        """Whether pruning is decided, if only to log it."""
        return self.completion_keep != 1.0

    @property
    def generation_steps(self) -> int:
        """`steps_per_generation`, which the host fills in."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation

    @property
    def column_multiple(self) -> int | None:
        """`pad_to_multiple_of`, text and "auto" resolved by the host."""
        assert not isinstance(self.pad_to_multiple_of, str)
        return self.pad_to_multiple_of

    def prune_config(self) -> PruneConfig:
        """The options of the `Pruner`."""
        keep = self.completion_keep
        if not isinstance(keep, float):
            _, _, rate = str(keep).partition(":")
            keep = float(rate) if rate else PruneConfig.completion_keep
        return PruneConfig(
            completion_keep=keep,
            completion_rule=self.completion_rule,
            completion_prune_rate=self.completion_prune_rate,
            sampling_design=self.sampling_design,
        )


def _completion_keep(value: float | str | None) -> float | str:
    if value == "auto":
        raise ConfigurationError(
            "completion_keep='auto' is not in this version; give a rate such as 0.5, 'shadow' to "
            "see what a rate would save, or 1.0 to switch pruning off"
        )
    try:
        if isinstance(value, bool) or value is None:
            raise TypeError
        if isinstance(value, str) and value.startswith("shadow"):
            mode, colon, rate = value.partition(":")
            if mode != "shadow" or (colon and not 0 < float(rate) < 1):
                raise ValueError
            return value
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"completion_keep must be a number in (0, 1], 'shadow' or 'shadow:RATE', got {value!r}"
        ) from None


def _check_exact(config: DPPOConfig) -> None:
    """Refuse what couples the rows of a batch, so that no weight per row makes it exact."""
    loss_denominator(config.loss_type)
    off = "or set completion_keep=1.0"
    if config.top_entropy_quantile < 1:
        raise ConfigurationError(
            f"top_entropy_quantile={config.top_entropy_quantile} picks tokens by a quantile over "
            f"the micro-batch, which pruning changes; set it to 1.0, {off}"
        )
    if config.use_adaptive_entropy:
        raise ConfigurationError(
            "use_adaptive_entropy=True steers by the entropy of the rows it sees, which pruning "
            f"changes; use a fixed entropy_coef, {off}"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
