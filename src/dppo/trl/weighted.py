"""What the training passes see of a generation, and by what each row's gradient is multiplied.

* `_prepare_inputs` hands out the micro-batches, `training_step` passes over empty ones.
* `_get_per_token_logps_and_entropies` is every pass's door to the model: old and reference passes
  score survivors only; in the gradient pass it multiplies the gradient of each row (the gate).
* `compute_loss` replaces the value of the loss by the estimate of the full batch's.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from dppo.estimator.weights import loss_denominator
from dppo.packing.spread import held
from dppo.trl import full_batch, metrics, passes, ranks, rows, startup
from dppo.trl.config import DPPOConfig
from dppo.trl.decision import Decision
from dppo.trl.gate import Gate, scale_gradient
from dppo.trl.packed import Form, PackedModel
from dppo.trl.rollout import Rollout
from dppo.trl.schedule import Geometry, MicroBatch
from dppo.trl.step_audit import StepAudit


class WeightedPasses(GRPOTrainer):
    """`GRPOTrainer` that trains on the survivors of a decision, which `DPPOTrainer` makes."""

    # Declared as what they are once the host has been constructed.
    args: DPPOConfig
    model: Any
    accelerator: Any
    num_generations: int

    def _begin_passes(self) -> None:
        """Attributes of this class; the host has been constructed."""
        self._shift_invariant = rows.shift_invariant(self.model.config)
        self._follows_length = rows.follows_length(self.model.config)
        self._averages = full_batch.StepAverages()
        self._density: Counter[str] = Counter()
        self._plans = self.args.prunes or startup.packs_without_pruning(self)
        self._form: Form | None = None
        self._rolled_out_at = -1
        self._held = self._home()
        self._window_position = 0
        self._window_loss: Any = 0.0
        self._rollout: Rollout | None = None
        self._decision: Decision | None = None
        self._gate: Gate | None = None
        self._audit: StepAudit | None = None
        if self.args.audit_step is not None:
            self._audit = StepAudit(self.args.audit_step, redraws=self.args.audit_redraws)

    def _geometry(self) -> Geometry:
        return Geometry(
            ranks=self.accelerator.num_processes,
            micro_batch=self.args.per_device_train_batch_size,
            steps_per_generation=self.args.generation_steps,
            iterations=self.num_iterations,
            accumulation=self.args.gradient_accumulation_steps,
        )

    # -- ranks -------------------------------------------------------------------------------------

    def _home(self) -> ranks.Ints:
        """Global rows of a generation that this rank rolls out."""
        count = self._geometry().rows
        return np.arange(count) + self.accelerator.process_index * count

    @property
    def _moves(self) -> bool:
        """Whether a row may be run by a rank that did not roll it out; images stay."""
        return self._geometry().ranks > 1 and not self._is_vlm

    def _exchange(self, bins: Sequence[ranks.Ints | None]) -> ranks.Exchange:
        """Between the ranks that rolled rows out and those that run them."""
        size = self._geometry()
        rank = self.accelerator.process_index
        return ranks.Exchange(held(bins, size.ranks), rank=rank, rows=size.rows)

    # -- micro-batches -----------------------------------------------------------------------------

    def _roll_out(self, generation_batch: Any) -> None:
        """Roll out and decide, if this micro-step is a generation's first."""
        fresh = self._position == 0 and self._rolled_out_at != self._step
        if fresh or self._buffered_inputs is None:
            generation = self._generate_and_score_completions(generation_batch)
            self._held = self._home()
            if self._moves:
                exchange, plan = self._exchange(self._plan.training), self._plan
                generation = ranks.moved(generation, exchange, self.accelerator, digest=plan.digest)
                self._held = exchange.rows
            self._buffered_inputs = split_pixel_values_by_grid(generation)
            self._rolled_out_at = self._step

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not (self._plans and self.model.training):
            return super()._prepare_inputs(generation_batch)
        self._roll_out(generation_batch)
        micro_batch, generation = self._plan.micro_batches[self._position], self._buffered_inputs
        assert micro_batch is not None  # `training_step` passes over empty micro-steps
        assert generation is not None  # just rolled out
        return self._inputs_of(micro_batch, generation)

    def _inputs_of(self, micro_batch: MicroBatch, generation: Any) -> dict[str, Any]:
        """What `compute_loss` takes: rows of a generation, and the gate with their weights."""
        places = ranks.places(self._held, micro_batch.rows_R)
        inputs = self._trimmed(unsplit_pixel_values_by_grid(rows.select_rows(generation, places)))
        mask = full_batch.loss_mask(inputs)
        real = torch.from_numpy(micro_batch.rows_R != rows.PADDING)
        if self._form is None:
            masks = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            self._count(rows.counts(masks.cpu()[real], masks.shape))
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
        if self._plans:
            began = time.perf_counter()
            model.train()
            self._roll_out(inputs)
            if self._audit is not None:
                self._audit.run_if_due(self)
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
            if self._plans:
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
        if self._form is not None and self.model.training and not whole:
            model = PackedModel(
                model,
                form=self._form,
                completion=logits_to_keep,
                window=self.args.packing_window,
                vocabulary=self.model.config.get_text_config().vocab_size,
                capacity=None if self._decision is None else self._decision.capacity,
                count=self._count if torch.is_grad_enabled() else None,
            )
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
        if self._decision is None or self._rollout is None or not self._plans:
            return host(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if whole:
            return host(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        def score(ids: Tensor, mask: Tensor, width: int) -> Tensor:
            return host(model, ids, mask, width)[0]

        batch = passes.split(input_ids, attention_mask, logits_to_keep)
        return self._score_survivors(score, batch), None, None

    def _score_survivors(self, score: Any, batch: dict[str, Tensor]) -> Tensor:
        """Log-probs of the survivors among these rows, each from the rank that scores it."""
        plan, here, exchange = self._plan, self._home(), None
        width = batch["completion_ids"].shape[1]
        if self._moves:
            exchange = self._exchange(plan.scoring)
            here = exchange.rows
            batch = ranks.moved(batch, exchange, self.accelerator, digest=plan.digest)
        rank = self.accelerator.process_index
        bins = [ranks.places(here, rows_WR[rank]) for rows_WR in plan.scoring]
        found = passes.score_kept(score, batch, bins=bins, trim=self._trimmed)
        return found if exchange is None else exchange.back(found, missing=torch.nan)[:, :width]

    def _count(self, counts: dict[str, int]) -> None:
        self._density.update(counts, forwards=1)

    def _trimmed(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._follows_length:  # old log-probs must be of rows as wide as the new ones
            return batch
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
            with metrics.of_survivors(self) if self.args.prunes else nullcontext():
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            with metrics.discarded(self):
                value = self._loss_value(model, inputs, gate)
        finally:
            self._gate = None
        if self.args.prunes:
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

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        metrics.log_grad_norm(self, float(norm))  # type: ignore[arg-type] - a number by now
        return norm
