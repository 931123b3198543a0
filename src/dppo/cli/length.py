"""Arithmetic of a whole run: steps, rollouts, dead groups and completions trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo._supply import check_prompts, check_window
from dppo.cli.arithmetic import BatchSettings, BatchShape
from dppo.errors import ConfigurationError

COMPARED_GROUP_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class RunLength:
    """How far a data set goes.

    Attributes:
        generations_per_epoch: None, as the next two, while the number of prompts is unknown.
        unused_prompts_per_epoch: The remainder, less than one window.
        steps_per_epoch: Optimizer steps.
        total_steps: Optimizer steps of the run.
        total_generations: Generations of the run.
        completions_total: Rollouts of the run.
        completions_per_step: New rollouts per optimizer step, on average.
        trained_total: Completions looked at by all optimizer steps, before pruning; a rollout
            counts once per iteration.
    """

    generations_per_epoch: int | None
    unused_prompts_per_epoch: int | None
    steps_per_epoch: int | None
    total_steps: int
    total_generations: int
    completions_total: int
    completions_per_step: float
    trained_total: int


def run_length(
    settings: BatchSettings,
    shape: BatchShape,
    num_prompts: int | None,
    *,
    prior: bool = False,
) -> RunLength | None:
    """Steps and rollouts of a run.

    Args:
        settings: The batch settings.
        shape: Their shape.
        num_prompts: Size of the data set, if known.
        prior: Whether prompts may be pruned though none is visited twice.

    Returns:
        The length; None if neither the data set's size nor `max_steps` is known.

    Raises:
        ConfigurationError: If the data set is smaller than one generation batch or window, or
            prompts are to be pruned in fewer than two passes.
    """
    if num_prompts is None and settings.max_steps < 1:
        return None
    passes_per_generation = shape.steps_per_generation * settings.num_iterations
    accumulation = settings.gradient_accumulation_steps
    if num_prompts is None:
        generations = unused = epoch_steps = None
        total_steps = settings.max_steps
        passes = total_steps * accumulation
    else:
        check_prompts(num_prompts, rolled_out=shape.prompts_per_generation)
        generations, unused = divmod(num_prompts, shape.candidates_per_generation)
        epoch_passes = max(generations, 1) * passes_per_generation
        epoch_steps = -(-epoch_passes // accumulation)
        total_steps = settings.max_steps
        if settings.max_steps < 1:
            total_steps = math.ceil(settings.num_train_epochs * epoch_steps)
        if settings.prompt_keep < 1:
            check_window(
                num_prompts,
                prompt_keep=settings.prompt_keep,
                rolled_out=shape.prompts_per_generation,
                candidates=shape.candidates_per_generation,
                passes=total_steps / epoch_steps,
                known=prior,
            )
        epochs, rest = divmod(total_steps, epoch_steps)
        passes = epochs * epoch_passes + min(rest * accumulation, epoch_passes)
    total_generations = -(-passes // passes_per_generation)
    rollouts = total_generations * shape.completions_per_generation
    return RunLength(
        generations_per_epoch=generations,
        unused_prompts_per_epoch=unused,
        steps_per_epoch=epoch_steps,
        total_steps=total_steps,
        total_generations=total_generations,
        completions_total=rollouts,
        completions_per_step=rollouts / total_steps,
        trained_total=passes * shape.trained_per_step // accumulation,
    )


def dead_group_probability(solve_rate: float, group_size: int) -> float:
    """P(all completions of a group get the same binary reward) = p^G + (1 - p)^G.

    Args:
        solve_rate: p, how often one completion is right.
        group_size: G.

    Returns:
        The probability.

    Raises:
        ConfigurationError: If `solve_rate` is no probability.

    Example:
        >>> round(dead_group_probability(0.5, 2), 3)
        0.5
    """
    if not 0 <= solve_rate <= 1:
        raise ConfigurationError(f"solve_rate must be between 0 and 1, got {solve_rate}")
    return solve_rate**group_size + (1 - solve_rate) ** group_size


def expected_trained(rows: float, *, keep: float, dead: float) -> float:
    """Expected completions trained out of `rows` when live completions are kept at rate `keep`.

    A dead group has no gradient and is never trained while pruning is on. `keep` is a share of the
    cost of the live completions, so this is exact where completions are equally long.

    Args:
        rows: Completions that an unpruned run would train.
        keep: The kept share, in (0, 1].
        dead: Probability that a group is dead; 0 if unknown.

    Returns:
        The expected number.

    Example:
        >>> round(expected_trained(256, keep=0.25, dead=0.2), 1)
        51.2
    """
    return rows * (1 - dead) * keep
