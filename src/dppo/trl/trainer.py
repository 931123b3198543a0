"""`DPPOTrainer`: the host's trainer, its training passes given fewer completions.

The only change with respect to `GRPOTrainer` is which rows the log-prob and gradient passes see and
by what each row's gradient is multiplied. Rollout, rewards, advantages, loss, logging, evaluation
and checkpoints are the host's; `DPPOTrainer._compute_loss is GRPOTrainer._compute_loss`.

Where things happen:

* `_generate` has the rollout; rewards are computed there, before the old and reference passes, and
  the survivors are decided (`decision.decide`).
* `_get_per_token_logps_and_entropies` is every pass's door to the model: old and reference passes
  score survivors only; in the gradient pass it multiplies the gradient of each row (the gate).
* `_prepare_inputs` hands out the micro-batches, `training_step` passes over empty ones.
* The loader rolls out K of every M prompts (`windows`); the generation's number leads to their
  probabilities.
"""

import inspect
import os
import textwrap
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from numpy.typing import NDArray
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import (
    get_config_model_id,
    split_pixel_values_by_grid,
    unsplit_pixel_values_by_grid,
)

from dppo._checkpoints import checkpoint_path
from dppo.errors import ConfigurationError
from dppo.estimator.weights import loss_denominator
from dppo.pruner import Pruner
from dppo.trl import (
    contract,
    full_batch,
    metrics,
    notices,
    passes,
    pruning_state,
    resume,
    rows,
    startup,
)
from dppo.trl.clock import PhaseClock
from dppo.trl.config import DPPOConfig
from dppo.trl.decision import Basis, Decision, Rows, Signal, decide, signal
from dppo.trl.gate import Gate, scale_gradient
from dppo.trl.packed import PackedModel
from dppo.trl.recorder import record_generation
from dppo.trl.rollout import Rollout
from dppo.trl.schedule import Geometry
from dppo.trl.settle import settle, without
from dppo.trl.totals import Totals
from dppo.trl.windows import Window, Windows, WindowSampler, WindowStream

__all__ = ["DPPOTrainer"]


class DPPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that trains on a random part of the completions, its expected gradient kept.

    Takes everything `GRPOTrainer` takes. With `completion_keep=1.0` it is `GRPOTrainer`, bit for
    bit.

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

    # Declared as what they are once the host has been constructed.
    args: DPPOConfig
    model: Any
    accelerator: Any
    num_generations: int

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
        super().__init__(**startup.checked(host.bind(*first, *rest, **kwargs).arguments))
        contract.check_attributes(self)
        startup.check_model(self)
        self._shift_invariant = rows.shift_invariant(self.model.config)
        self.clock = PhaseClock()
        self.pruner = Pruner(args.prune_config(), seed=args.seed)
        self._windows = Windows(self.pruner, args, self.clock)
        self._totals = Totals()
        self._notices = notices.Notices()
        self._averages = full_batch.StepAverages()
        self._density: Counter[str] = Counter()
        self._generation = 0
        self._packs = False
        self._sampler: Any = None
        self._resumed: resume.Resumed | None = None
        self._rolled_out_at = -1
        self._window_position = 0
        self._window_loss: Any = 0.0
        self._rollout: Rollout | None = None
        self._basis: Basis | None = None
        self._decision: Decision | None = None
        self._gate: Gate | None = None
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
        if self.args.signal_reward is not None and not self.args.prunes:
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
            if self.args.prunes:
                output["advantages"] = settle(
                    output["advantages"],
                    self._decision,
                    rank=self.accelerator.process_index,
                    notices=self._notices,
                )
            metrics.log_decision(self)
        self._generation += 1
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        if self._rollout is None:
            return super()._generate(prompts)
        rollout = self._rollout
        with self.clock.running("rollout"):
            if self.args.decides and not self.use_vllm:
                policy = self.accelerator.unwrap_model(self.model)
                with record_generation(startup.base_model(policy), self.temperature) as recorder:
                    generated = super()._generate(prompts)
                rollout.note(generated, recorder)
            else:
                generated = super()._generate(prompts)
                rollout.note(generated, None)
        if self.args.prunes:
            rollout.merge_extra_fields()
            self._calculate_rewards(
                rollout.inputs, prompts, rollout.completions, rollout.completion_ids
            )
            self._decision = self._decide(rollout)
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rollout = self._rollout
        if rollout is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = rollout.rewards
        if rewards is None:
            with self.clock.running("score"):
                rewards = super()._calculate_rewards(
                    inputs, prompts, completions, completion_ids_list
                )
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
            # Of the optimizer step under way, counted from the generation's first micro-step; they
            # differ where a resumed run begins inside a generation that was not saved.
            left = self.current_gradient_accumulation_steps - self._window_position
            accumulation = self.args.gradient_accumulation_steps
            basis = Basis(
                generation=self._generation,
                window_left=(self._position + left - 1) % accumulation + 1,
                keep=self.args.keep_at(self.state.global_step, self.state.max_steps),
                facts_N4=gathered,
                rewards_NF=rollout.scored.float().cpu().numpy(),
            )
            decision = self._decision_on(basis, rollout.window)
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
        rows_N = Rows.from_facts(basis.facts_N4)
        self._notices.surprisal(rows_N.surprisal, rows_N.loss_tokens)
        self._basis = basis
        return decide(
            self.pruner,
            self._told(basis.rewards_NF),
            rows_N,
            geometry=self._geometry(),
            rank=self.accelerator.process_index,
            generation=basis.generation,
            window_left=basis.window_left,
            loss_type=self.loss_type,
            other_terms=self.beta != 0 or self._entropy_bonus_enabled,
            sort=self.args.packing != "none",
            capacity=self._capacity(rows_N) if self._packs else None,
            keep=basis.keep,
            window=window,
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

    def _capacity(self, rows_N: Rows) -> int:
        """Tokens of a packed micro-batch: by default what a padded one of the host would hold."""
        width = int(rows_N.prompt_tokens.max() + rows_N.completion_tokens.max())
        return self.args.packing_capacity or self.args.per_device_train_batch_size * max(width, 1)

    def _geometry(self) -> Geometry:
        return Geometry(
            ranks=self.accelerator.num_processes,
            micro_batch=self.args.per_device_train_batch_size,
            steps_per_generation=self.args.generation_steps,
            iterations=self.num_iterations,
            accumulation=self.args.gradient_accumulation_steps,
        )

    # -- micro-batches -----------------------------------------------------------------------------

    def _roll_out(self, generation_batch: Any) -> None:
        """Roll out and decide, if this micro-step is a generation's first."""
        fresh = self._position == 0 and self._rolled_out_at != self._step
        if fresh or self._buffered_inputs is None:
            generation = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_pixel_values_by_grid(generation)
            self._rolled_out_at = self._step

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not (self.args.prunes and self.model.training):
            return super()._prepare_inputs(generation_batch)
        self._roll_out(generation_batch)
        micro_batch, generation = self._plan.micro_batches[self._position], self._buffered_inputs
        assert micro_batch is not None  # `training_step` passes over empty micro-steps
        assert generation is not None  # just rolled out
        inputs = self._trimmed(
            unsplit_pixel_values_by_grid(rows.select_rows(generation, micro_batch.rows_R))
        )
        mask = full_batch.loss_mask(inputs)
        real = torch.from_numpy(micro_batch.rows_R != rows.PADDING)
        for side in ("prompt_mask", "completion_mask"):
            if not self._packs:
                self._count(int(inputs[side].cpu()[real].sum()), inputs[side].numel())
        gate = Gate.of(
            micro_batch,
            kind=loss_denominator(self.loss_type).kind,
            full_rows=self.args.per_device_train_batch_size,
            loss_tokens=int(mask.sum()),
            prompt_factor=self._plan.prompt_factor(loss_denominator(self.loss_type).kind),
        )
        return {**inputs, Gate.KEY: gate}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-step, or pass over it when none of its completions is left."""
        empty = False
        if self.args.prunes:
            began = time.perf_counter()
            model.train()
            self._roll_out(inputs)
            self._current_train_step_time += time.perf_counter() - began  # the host's `step_time`
            self._count_segment(self._position)
            empty = self._plan.micro_batches[self._position] is None
        if empty:
            self._step += 1
            loss = torch.zeros((), device=self.accelerator.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._window_loss = self._window_loss + loss.detach()
        self._window_position += 1
        if self.accelerator.sync_gradients:
            self._window_position = 0
            if self.args.prunes:
                metrics.log_step(self)
        return loss

    @property
    def _position(self) -> int:
        """Of this micro-step in its generation."""
        return self._step % self._geometry().micro_steps

    @property
    def _plan(self) -> Decision:
        """The decision on the generation that is being trained on."""
        assert self._decision is not None  # made by the rollout that precedes every use
        return self._decision

    def _count_segment(self, position: int) -> None:
        """Note what the micro-steps of a segment would have held, at its first one."""
        rank = self.accelerator.process_index
        for segment in self._plan.segments:
            if segment.first == position:
                counts = self._plan.denominators(segment, self._geometry(), rank=rank)
                self._averages.add_denominators(counts)

    # -- passes through the model ------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        gate = self._gate
        if gate is not None and gate.replayed is not None:
            return gate.replayed.log_probs, gate.replayed.entropies, None
        host = super()._get_per_token_logps_and_entropies
        whole = any(kwargs.get(key) is not None for key in rows.UNTRIMMED_KEYS)
        if self._packs and self.model.training and not whole:
            count = self._count if torch.is_grad_enabled() else None
            hidden = getattr(self.model.config.get_text_config(), "hidden_size", 1)
            window = self.args.packing_window
            model = PackedModel(model, window=window, hidden=hidden, count=count)
        if gate is not None:
            log_probs, entropies, aux = host(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
            gate.scores = full_batch.Scores(log_probs.detach(), entropies.detach())
            return (
                scale_gradient(log_probs, gate.factor_R),
                scale_gradient(entropies, gate.entropy_factor_R),
                aux,
            )
        if self._decision is None or self._rollout is None or not self.args.prunes:
            return host(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if whole:
            return host(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        def score(ids: Tensor, mask: Tensor, width: int) -> Tensor:
            return host(model, ids, mask, width)[0]

        bins = self._plan.scoring_bins
        kept = passes.score_kept(
            score, input_ids, attention_mask, logits_to_keep, bins=bins, trim=self._trimmed
        )
        return kept, None, None

    def _count(self, real: int, computed: int) -> None:
        self._density["real"] += real
        self._density["computed"] += computed

    def _trimmed(self, batch: dict[str, Any]) -> dict[str, Any]:
        return rows.trim(batch, left=self._shift_invariant, multiple=self.args.column_multiple)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The host's loss, its gradient weighted; its value is the estimate of the full batch's."""
        gate: Gate | None = inputs.pop(Gate.KEY, None)
        if gate is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._gate = gate
        try:
            with metrics.of_survivors(self):
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            with metrics.discarded(self):
                value = self._loss_value(model, inputs, gate)
        finally:
            self._gate = None
        values = full_batch.host_metrics(self, inputs, gate.forward)
        self._averages.add(values, gate.weight_R, full_batch.loss_mask(inputs))
        self._metrics["train"]["dppo/kept/loss"].append(loss.item())
        return loss + (value - loss).detach()

    @torch.no_grad()
    def _loss_value(self, model: Any, inputs: dict[str, Any], gate: Gate) -> Tensor:
        """Unbiased estimate of the unpruned micro-batches' loss, without another forward pass.

        The policy term is homogeneous of degree one in the advantages, so the host's own loss,
        replayed on the log-probs just computed with advantages times the gradient factor, is its
        estimate; the other terms of the replay cancel against one with advantages 0.
        """
        gate.replayed = gate.forward
        scaled = inputs["advantages"] * gate.factor_R.to(inputs["advantages"])
        value = super().compute_loss(model, {**inputs, "advantages": scaled})
        if self.beta != 0 or self._entropy_bonus_enabled:
            nothing = torch.zeros_like(scaled)
            value = value - super().compute_loss(model, {**inputs, "advantages": nothing})
            value = value + full_batch.other_terms(
                self, inputs, gate.forward, gate.factor_R, gate.entropy_factor_R
            )
        return value

    # -- optimizer step and checkpoint -------------------------------------------------------------

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        metrics.log_grad_norm(self, float(norm))  # type: ignore[arg-type] - a number by now
        return norm

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

    @property
    def _under_way(self) -> pruning_state.UnderWay | None:
        """The generation of which micro-steps are still to run, if there is one."""
        batch, basis = self._buffered_inputs, self._basis
        if not self.args.prunes or batch is None or basis is None or self._position == 0:
            return None
        return pruning_state.UnderWay(batch, basis)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.decides:
            # First, for the host's method ends with the upload, and what it writes last vouches
            # for the rest.
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = os.path.join(self._get_output_dir(trial=trial), name)
            os.makedirs(folder, exist_ok=True)
            if self._under_way is not None:
                rank = self.accelerator.process_index
                pruning_state.save_under_way(folder, rank, self._under_way)
                self.accelerator.wait_for_everyone()
            if self.args.should_save:
                pruning_state.save(folder, self)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            resume.restore(self, checkpoint)
