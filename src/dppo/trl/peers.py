"""The selection rules of others in the same trainer: BIASED, for comparison only.

`PeerTrainer` is `DPPOTrainer` whose survivors are chosen by a method of `dppo.peers` instead of the
estimator, so that a comparison differs in nothing but the rule. One process, no resuming.

    from dppo.trl.peers import PeerConfig, PeerTrainer
    PeerTrainer(model, reward, PeerConfig("out", peer="cppo", peer_rate=0.5), data).train()
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dppo._checks import Floats
from dppo.errors import ConfigurationError
from dppo.estimator.designs import generator
from dppo.estimator.weights import loss_denominator
from dppo.peers import SkipRates, rules
from dppo.pruner import DROP_REASONS, Pruner
from dppo.trl import config_checks
from dppo.trl.config import DPPOConfig
from dppo.trl.decision import Decision, Rows
from dppo.trl.peer_prompts import PromptSupply, SupplySampler
from dppo.trl.prompt_ids import dataset_ids, row_id
from dppo.trl.rollout import Rollout
from dppo.trl.trainer import DPPOTrainer
from dppo.types import CompletionChoice

__all__ = ["PEERS", "PeerConfig", "PeerTrainer"]

logger = logging.getLogger(__name__)

PEERS = {
    "cppo": "keeps the share peer_rate of a generation's completions, those of largest |A|",
    "pods": "keeps the share peer_rate of each group, of largest reward variance",
    "dapo": "rolls out again for groups without signal",
    "greso": "skips prompts without signal at their latest visits, and does as dapo",
    "algorithm-1": "the paper's Algorithm 1: drops floor(peer_rate n) of a group's n low ones",
}
REFILLING = ("dapo", "greso")
MOST_BATCHES = 10
"""Rollouts of one generation, the first included; then what has no signal stays."""


@dataclass
class PeerConfig(DPPOConfig):
    """`DPPOConfig` with a peer in place of a rule.

    Parameters:
        peer (`str`, *optional*, defaults to `"cppo"`):
            One of `PEERS`.
        peer_rate (`float`, *optional*, defaults to `0.5`):
            What it says there; in (0, 1).

    Raises:
        ConfigurationError: A value is outside its range, or an option of the estimator is set.
    """

    completion_keep: float | str | None = field(default=0.5)
    completion_rule: str = field(default="inert")
    peer: str = field(default="cppo", metadata={"help": f"One of {', '.join(PEERS)}."})
    peer_rate: float = field(default=0.5, metadata={"help": "Of cppo, pods and algorithm-1."})

    def __post_init__(self) -> None:
        """Check that no rule of the estimator is asked for as well."""
        config_checks.one_of("peer", self.peer, tuple(PEERS))
        if not 0 < self.peer_rate < 1:
            raise ConfigurationError(f"peer_rate={self.peer_rate}: must be in (0, 1)")
        if self.completion_rule != "inert" or self.prompt_keep != 1:
            raise ConfigurationError(
                f"peer={self.peer!r} chooses what is trained on; leave completion_rule and "
                f"prompt_keep alone, got {self.completion_rule!r}, {self.prompt_keep}"
            )
        if self.dataloader_num_workers:
            raise ConfigurationError(
                f"peer={self.peer!r} with dataloader_num_workers={self.dataloader_num_workers}: "
                "a worker would not know what was rolled out; set it to 0"
            )
        super().__post_init__()


class PeerPruner(Pruner):
    """Gives what a method keeps the form of a choice; `weight` is its factor, not 1 / pi."""

    def __init__(self, config: PeerConfig) -> None:
        super().__init__(config.prune_config(), seed=config.seed)
        self.peer, self.rate = config.peer, config.peer_rate
        self.share_N: Floats = np.ones(0)
        """What the rows of the generation count in the denominator of the loss."""
        self.advantages_PG: np.ndarray | None = None
        """The method's own, of the latest generation."""

    def select_completions(self, rewards_PG: Any, **given: Any) -> CompletionChoice:
        """The method's choice; rows without a gradient are never run."""
        all_live = super().select_completions(rewards_PG, **given)
        rewards = np.asarray(rewards_PG, np.float64)
        factor = self._factor(rewards, all_live.advantages, given)
        kept = all_live.live & (factor != 0)
        left_out = DROP_REASONS.index("sampled_out")
        reason = np.where(all_live.live & ~kept, left_out, all_live.reason)
        counts = np.bincount(reason[reason >= 0], minlength=len(DROP_REASONS)).tolist()
        choice = replace(
            all_live,
            kept=kept,
            weight=np.where(kept, factor, 0.0),
            reason=reason,
            dropped=dict(zip(DROP_REASONS, counts, strict=True)),
        )
        self._metrics.pop()
        assert self._latest is not None  # just chosen
        self._remember(given["step"], choice, self._latest[0].cost_PG)
        del self._metrics[-1]["variance/inflation"]  # of inclusion probabilities, here are none
        return choice

    def _factor(
        self, rewards_PG: np.ndarray, advantages_PG: np.ndarray, given: dict[str, Any]
    ) -> np.ndarray:
        shape = rewards_PG.shape
        share_PG = self.share_N.reshape(shape)
        if self.peer == "algorithm-1":
            iteration = given.get("iteration", 0)
            rng = generator(self.seed, given["step"], stream="completion", iteration=iteration)
            return rules.algorithm_1(advantages_PG, rate=self.rate, rng=rng)
        if self.peer == "cppo":
            chosen = rules.cppo(advantages_PG, keep=self.rate)
        elif self.peer == "pods":
            chosen, self.advantages_PG = rules.pods(rewards_PG, keep=self.rate)
        else:
            alive_P = ~rules.silent_groups(rewards_PG)
            chosen = np.repeat(alive_P[:, None], shape[1], axis=1)
        return rules.mean_over(chosen, share_PG)


class PeerTrainer(DPPOTrainer):
    """`DPPOTrainer` with a biased rule.

    Raises:
        ConfigurationError: More than one process, or `args` is no `PeerConfig`.
    """

    args: PeerConfig  # type: ignore[reportIncompatibleVariableOverride] - checked below

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if not isinstance(self.args, PeerConfig):
            raise ConfigurationError(f"args must be a PeerConfig, got {type(self.args).__name__}")
        if self.accelerator.num_processes > 1:
            raise ConfigurationError(f"peer={self.args.peer!r} runs in one process only")
        logger.warning(
            "%s (%s) is BIASED: it is here to be compared with",
            *(self.args.peer, PEERS[self.args.peer]),
        )
        self.pruner: PeerPruner = PeerPruner(self.args)
        self.rejected_tokens = 0
        """Completion tokens of groups that were thrown away, in all."""
        self._skip = SkipRates()
        self._supply: PromptSupply | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train from the beginning."""
        if resume_from_checkpoint or self.args.resume_from_checkpoint:
            raise ConfigurationError(
                f"peer={self.args.peer!r} cannot be resumed: what it knows of the prompts is in "
                "no checkpoint"
            )
        return super().train(None, trial, ignore_keys_for_eval)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.args.peer not in REFILLING:
            return super()._get_train_sampler(dataset)
        data: Any = self.train_dataset
        self._supply = PromptSupply(
            dataset_ids(data, self.args.prompt_id_column),
            self._skip.probability if self.args.peer == "greso" else lambda prompt: 1.0,
            seed=self.args.order_seed,
        )
        return SupplySampler(self._supply, self.args)

    def _sampled(self, prompts: list[Any], rollout: Rollout) -> tuple[Any, ...]:
        generated = super()._sampled(prompts, rollout)
        if self.args.peer in REFILLING:
            self._refill(prompts, rollout)
        return generated

    def _refill(self, prompts: list[Any], rollout: Rollout) -> None:
        """Roll out other prompts in place of those of groups without signal."""
        assert self._supply is not None  # the loader has been made
        data: Any = self.train_dataset
        size, rows = self.num_generations, rollout.inputs
        rewards = self._scored(rollout, prompts)
        fresh = np.arange(len(rows) // size)
        for _ in range(MOST_BATCHES - 1):
            self._note(rows, rewards, fresh)
            dead = rules.silent_groups(self._told(rewards.numpy()).rewards_PG.astype(np.float64))
            fresh = np.flatnonzero(dead)
            if not fresh.size:
                break
            places = (fresh[:, None] * size + np.arange(size)).ravel().tolist()
            drawn = np.repeat([next(self._supply) for _ in fresh], size).tolist()
            part = Rollout([dict(data[index]) for index in drawn])
            asked = [row["prompt"] for row in part.inputs]
            super()._sampled(asked, part)
            self.rejected_tokens += int(rollout.completion_tokens()[places].sum())
            rewards[places] = self._scored(part, asked)
            rollout.replace(places, part)
            for place, prompt in zip(places, asked, strict=True):
                prompts[place] = prompt
        else:
            self._note(rows, rewards, fresh)
        rollout.rewards = rewards.to(self.accelerator.device)

    def _scored(self, rollout: Rollout, prompts: list[Any]) -> Any:
        rollout.merge_extra_fields()
        outer, self._rollout = self._rollout, rollout
        try:
            rewards = self._calculate_rewards(
                rollout.inputs, prompts, rollout.completions, rollout.completion_ids
            )
        finally:
            self._rollout = outer
        return rewards.cpu().clone()

    def _note(self, rows: list[dict[str, Any]], rewards: Any, groups: np.ndarray) -> None:
        """Tell the skipping rule of rollouts."""
        assert self._supply is not None
        if not groups.size:
            return
        size = self.num_generations
        ids = [row_id(rows[g * size], self.args.prompt_id_column) for g in groups.tolist()]
        seen_PG = self._told(rewards.numpy()).rewards_PG[groups].astype(np.float64)
        self._skip.observe(ids, seen_PG, adapt=self._supply.passes > 0)

    def _decision_on(self, basis: Any, window: Any) -> Decision:
        rows = Rows.from_facts(basis.facts_N5)
        per_row = loss_denominator(self.loss_type).kind == "rows"
        tokens = rows.loss_tokens.astype(np.float64)
        self.pruner.share_N = np.ones(tokens.size) if per_row else tokens
        return super()._decision_on(basis, window)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and self.pruner.advantages_PG is not None:
            host = output["advantages"]
            output["advantages"] = host.new_tensor(self.pruner.advantages_PG.ravel())
        return output
