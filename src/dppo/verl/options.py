"""The options `prune.*` of a run, and what is worth knowing of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from dppo.config import PruneConfig, parse_keep
from dppo.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What `+prune.NAME=VALUE` may set.

    Raises:
        ConfigurationError: A value is outside its range.

    Example:
        >>> from dppo.verl.options import PruneOptions
        >>> PruneOptions.of({"completion_keep": 0.5}).prune_config().completion_keep
        0.5
    """

    completion_keep: float | str = "auto"
    """Expected share of the live training cost that is kept; "auto": chosen while training; 1.0:
    completions are not pruned; "shadow" or "shadow:RATE": decided and logged, but all are trained
    on."""
    completion_rule: str = "proportional"
    completion_prune_rate: float = 0.7
    sampling_design: str = "systematic"
    prompt_keep: float = 1.0
    """Prompts rolled out per prompt of `data.train_batch_size`, which counts candidates."""
    prompt_rule: str = "proportional"
    prompt_prune_rate: float = 0.5
    allow_single_epoch: bool = False
    """Prune prompts though fewer than two passes over the data leave them without a history."""
    auto_cost: str = "time"
    """What "auto" goes by: "time", or "tokens", which makes rates reproducible."""
    seed: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> "PruneOptions":
        """From the section `prune` of a configuration.

        Raises:
            ConfigurationError: A name is unknown, or a value is wrong.
        """
        names = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean prune.{near[0]}?" if near else f"there are {', '.join(names)}"
                raise ConfigurationError(f"prune.{name} is no option; {hint}")
        options = cls(**(given or {}))
        options.prune_config()
        if options.shadows and options.prompt_keep != 1:
            raise ConfigurationError(
                f"prune.completion_keep={options.completion_keep} trains as if nothing were "
                f"pruned, but prune.prompt_keep={options.prompt_keep} prunes prompts; give a rate, "
                "or set prune.prompt_keep=1.0"
            )
        if options.auto_cost not in {"time", "tokens"}:
            raise ConfigurationError(
                f'prune.auto_cost must be "time" or "tokens", got {options.auto_cost!r}'
            )
        return options

    @property
    def _keep(self) -> tuple[str, float]:
        return parse_keep("prune.completion_keep", self.completion_keep)

    @property
    def chooses_keep(self) -> bool:
        """Whether the rate is chosen while training."""
        return self.completion_keep == "auto" and self.completion_rule in {
            "proportional",
            "uniform",
        }

    @property
    def shadows(self) -> bool:
        """Whether pruning of completions is decided and logged, but not done."""
        return self._keep[0] == "shadow"

    @property
    def decides(self) -> bool:
        """Whether pruning is decided, if only to log it."""
        return self._keep[0] != "off" or self.prompt_keep != 1

    @property
    def prunes(self) -> bool:
        """Whether anything is pruned; not in shadow mode."""
        return self.decides and not self.shadows

    def prune_config(self) -> PruneConfig:
        """Options of the pruner."""
        return PruneConfig(
            completion_keep=self._keep[1],
            completion_rule=self.completion_rule,
            completion_prune_rate=self.completion_prune_rate,
            sampling_design=self.sampling_design,
            prompt_keep=self.prompt_keep,
            prompt_rule=self.prompt_rule,
            prompt_prune_rate=self.prompt_prune_rate,
        )

    def rolled_out(self, candidates: int) -> int:
        """Prompts that are rolled out of so many candidates."""
        return max(int(self.prompt_keep * candidates + 0.5), 1)


def notices(config: Any, options: PruneOptions) -> list[str]:
    """What is legal and worth knowing.

    Args:
        config: verl's.
        options: Those of pruning.
    """
    found = []
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if options.prompt_keep < 1 and actor.loss_agg_mode == "token-mean":
        count = options.rolled_out(config.data.train_batch_size)
        found.append(
            f"loss_agg_mode=token-mean divides by a token total that prompt_keep="
            f"{options.prompt_keep} leaves to be estimated from {count} prompts: consistent, a "
            "bias of order 1/K. seq-mean-token-mean is exact"
        )
    if not rollout.calculate_log_probs:
        found.append(
            "actor_rollout_ref.rollout.calculate_log_probs=False: completions are sized by "
            "advantage and cost alone. Still unbiased; on recorded gradients that gives up about a "
            "tenth of the efficiency"
        )
    if options.prompt_keep < 1 and (
        config.data.train_batch_size > actor.ppo_mini_batch_size or actor.ppo_epochs > 1
    ):
        found.append(
            "prompts are drawn once for several optimizer steps: exact for the first, and at fixed "
            "parameters for the others"
        )
    return found
