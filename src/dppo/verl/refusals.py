"""What verl can be configured to do that pruning would make wrong: refused, before workers start.

Nothing of verl is imported: a configuration is nested mappings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dppo.errors import ConfigurationError, UnsupportedLossError
from dppo.verl.options import PruneOptions

ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
"""Advantage estimators that use nothing but the row's own group, and take groups of any size."""

LOSS_MODES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro")
"""Policy losses that are a sum over completions, each of which depends on itself alone."""

LOSS_AGG_MODES = (
    *("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
)
"""Aggregations whose denominator is known before pruning: loss tokens, or rows."""

OFF = "or switch pruning off (prune.completion_keep=1.0 prune.prompt_keep=1.0)"


@dataclass(frozen=True)
class _Rule:
    """A setting that must have one of some values."""

    path: str
    allowed: tuple[Any, ...]
    default: Any
    why: str
    remedy: str


_RULES = (
    _Rule(
        "algorithm.use_kl_in_reward",
        (False,),
        False,
        "puts the KL of every completion into its reward, so that none can be left out of the "
        "reference pass",
        "use actor_rollout_ref.actor.use_kl_loss=True",
    ),
    _Rule(
        "critic.enable",
        (False, None),
        None,
        "trains a critic on every completion",
        "set it to False and use algorithm.adv_estimator=grpo",
    ),
    _Rule(
        "algorithm.adv_estimator",
        ESTIMATORS,
        "gae",
        "needs more than a completion's own group, or groups that are whole",
        f"use one of {', '.join(ESTIMATORS)}",
    ),
    _Rule(
        "algorithm.filter_groups.enable",
        (False,),
        False,
        "replaces groups without signal by other prompts; pruning leaves them out without changing "
        "the expected gradient",
        "set it to False",
    ),
    _Rule(
        "trainer.v1.sampler.sync_refill_failed_groups",
        (False,),
        False,
        "replaces prompts after they were drawn",
        "set it to False",
    ),
    _Rule(
        "trainer.v1.sampler.custom_sampler.path",
        (None, ""),
        None,
        "may pick other completions than those of the prompts that were drawn",
        "leave it out",
    ),
    _Rule(
        "trainer.v1.sync.parameter_sync_step",
        (1,),
        1,
        "trains a batch in parts, without a decision on the whole",
        "set it to 1",
    ),
    _Rule(
        "trainer.critic_warmup",
        (0,),
        0,
        "leaves the actor out of steps",
        "set it to 0",
    ),
    _Rule(
        "skip.rollout_tq.enable",
        (False,),
        False,
        "replays rollouts of other prompts than those that were drawn",
        "set it to False",
    ),
    _Rule(
        "algorithm.rollout_correction.rollout_rs",
        (None,),
        None,
        "rejects tokens after their log-probs are known, so that the full batch's denominator is "
        "not known before pruning",
        "set it to null (rollout_is works)",
    ),
    _Rule(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        (False,),
        False,
        "divides by a mean over the rows that are there",
        "set it to False",
    ),
    _Rule(
        "actor_rollout_ref.actor.strategy",
        ("fsdp", "fsdp2"),
        "fsdp",
        "scales the losses of micro-batches in a way of its own, which is untested",
        "use fsdp2",
    ),
    _Rule(
        "distillation.enabled",
        (False,),
        False,
        "adds a loss that pruning does not weight",
        "set it to False",
    ),
    _Rule(
        "actor_rollout_ref.model.mtp.enable_train",
        (False, None),
        None,
        "adds a loss that pruning does not weight",
        "set it to False",
    ),
    _Rule(
        "actor_rollout_ref.actor.use_prefix_grouper",
        (False,),
        False,
        "needs whole groups",
        "set it to False",
    ),
)


def at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path, or the default if a part of the path is missing."""
    for name in path.split("."):
        if config is None or not hasattr(config, "get"):
            return default
        config = config.get(name, _MISSING)
        if config is _MISSING:
            return default
    return config


_MISSING: Any = object()


def check_config(config: Mapping[str, Any], options: PruneOptions) -> None:
    """Refuse what cannot be exact, or could not gain.

    Args:
        config: verl's.
        options: Of pruning.

    Raises:
        ConfigurationError: The message names the setting, its value and what to do.
        UnsupportedLossError: The same for the loss.
    """
    for rule in _RULES:
        value = at(config, rule.path, rule.default)
        value = getattr(value, "value", value)  # an enum's
        if value not in rule.allowed:
            raise ConfigurationError(f"{rule.path}={value} {rule.why}; {rule.remedy}, {OFF}")
    _check_sizes(config)
    _check_loss(config)
    check_passes(options, at(config, "trainer.total_epochs", 1), "trainer.total_epochs")


def check_passes(options: PruneOptions, passes: float, setting: str) -> None:
    """Refuse to draw prompts by a history that they never have.

    Args:
        options: Of pruning.
        passes: Visits of a prompt in the run.
        setting: What they follow from.

    Raises:
        ConfigurationError: There are fewer than two.
    """
    if options.prompt_keep < 1 and passes < 2 and not options.allow_single_epoch:
        raise ConfigurationError(
            f"prune.prompt_keep={options.prompt_keep} draws prompts by their history, and "
            f"{setting} visits each {passes:.2g} times; train longer, set prune.prompt_keep=1.0, "
            "or prune.allow_single_epoch=True for uniform draws"
        )


def has_other_terms(config: Mapping[str, Any]) -> bool:
    """Whether a term of the loss acts where the advantage is 0, so that no completion is inert."""
    actor = "actor_rollout_ref.actor"
    return bool(
        at(config, f"{actor}.use_kl_loss", False)
        or at(config, f"{actor}.entropy_coeff", 0) != 0
        or at(config, f"{actor}.policy_loss.loss_mode", "vanilla") == "dro"
    )


def _check_sizes(config: Mapping[str, Any]) -> None:
    group = at(config, "actor_rollout_ref.rollout.n", 1)
    if group < 2:
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.n={group}: a group needs at least 2 completions, for a "
            f"single one has no baseline to be better than; raise it, {OFF}"
        )
    batch = at(config, "data.train_batch_size")
    fetched = at(config, "data.gen_batch_size")
    if fetched not in (None, batch):
        raise ConfigurationError(
            f"data.gen_batch_size={fetched} is not data.train_batch_size={batch}: a step is "
            f"decided on as a whole; leave it out, {OFF}"
        )
    mini = at(config, "actor_rollout_ref.actor.ppo_mini_batch_size")
    if batch % mini:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide "
            f"data.train_batch_size={batch}; change one of them"
        )


def _check_loss(config: Mapping[str, Any]) -> None:
    actor = "actor_rollout_ref.actor"
    mode = at(config, f"{actor}.loss_agg_mode", "token-mean")
    if mode not in LOSS_AGG_MODES:
        raise UnsupportedLossError(
            f"{actor}.loss_agg_mode={mode} has no known denominator, so its pruned gradient cannot "
            f"be made unbiased; use one of {', '.join(LOSS_AGG_MODES)}, {OFF}"
        )
    scale = at(config, f"{actor}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and scale is None:
        raise UnsupportedLossError(
            f"{actor}.loss_agg_mode={mode} with {actor}.loss_scale_factor=null divides by the "
            "longest completion of a micro-batch, which pruning changes; set loss_scale_factor to "
            f"data.max_response_length, {OFF}"
        )
    loss = at(config, f"{actor}.policy_loss.loss_mode", "vanilla")
    if loss == "sapo" and not mode.startswith("seq-mean"):
        raise UnsupportedLossError(
            f"{actor}.policy_loss.loss_mode=sapo is divided by rows whatever {actor}."
            f"loss_agg_mode={mode} says, and KL and entropy by tokens: no weight of a row fits "
            f"both; set {actor}.loss_agg_mode=seq-mean-token-mean, {OFF}"
        )
    if loss not in LOSS_MODES:
        raise UnsupportedLossError(
            f"{actor}.policy_loss.loss_mode={loss} is not known to be a sum over completions that "
            "depend on themselves alone (clip_cov, kl_cov and geo_mean take statistics of a "
            f"micro-batch); use one of {', '.join(LOSS_MODES)}, {OFF}"
        )
