"""Which completions an optimizer step trains, and their full gradient, prompt by prompt.

Suffixes: `_N` rows of the generation, `_P` prompts, `_PG` prompts x group, `_K` sketch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.trl import gradients
from dppo.trl.gradients import Floats, Sketch
from dppo.trl.schedule import Segment


def of_step(segments: Sequence[Segment], position: int) -> list[Segment]:
    """Segments of the optimizer step that trains the micro-step at `position`."""
    step = next(s.optimizer_step for s in segments if s.first <= position < s.last)
    return [s for s in segments if s.optimizer_step == step]


def live_rows(decision: Any, segment: Segment) -> NDArray[np.bool_]:
    """Shape (N,). Rows with a gradient that the segment trains, before pruning."""
    per_pass = len(decision.micro_batches) // len(decision.choices)
    place_N = segment.iteration * per_pass + decision.micro_step_N
    live_N = decision.choices[segment.iteration].live.ravel()
    return live_N & (place_N >= segment.first) & (place_N < segment.last)


def prompt_gradients(
    trainer: Any, sketch: Sketch, segments: Sequence[Segment], generation: dict[str, Any]
) -> Floats:
    """Shape (P, K). What each prompt would add to the step's gradient if no completion was pruned.

    Prompts that were drawn from a window keep their weight.
    """
    decision, group = trainer._plan, trainer.num_generations
    window, rows = decision.window, trainer.args.per_device_train_batch_size
    weight_P = np.ones(len(decision.rewards_PG)) if window is None else 1 / window.pi
    found = np.zeros((len(weight_P), sketch.size))
    for segment in segments:
        live_PG = live_rows(decision, segment).reshape(-1, group)
        for prompt, live in enumerate(live_PG):
            mine = prompt * group + np.flatnonzero(live)
            parts = [p for p in np.array_split(mine, range(rows, mine.size, rows)) if p.size]
            batches = [
                gradients.unpruned_batch(trainer, part, np.repeat(weight_P, group))
                for part in parts
            ]
            found[prompt] += gradients.gradient(trainer, sketch, batches, generation)
    return found


def norms_and_pi(decision: Any, segments: Sequence[Segment]) -> tuple[Floats, Floats]:
    """Of the live rows of the segments, flat: assumed gradient norms, inclusion probabilities."""
    pairs = [(decision.choices[s.iteration], live_rows(decision, s)) for s in segments]
    return (
        np.concatenate([choice.norm.ravel()[rows] for choice, rows in pairs]),
        np.concatenate([choice.pi_completion.ravel()[rows] for choice, rows in pairs]),
    )
