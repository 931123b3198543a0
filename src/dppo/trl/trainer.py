"""`DPPOTrainer`: the host's trainer, its training passes given fewer completions.

The only change with respect to `GRPOTrainer` is which rows the log-prob and gradient passes see and
by what each row's gradient is multiplied. Rollout, rewards, advantages, loss, logging, evaluation
and checkpoints are the host's; `DPPOTrainer._compute_loss is GRPOTrainer._compute_loss`.

Where things happen:

* `_generate` has the rollout; rewards are computed there, before the old and reference passes, and
  the survivors are decided (`decision.decide`).
* What the passes then see, and the weights, are in `weighted.WeightedPasses`.
* The loader rolls out K of every M prompts (`windows`); the generation's number leads to their
  probabilities.
"""

import inspect
import os
import textwrap
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from numpy.typing import NDArray
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import get_config_model_id

from dppo._checkpoints import checkpoint_path
from dppo.errors import ConfigurationError
from dppo.estimator.diagnostics import StepTimes
from dppo.estimator.weights import loss_denominator
from dppo.pruner import Pruner
from dppo.trl import (
    contract,
    gradients,
    metrics,
    notices,
    pruning_state,
    ranks,
    resume,
    startup,
)
from dppo.trl.auto_keep import AutoKeep
from dppo.trl.clock import PhaseClock
from dppo.trl.config import DPPOConfig
from dppo.trl.decision import Basis, Decision, Rows, decide
from dppo.trl.packed import room_of
from dppo.trl.recorder import record_generation
from dppo.trl.reward_failures import Failures
from dppo.trl.rollout import Rollout
from dppo.trl.rollout_file import RolloutFile
from dppo.trl.settle import settle, without
from dppo.trl.signal import Signal, signal
from dppo.trl.totals import Totals
from dppo.trl.weighted import WeightedPasses
from dppo.trl.windows import Window, Windows, WindowSampler, WindowStream

__all__ = ["DPPOTrainer"]


class DPPOTrainer(WeightedPasses):
    """`GRPOTrainer` on a random part of the prompts and completions, its expected gradient kept.

    Takes everything `GRPOTrainer` takes. With `completion_keep=1.0`, `prompt_keep=1.0` and no
    packing it is `GRPOTrainer`, bit for bit.

    Args:
        model: As for `GRPOTrainer`, like all other arguments.
        reward_funcs: Their signatures and results are checked.
        args: A `DPPOConfig`.
        train_dataset: Checked for its `prompt` column and overlong prompts.
        eval_dataset: Evaluation is the host's, unpruned.
        processing_class: Tokenizer.
        *rest: Further positional arguments of `GRPOTrainer`.
        **kwargs: Further keyword arguments of `GRPOTrainer`.

    Raises:
        ConfigurationError: Something cannot work or cannot be exact; before weights are loaded
            where it can be known then.
    """

    _tag_names = ("trl", "grpo", "dppo")
    _name = "DPPO (Dynamic Pruning Policy Optimization)"
    _paper = {  # noqa: RUF012 - the host's own form
        "title": "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization",
        "id": "2603.04135",
        "citation": textwrap.dedent("""\
            @article{zhu2026unbiased,
                title        = {{Unbiased Dynamic Pruning for Efficient Group-Based Policy
                                Optimization}},
                author       = {Zhu and Ren and Li and Lin and Yang and Liu and Zhen and Liu
                                and Zhang},
                year         = 2026,
                eprint       = {arXiv:2603.04135},
            }"""),
    }

    def __init__(  # noqa: PLR0917 - the host's parameters, in its order
        self,
        model: Any,
        reward_funcs: Any = None,
        args: DPPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = DPPOConfig(f"{name.split('/')[-1]}-DPPO")
        if not isinstance(args, DPPOConfig):
            raise ConfigurationError(
                f"args must be a DPPOConfig, got {type(args).__name__}; it takes all that "
                "GRPOConfig takes"
            )
        first = (model, reward_funcs, args, train_dataset, eval_dataset, processing_class)
        host = inspect.signature(super().__init__)
        given = host.bind(*first, *rest, **kwargs).arguments
        self._failures = Failures(args.reward_failures == "skip", args.reward_failure_limit)
        super().__init__(**startup.checked(given, self._failures))
        self._failures.shared = self.accelerator.num_processes > 1
        contract.check_attributes(self)
        startup.check_model(self)
        gradients.check_start(self)
        self._begin_passes()
        self.clock = PhaseClock()
        self.pruner = Pruner(args.prune_config(), seed=args.seed)
        self._auto = AutoKeep(args, self.clock) if args.chooses_keep else None
        self._windows = Windows(self.pruner, args, self.clock)
        self._totals, self._times = Totals(), StepTimes()
        self._rollout_file: RolloutFile | None = None
        if args.record_rollouts is not None:
            self._rollout_file = RolloutFile(args.record_rollouts)
            self.add_callback(self._rollout_file)
        size = self.args.record_gradients
        self._row_gradients = None if size is None else gradients.RowGradients(size)
        self._notices = notices.Notices()
        self._generation = 0
        self._sampler: Any = None
        self._resumed: resume.Resumed | None = None
        self._basis: Basis | None = None
        self.add_callback(resume.LineUp(self))
        self.add_callback(startup.StepClock(self.clock, when_over=lambda: metrics.log_times(self)))

    # -- what happened, for whoever watches --------------------------------------------------------

    @property
    def phase(self) -> str:
        """What is running now: "idle", "rollout", "score", "prune" or "train"."""
        return self.clock.phase

    def totals(self) -> dict[str, Any]:
        """Tokens, completions and seconds since the start of this process, JSON-ready."""
        return self._totals.to_dict(self.clock.seconds)

    # -- prompts -----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The host's loader; where prompts of a stream are pruned, over the windows' rows."""
        given: Any = self.train_dataset
        stream = isinstance(given, IterableDataset)
        if stream and self.args.prunes_prompts:
            return self._get_dataloader(
                dataset=WindowStream(self._windows, given),
                description="Training",
                batch_size=self._train_batch_size * self.args.generation_steps,
                is_training=True,
            )
        if not (stream and self.args.data_seed is not None and self.shuffle_dataset):
            return super().get_train_dataloader()
        # The host would shuffle by `seed`.
        self.train_dataset, self.shuffle_dataset = given.shuffle(seed=self.args.data_seed), False
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset, self.shuffle_dataset = given, True

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.args.prunes_prompts:
            data: Any = self.train_dataset  # `dataset` may lack the columns of ids and beliefs
            return WindowSampler(self._windows, data)
        self._sampler = super()._get_train_sampler(dataset)
        if self.args.data_seed is not None and self.shuffle_dataset:
            self._sampler.generator.manual_seed(self.args.data_seed)
        return self._sampler

    # -- rollout and decision ----------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            output = super()._generate_and_score_completions(inputs)
            metrics.log_unweighted(self, len(inputs))
            return output
        rollout = self._rollout = Rollout(inputs)
        self._decision = None
        if self.args.prunes_prompts:
            first_row = self.accelerator.process_index * len(inputs)
            rollout.window = self._windows.of(self._generation, inputs, first_row=first_row)
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._rollout = None
        if self.args.signal_reward is not None and not self._plans:
            told = self._told(rollout.scored.float().cpu().numpy())
            dead = np.repeat(told.dead_P, self.num_generations)
            output["advantages"] = without(
                output["advantages"], dead, self.accelerator.process_index
            )
        if self.args.decides and self._decision is None:  # shadow: nothing ran early
            self._decision = self._decide(rollout)
        if self._decision is None:
            tokens = metrics.gathered(self, rollout.completion_tokens())
            self._totals.add_unpruned(tokens, group=self.num_generations)
            return output
        with self.clock.running("prune"):
            if self._plans:
                output["advantages"] = settle(
                    output["advantages"],
                    self._decision,
                    rank=self.accelerator.process_index,
                    notices=self._notices,
                )
            metrics.log_decision(self)
        if self._row_gradients is not None and self._rollout_file is not None:
            self._rollout_file.add_gradients(self._row_gradients.of(self, output))
        if self._audit is not None:
            self._audit.rolled_out(self, output)
        self._generation += 1
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        if self._rollout is None:
            return super()._generate(prompts)
        rollout = self._rollout
        generated = self._sampled(prompts, rollout)
        if self._plans:
            rollout.merge_extra_fields()
            self._calculate_rewards(
                rollout.inputs, prompts, rollout.completions, rollout.completion_ids
            )
            self._decision = self._decide(rollout)
        return generated

    def _sampled(self, prompts: list[Any], rollout: Rollout) -> tuple[Any, ...]:
        """What the host rolls out, noted."""
        with self.clock.running("rollout"):
            if self.args.decides and not self.use_vllm:
                policy = self.accelerator.unwrap_model(self.model)
                with record_generation(startup.base_model(policy), self.temperature) as recorder:
                    generated = super()._generate(prompts)
                rollout.note(generated, recorder)
            else:
                generated = super()._generate(prompts)
                rollout.note(generated, None)
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rollout = self._rollout
        if rollout is not None and rollout.rewards is not None:
            return rollout.rewards
        with nullcontext() if rollout is None else self.clock.running("score"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            if self._failures.shared:
                ranks.share_failure(self.accelerator, self._failures.take())
        if rollout is not None:
            rollout.rewards = rewards
        return rewards

    def _decide(self, rollout: Rollout) -> Decision:
        with self.clock.running("prune"):
            ends: Any = None
            if self.mask_truncated_completions:
                ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
            facts = rollout.facts(
                per=loss_denominator(self.loss_type).per, masked_unless_ending_in=ends
            )
            local = torch.from_numpy(facts).to(self.accelerator.device, torch.float32)
            gathered = self.accelerator.gather(local).cpu().numpy().astype(np.float64)
            keep = self.args.keep_at(self.state.global_step, self.state.max_steps)
            if self._auto is not None:
                self._auto.measure(Rows.from_facts(gathered), self.pruner, self.accelerator)
                chosen = self._auto.at(self.state.global_step)
                keep = chosen if keep is None else keep
            # Of the optimizer step under way, counted from the generation's first micro-step; they
            # differ where a resumed run begins inside a generation that was not saved.
            left = self.current_gradient_accumulation_steps - self._window_position
            accumulation = self.args.gradient_accumulation_steps
            basis = Basis(
                generation=self._generation,
                window_left=(self._position + left - 1) % accumulation + 1,
                keep=keep,
                facts_N5=gathered,
                rewards_NF=rollout.scored.float().cpu().numpy(),
            )
            decision = self._decision_on(basis, rollout.window)
            if self._auto is not None:
                self._auto.remember(self.pruner)
            if rollout.window is not None:
                self.pruner.observe(
                    rollout.window.ids,
                    decision.observed_PG,
                    lengths_PG=decision.rows.completion_tokens.reshape(decision.rewards_PG.shape),
                    # There its observation may come late; it then counts as a later one's.
                    step=max(basis.generation, self.pruner.earliest_observation)
                    if self._position
                    else basis.generation,
                )
            return decision

    def _decision_on(self, basis: Basis, window: Window | None) -> Decision:
        """A function of its arguments, so that a resumed run makes it again."""
        rows_N = Rows.from_facts(basis.facts_N5)
        self._notices.surprisal(rows_N.surprisal, rows_N.loss_tokens)
        self._basis = basis
        return self._drawn(basis, window, self.pruner)

    def _drawn(self, basis: Basis, window: Window | None, pruner: Pruner) -> Decision:
        """The same with the draws of a pruner; each row stays with its optimizer step."""
        rows_N = Rows.from_facts(basis.facts_N5)
        return decide(
            pruner,
            self._told(basis.rewards_NF),
            rows_N,
            geometry=self._geometry(),
            rank=self.accelerator.process_index,
            generation=basis.generation,
            window_left=basis.window_left,
            loss_type=self.loss_type,
            # With pruning off, every row is trained on, with or without a gradient.
            other_terms=self.beta != 0 or self._entropy_bonus_enabled or not self.args.decides,
            sort=self.args.packing != "none",
            room=None if self._form is None else room_of(rows_N, self._form, self.args),
            moves=self._moves,
            keep=basis.keep if self.args.decides else 1.0,
            window=window,
            order_seed=self.pruner.seed,
        )

    def _told(self, rewards_NF: NDArray[np.float32]) -> Signal:
        """What the rewards of all ranks say."""
        column = self.args.signal_reward
        return signal(
            rewards_NF,
            self.reward_weights.cpu().numpy(),
            group=self.num_generations,
            scale=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
            signal_reward=None if column is None else self.reward_func_names.index(column),
        )

    # -- beginning, going on, checkpoints ----------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: Path of a checkpoint. True: the latest in `output_dir` that was
                saved to its end. None: what the configuration says.
            trial: As for the host.
            ignore_keys_for_eval: As for the host.

        Raises:
            ConfigurationError: There is none, or it belongs to another run.
        """
        given = resume_from_checkpoint
        given = self.args.resume_from_checkpoint if given is None else given
        path = checkpoint_path(given, str(self.args.output_dir))
        return super().train(path, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.decides or self._plans:
            # First, for the host's method ends with the upload, and what it writes last vouches
            # for the rest.
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = os.path.join(self._get_output_dir(trial=trial), name)
            os.makedirs(folder, exist_ok=True)
            under_way = pruning_state.under_way(self)
            if under_way is not None:
                rank = self.accelerator.process_index
                pruning_state.save_under_way(folder, rank, under_way)
                self.accelerator.wait_for_everyone()
            if self.args.should_save:
                pruning_state.save(folder, self)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            resume.restore(self, checkpoint)
