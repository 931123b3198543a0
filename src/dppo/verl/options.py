"""The options `prune.*` of a run, and what of verl's configuration cannot be pruned exactly."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from dppo.config import PruneConfig
from dppo.errors import ConfigurationError

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
ESTIMATORS = ("grpo", "rloo", "opo")
"""One advantage for a completion, from its own group alone."""


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
    completions are not pruned."""
    completion_rule: str = "proportional"
    completion_prune_rate: float = 0.7
    sampling_design: str = "systematic"
    prompt_keep: float = 1.0
    """Prompts rolled out per prompt of `data.train_batch_size`, which counts candidates."""
    prompt_rule: str = "proportional"
    prompt_prune_rate: float = 0.5
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
        keep = options.completion_keep
        if isinstance(keep, str) and keep != "auto":
            raise ConfigurationError(
                f'prune.completion_keep must be "auto" or a number in (0, 1], got {keep!r}'
            )
        if options.auto_cost not in {"time", "tokens"}:
            raise ConfigurationError(
                f'prune.auto_cost must be "time" or "tokens", got {options.auto_cost!r}'
            )
        return options

    @property
    def chooses_keep(self) -> bool:
        """Whether the rate is chosen while training."""
        return self.completion_keep == "auto" and self.completion_rule in {
            "proportional",
            "uniform",
        }

    @property
    def prunes(self) -> bool:
        """Whether anything is pruned."""
        return self.completion_keep != 1 or self.prompt_keep != 1

    def prune_config(self) -> PruneConfig:
        """Options of the pruner."""
        keep = 0.5 if isinstance(self.completion_keep, str) else self.completion_keep
        return PruneConfig(
            completion_keep=keep,
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


def check_exact(config: Any) -> None:
    """Refuse what pruning could not leave unbiased, before workers start.

    Args:
        config: verl's.

    Raises:
        ConfigurationError: Names the option, its value and what to do.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction = algorithm.get("rollout_correction") or {}
    failed_groups = config.trainer.v1.sampler.get("sync_refill_failed_groups", False)
    group = config.actor_rollout_ref.rollout.n
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    for wrong, name, value, why in (
        (
            algorithm.adv_estimator not in ESTIMATORS,
            "algorithm.adv_estimator",
            algorithm.adv_estimator,
            f"advantages must come from a completion's own group; use {', '.join(ESTIMATORS)}",
        ),
        (group < 2, "actor_rollout_ref.rollout.n", group, "a group of one has no advantage"),
        (
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
            True,
            "needs the log-probs of all completions before any can be left out; set it to False "
            "and actor_rollout_ref.actor.use_kl_loss=True",
        ),
        (
            actor.loss_agg_mode not in AGGREGATIONS,
            "actor_rollout_ref.actor.loss_agg_mode",
            actor.loss_agg_mode,
            f"has no denominator that pruning could keep; use {', '.join(AGGREGATIONS)}",
        ),
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            "actor_rollout_ref.actor.loss_scale_factor",
            None,
            "divides by the longest response of a micro-batch, which depends on what was kept; "
            f"set it, for instance to {config.data.max_response_length}",
        ),
        (
            bool((algorithm.get("filter_groups") or {}).get("enable", False)),
            "algorithm.filter_groups.enable",
            True,
            "samples prompts anew until they differ, which is biased; pruning leaves groups "
            "without a signal out for free, so set it to False",
        ),
        (
            bool(correction.get("rollout_rs")),
            "algorithm.rollout_correction.rollout_rs",
            correction.get("rollout_rs"),
            "masks tokens by statistics of the completions that are left; set it to null",
        ),
        (
            bool(correction.get("rollout_is_batch_normalize", False)),
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            True,
            "divides by a mean over the completions that are left; set it to False",
        ),
        (
            failed_groups,
            "trainer.v1.sampler.sync_refill_failed_groups",
            True,
            "replaces prompts that were drawn; set it to False",
        ),
        (
            bool(config.skip.rollout_tq.enable) if "skip" in config else False,
            "skip.rollout_tq.enable",
            True,
            "replays rollouts of other prompts than are drawn; set it to False",
        ),
        (
            (config.data.get("gen_batch_size") or batch) != batch,
            "data.gen_batch_size",
            config.data.get("gen_batch_size"),
            "must be data.train_batch_size, the candidates of a step; leave it out",
        ),
        (
            batch % mini != 0,
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            mini,
            f"must divide data.train_batch_size ({batch})",
        ),
        (
            actor.strategy not in {"fsdp", "fsdp2"},
            "actor_rollout_ref.actor.strategy",
            actor.strategy,
            "has its own scaling of micro-batches, which is untested; use fsdp2",
        ),
    ):
        if wrong:
            raise ConfigurationError(
                f"{name}={value} cannot be pruned exactly: it {why}. Or train "
                "with trainer.v1.trainer_mode=sync"
            )
