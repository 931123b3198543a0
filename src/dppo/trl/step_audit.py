"""`audit_step`: one optimizer step's pruning drawn again and again, against its full gradient.

Before the step trains, at its parameters: the full gradient, prompt by prompt, and that of fresh
draws of the same rule, rate and design over the same rows, laid out and run as the real one is.
Then training goes on as if nothing had been. Prompts are not redrawn: all is given the prompts
that were rolled out.

Suffixes: `_P` prompts, `_R` redraws, `_K` sketch.
"""

import json
import logging
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback
from trl.trainer.utils import split_pixel_values_by_grid

from dppo.audit.redraws import Redraws, measure_redraws
from dppo.errors import ConfigurationError
from dppo.estimator.diagnostics import pruning_variance
from dppo.pruner import Pruner
from dppo.trl import gradients, passes
from dppo.trl.gradients import Floats, Sketch
from dppo.trl.schedule import Segment
from dppo.trl.step_rows import norms_and_pi, of_step, prompt_gradients

logger = logging.getLogger(__name__)

SIZE = 4096
"""Numbers in a sketch."""


class StepAudit(TrainerCallback):
    """Audits one optimizer step.

    Args:
        step: Which, from 1.
        redraws: How often it is drawn again, R.
    """

    def __init__(self, step: int, *, redraws: int) -> None:
        self._step, self._redraws, self._done = step, redraws, False
        self._generation: dict[str, Any] | None = None

    def begin(self, trainer: Any) -> None:
        """Training begins.

        Raises:
            ConfigurationError: It ends before the step, or prunes by another method.
        """
        if type(trainer.pruner) is not Pruner:
            raise ConfigurationError(
                f"audit_step={self._step} draws the pruning of DPPOTrainer again, and "
                f"{type(trainer).__name__} prunes otherwise; set audit_step to None"
            )
        last = trainer.state.max_steps
        if self._step > last:
            raise ConfigurationError(
                f"audit_step={self._step} is after the last of {last} optimizer steps; give one of "
                "them"
            )
        if trainer.state.global_step >= self._step:
            self._done = True
            logger.info("audit_step=%d is over already: nothing is audited", self._step)

    def rolled_out(self, trainer: Any, generation: dict[str, Any]) -> None:
        """Note all rows as they are before the first is trained on, if the step trains some."""
        steps = 1 + max(segment.optimizer_step for segment in trainer._plan.segments)
        self._generation = None
        if not self._done and self._step <= trainer.state.global_step + steps:
            with gradients.undisturbed(trainer):
                whole = split_pixel_values_by_grid(generation)
                self._generation = passes.filled(trainer, whole)

    def run_if_due(self, trainer: Any) -> None:
        """Audit the step that is about to begin, if it is the one."""
        begins = trainer.state.global_step == self._step - 1 and trainer._window_position == 0
        if self._done or not begins:
            return
        self._done, began = True, time.perf_counter()
        with gradients.undisturbed(trainer):
            found = self._audited(trainer)
        self._generation = None
        if isinstance(found, str):
            logger.info("audit of step %d: %s", self._step, found)
            return
        result, facts = found
        values = {**result.to_dict(), **facts}
        for name in METRICS:
            trainer._metrics["train"][f"dppo/audit/{name}"].append(values[name])
        values = {"step": self._step, "seconds": time.perf_counter() - began, **values}
        path = Path(trainer.args.output_dir) / f"audit_step_{self._step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n")
        _say(result, values)

    def _audited(self, trainer: Any) -> tuple[Redraws, dict[str, Any]] | str:
        """What was found, or why there is nothing to find."""
        decision, generation = trainer._plan, self._generation or trainer._buffered_inputs
        segments = of_step(decision.segments, trainer._position)
        if (norms_and_pi(decision, segments)[1] == 1).all():
            return "no completion of it was left to chance, so there is nothing to redraw"
        if self._generation is None:
            if passes.lacks(generation.get("old_per_token_logps")).any():
                return (
                    "the run was resumed inside its generation, and old log-probs of completions "
                    "that were pruned are not known any more; audit a later step"
                )
            generation = passes.filled(trainer, generation)
        sketch = Sketch.of(trainer, size=SIZE)
        full_PK = prompt_gradients(trainer, sketch, segments, generation)
        if not full_PK.any():
            return "its full gradient is 0, so there is nothing to compare with"
        redraws_RK = np.stack(
            [
                self._redrawn(trainer, sketch, segments, generation, number)
                for number in range(self._redraws)
            ]
        )
        trainer._decision = decision
        return measure_redraws(full_PK, redraws_RK), _facts(trainer, segments)

    def _redrawn(
        self,
        trainer: Any,
        sketch: Sketch,
        segments: Sequence[Segment],
        generation: dict[str, Any],
        number: int,
    ) -> Floats:
        """Shape (K,). The gradient of an independent draw."""
        key = f"dppo/redraw/{trainer.pruner.seed}/{number}".encode()
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        decision = trainer._drawn(
            trainer._basis, trainer._plan.window, Pruner(trainer.pruner.config, seed=seed)
        )
        trainer._decision = decision
        laid_out = [m for s in segments for m in decision.micro_batches[s.first : s.last]]
        return gradients.gradient(
            trainer, sketch, [m for m in laid_out if m is not None], generation
        )


METRICS = (
    *("along", "along_error", "along_z", "bias", "bias_z", "dimensions"),
    *("inflation", "inflation_error", "inflation_predicted", "redraws"),
)
"""Logged as `dppo/audit/*`."""


def _facts(trainer: Any, segments: Sequence[Segment]) -> dict[str, Any]:
    """What was audited, and what was predicted of it as `dppo/variance/inflation` is."""
    norm, pi = norms_and_pi(trainer._plan, segments)
    design = trainer.pruner.config.sampling_design
    return {
        "inflation_predicted": pruning_variance(norm, pi, design=design),
        "completions": int(norm.size),
        "expected_kept": float(pi.sum()),
        "sketch": SIZE,
    }


def _say(found: Redraws, values: dict[str, Any]) -> None:
    head = "audit of step {step}: {redraws} redraws of its {completions} live completions"
    lines = [
        (head + ", about {expected_kept:.1f} kept; {seconds:.1f} s").format(**values),
        "along the full gradient {along:.3f} +- {along_error:.3f} (z = {along_z:+.1f} against 1); "
        "bias in any direction z = {bias_z:+.1f}".format(**values),
        "pruning adds {inflation:.3f} +- {inflation_error:.3f} of the variance between prompts; "
        "predicted {inflation_predicted:.3f}".format(**values),
    ]
    for line in lines:
        logger.info("%s", line)
    if found.suspicious:
        logger.warning(
            "audit of step %d: the pruned gradient seems to be biased (z = %+.1f along the full "
            "one, %+.1f in any direction). Train with completion_keep=1.0 and report this",
            *(values["step"], found.along_z, found.bias_z),
        )
