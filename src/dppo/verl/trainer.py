"""`PPOTrainerPruneSync`: verl's synchronous trainer on a random part of prompts and completions.

Every method wraps verl's own. With `completion_keep=1` and `prompt_keep=1` all of them are verl's.

* `_submit_batch_to_rollout` draws which candidates are rolled out;
* `_balance_batch`, the first stage that sees the rewards, decides on the completions and passes
  those on that any optimizer step trains on; old and reference log-probs are of them;
* `_compute_advantage` puts the advantages of the full batch back;
* `_update_actor` hands the workers one list: every (epoch, mini-batch) as many rows, each with its
  weight over its own full mini-batch's denominator.
"""

import logging
import math
import os
from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from dppo.estimator.keep_rate import GRID, KeepRate
from dppo.pruner import Pruner
from dppo.verl import plan, rollouts, rows, state, update
from dppo.verl.loss import weighted_ppo_loss
from dppo.verl.metrics import StepMetrics
from dppo.verl.options import PruneOptions, notices
from dppo.verl.plan import Plan, Rollouts, Sizes
from dppo.verl.refusals import check_config, check_passes, has_other_terms

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class PPOTrainerPruneSync(PPOTrainerSync):
    """`PPOTrainerSync` whose expected gradient is that of the full batch, computed on part of it.

    Args:
        config: verl's, with a section `prune` (`PruneOptions`).

    Raises:
        ConfigurationError: An option is unknown, or something cannot be pruned exactly.
    """

    # verl takes every other name than "sync" for an asynchronous mode.
    trainer_mode = property(lambda self: "sync", lambda self, value: None)

    def __init__(self, config: Any) -> None:
        self.options = PruneOptions.of(config.get("prune"))
        if self.options.decides:
            check_config(config, self.options)
        super().__init__(config)
        self.pruner = Pruner(self.options.prune_config(), seed=self.options.seed)
        self._auto = KeepRate() if self.options.chooses_keep else None
        self._submitted: rollouts.Submitted | None = None
        self._plan: Plan | None = None
        self._rollouts: Rollouts | None = None
        self._of_key: dict[str, int] = {}
        self._rolled_out: KVBatchMeta | None = None
        self._measured = StepMetrics()
        logger.info("prune_sync: %s", self.options)
        for notice in notices(config, self.options) if self.options.decides else ():
            logger.warning("prune_sync: %s", notice)

    # -- beginning and checkpoints -----------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        steps, rows = self.total_training_steps, len(self.train_dataset)
        passes = steps * self.config.data.train_batch_size / rows
        check_passes(self.options, passes, f"{steps} steps over {rows} prompts")

    def _setup(self) -> None:
        super()._setup()
        if self.options.prunes:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(weighted_ppo_loss, config=actor))

    def _folder(self) -> str:
        name = f"global_step_{self.global_steps}"
        return os.path.join(self.config.trainer.default_local_dir, name)

    def _settings(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        data, options = self.config.data, self.options
        return {
            "data": state.fingerprint(self.train_dataset, data.get("prompt_key", "prompt")),
            "data.train_batch_size": data.train_batch_size,
            "rollout.n": self.config.actor_rollout_ref.rollout.n,
            "actor.ppo_mini_batch_size": self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            "prune.completion_keep": options.completion_keep,
            "prune.auto_cost": options.auto_cost,
        }

    def _save_checkpoint(self) -> None:
        if self.options.prunes:  # first: what verl writes last vouches for the rest
            state.save(
                self._folder(), pruner=self.pruner, auto=self._auto, settings=self._settings()
            )
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not (self.options.prunes and self.global_steps):
            return
        given = self.config.trainer
        folder = given.resume_from_path if given.resume_mode == "resume_path" else self._folder()
        found = state.load(folder, pruner=self.pruner, auto=self._auto, settings=self._settings())
        if found:
            logger.info("prune_sync: state of step %d restored", self.global_steps)
        else:
            logger.warning("%s has no pruning state: nothing is known of any prompt", folder)

    # -- prompts -----------------------------------------------------------------------------------

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if not self.options.decides:
            return super()._submit_batch_to_rollout(batch)
        ids, window = np.zeros(0, np.int64), None
        if self.options.prompt_keep < 1:
            ids = np.array([state.prompt_id(prompt) for prompt in batch["raw_prompt"]])
            count = self.options.rolled_out(len(ids))
            window = self.pruner.select_prompts(
                ids, count=count, step=self.global_steps, keep=count / len(ids)
            )
            here = np.flatnonzero(window.kept)
            ids = ids[here]
            batch = tu.index_select_tensor_dict(batch, torch.from_numpy(here))
        self._submitted = rollouts.Submitted(list(batch["uid"]), ids, window)
        return super()._submit_batch_to_rollout(batch)

    def _step_once(
        self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int
    ) -> KVBatchMeta:
        if not self.options.decides:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        submitted = self._drawn_prompts
        batch = super()._step_once(metrics, timing_raw, len(submitted.uids))
        if self._auto is not None:
            self._learn(timing_raw)
        self._measured.times(metrics, timing_raw, shadow=self.options.shadows)
        if self.options.shadows:
            return batch
        assert self._rolled_out is not None
        ours = [key for key in batch.keys if key not in self._of_key]  # padding and copies
        if ours:
            tq.kv_clear(keys=ours, partition_id=batch.partition_id)
        return self._rolled_out

    @property
    def _drawn_prompts(self) -> "rollouts.Submitted":
        assert self._submitted is not None  # of this step
        return self._submitted

    def _learn(self, timing_raw: dict[str, float]) -> None:
        """Tell the controller what the step took."""
        assert self._auto is not None
        assert self._rollouts is not None
        found, kept = self._rollouts, self.pruner.metrics().get("cost/keep", 0.0)
        if self.options.auto_cost == "tokens":
            generated = float(found.response_tokens.sum())
            train = generated + float(found.prompt_tokens.sum())
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            self._auto.measure(fixed=generated, train=train * epochs, kept_cost=1.0)
            return
        spent = self._measured.phases(timing_raw)
        self._auto.measure(
            fixed=spent["rollout"] + spent["score"] + spent["prune"],
            train=spent["train"],
            kept_cost=kept,
        )

    # -- completions -------------------------------------------------------------------------------

    def _rows_per_rank(self) -> int:
        """Rows that a rank's part of a batch must be a multiple of."""
        part, sizes = self.config.actor_rollout_ref, []
        if not part.actor.use_dynamic_bsz:  # verl wants the old log-probs' pass to be alike
            sizes += [part.actor.ppo_micro_batch_size_per_gpu]
            sizes += [part.rollout.log_prob_micro_batch_size_per_gpu]
        if self.use_reference_policy and not part.ref.log_prob_use_dynamic_bsz:
            sizes += [part.ref.log_prob_micro_batch_size_per_gpu]
        return math.lcm(*(size or 1 for size in sizes))

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if not self.options.prunes:
            return super()._get_required_batch_multiple(dp_size)
        return dp_size * self._rows_per_rank()

    def _ranks(self) -> int:
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        if self.options.decides:
            with self._measured.pruning():
                place = self._decide(batch, metrics)
                if self.options.prunes:
                    batch = self._kept(batch, place)
        return super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)

    def _decide(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> NDArray[np.int64]:
        """Decide; the place of each row among all completions, in the order of their prompts."""
        actor = self.config.actor_rollout_ref.actor
        submitted, group = self._drawn_prompts, self.config.actor_rollout_ref.rollout.n
        place = rows.places(batch, submitted.uids, group)
        found = rollouts.read(batch, place, submitted, config=self.config)
        sizes = Sizes(
            mini_batches=self.config.data.train_batch_size // actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            ranks=self._ranks(),
            token_mean=actor.loss_agg_mode == "token-mean",
            other_terms=has_other_terms(self.config),
        )
        keep = None if self._auto is None else self._auto.at(self.global_steps - 1)
        self._rollouts = found
        self._plan = plan.decide(self.pruner, found, sizes, step=self.global_steps, keep=keep)
        if self._auto is not None:
            variance_R, cost_R = self.pruner.prospects(GRID)
            self._auto.remember(variance_R=variance_R, cost_R=cost_R)
        if submitted.window is not None:
            self.pruner.observe(
                submitted.ids,
                found.scores,
                step=self.global_steps,
                lengths_PG=found.response_tokens,
            )
        self._measured.decided(metrics, self.pruner, self._plan, found, rate=keep)
        return place

    def _kept(self, batch: KVBatchMeta, place: NDArray[np.int64]) -> KVBatchMeta:
        """The rows that any optimizer step trains on, and padding."""
        assert self._plan is not None
        self._of_key = dict(zip(batch.keys, place.tolist(), strict=True))
        kept = set(self._plan.union.tolist())
        keys = [key for key in batch.keys if self._of_key[key] in kept] or batch.keys[:1]
        # verl's own metrics of a step are of all of them.
        self._rolled_out = update.with_advantages(
            batch, self._plan.choices[0].advantages.ravel(), self._of_key
        )
        batch = batch.select_keys(keys)
        multiple = self._get_required_batch_multiple(self._ranks())
        # At least one, for steps with fewer rows than others.
        padding = multiple - len(batch) % multiple
        return rows.with_padding(batch, padding, eos=self.tokenizer.eos_token_id)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's, for what else it does; then the advantages of the full batch instead."""
        batch = super()._compute_advantage(batch, metrics)
        if not self.options.prunes:
            return batch
        assert self._plan is not None
        advantages = self._plan.choices[0].advantages.ravel()
        return update.with_advantages(batch, advantages, self._of_key)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.options.prunes:
            return super()._update_actor(batch, metrics)
        assert self._plan is not None
        assert self._rollouts is not None
        length_PG = self._rollouts.prompt_tokens + self._rollouts.response_tokens
        laid = plan.layout(
            self._plan, length_PG.ravel(), self._ranks(), multiple=self._rows_per_rank()
        )
        group, found = self.actor_rollout_wg, dict[str, Any]()
        self.actor_rollout_wg = update.Updating(group, laid)
        try:
            result = super()._update_actor(update.laid_out(batch, laid, self._of_key), found)
        finally:
            self.actor_rollout_wg = group
        self._measured.updated(metrics, found)
        return result
