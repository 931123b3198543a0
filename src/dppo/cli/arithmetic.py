"""Batch arithmetic of a GRPO run, as TRL and transformers do it, without importing either.

Legend: B per-device batch, W processes, A gradient accumulation, S forward passes per generation,
G group size, I iterations over one generation, N prompts. A batch counts completions, not prompts:

    generation batch    B * W * S completions of K = B * W * S / G prompts
    window              M = floor(K / prompt_keep + 1/2) candidates, of which K are rolled out
    epoch               N // M generations; the rest of the prompts is left out
    steps per epoch     ceil(generations * S * I / A)

Source: `RepeatSampler` in TRL, `Trainer.set_initial_training_values` in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo.errors import ConfigurationError
from dppo.estimator.windows import window_size


@dataclass(frozen=True)
class BatchSettings:
    """What the user configures; the defaults are those of `GRPOConfig` in TRL 1.16."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    num_iterations: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    num_processes: int = 1
    prompt_keep: float = 1.0


@dataclass(frozen=True)
class BatchShape:
    """What one generation and one optimizer step hold.

    Attributes:
        steps_per_generation: Forward passes that share one generation.
        completions_per_generation: Rollouts made at once.
        prompts_per_generation: Groups in them.
        candidates_per_generation: Prompts that those were drawn from; as many, if none is pruned.
        trained_per_step: Completions that one optimizer step looks at, before pruning.
        prompts_per_step: Groups in them; a fraction where a step holds part of a group.
    """

    steps_per_generation: int
    completions_per_generation: int
    prompts_per_generation: int
    candidates_per_generation: int
    trained_per_step: int
    prompts_per_step: float


def check_positive(settings: BatchSettings) -> None:
    """Refuses counts below one (`max_steps` may be -1) and groups below two.

    Args:
        settings: The batch settings.

    Raises:
        ConfigurationError: With one line for each problem.
    """
    problems = []
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_iterations",
        "steps_per_generation",
        "generation_batch_size",
        "num_processes",
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(f"{name} must be at least 1, got {value}")
    if settings.num_generations < 2:
        problems.append(
            f"num_generations must be at least 2, got {settings.num_generations}: "
            "advantages compare the completions of one prompt"
        )
    if settings.max_steps == 0 or settings.max_steps < -1:
        problems.append(f"max_steps must be -1 (off) or at least 1, got {settings.max_steps}")
    if settings.max_steps < 1 and settings.num_train_epochs <= 0:
        problems.append(f"num_train_epochs must be positive, got {settings.num_train_epochs}")
    if settings.steps_per_generation is not None and settings.generation_batch_size is not None:
        problems.append("give only one of steps_per_generation and generation_batch_size")
    if problems:
        raise ConfigurationError("\n".join(problems))


def legal_group_sizes(completions_per_generation: int) -> list[int]:
    """Every `num_generations` that divides the generation batch, from 2 up.

    Example:
        >>> legal_group_sizes(12)
        [2, 3, 4, 6, 12]
    """
    n = completions_per_generation
    return [g for g in range(2, n + 1) if n % g == 0]


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The positive multiple of `unit` nearest to `value`; two of them on a tie.

    Example:
        >>> nearest_multiples(4, 6), nearest_multiples(9, 6)
        ([6], [6, 12])
    """
    below, above = value // unit * unit, -(-value // unit) * unit
    candidates = {m for m in (below, above) if m > 0}
    distance = min(abs(m - value) for m in candidates)
    return sorted(m for m in candidates if abs(m - value) == distance)


def batch_shape(settings: BatchSettings) -> BatchShape:
    """Shape of a generation and of a step.

    Args:
        settings: The batch settings.

    Returns:
        The shape.

    Raises:
        ConfigurationError: If groups do not fit; it names the legal group sizes and the nearest
            legal batch.
    """
    check_positive(settings)
    per_pass = settings.per_device_train_batch_size * settings.num_processes
    if settings.generation_batch_size is None:
        passes = settings.steps_per_generation or settings.gradient_accumulation_steps
        generation = per_pass * passes
    else:
        generation = settings.generation_batch_size
        passes = generation // per_pass
        if generation % per_pass:
            unit = math.lcm(per_pass, settings.num_generations)
            raise ConfigurationError(
                f"generation_batch_size ({generation}) must be a multiple of "
                f"per_device_train_batch_size * num_processes ({per_pass}); nearest legal: "
                f"{_listed(nearest_multiples(generation, unit))}"
            )
    if generation % settings.num_generations:
        raise ConfigurationError(_illegal_group(settings, generation, passes))
    trained = per_pass * settings.gradient_accumulation_steps
    return BatchShape(
        steps_per_generation=passes,
        completions_per_generation=generation,
        prompts_per_generation=generation // settings.num_generations,
        candidates_per_generation=window_size(
            generation // settings.num_generations, keep=settings.prompt_keep
        ),
        trained_per_step=trained,
        prompts_per_step=trained / settings.num_generations,
    )


def _illegal_group(settings: BatchSettings, generation: int, passes: int) -> str:
    group = settings.num_generations
    legal = legal_group_sizes(generation)
    lines = [
        f"num_generations ({group}) does not divide the generation batch of {generation} "
        f"completions (per_device_train_batch_size {settings.per_device_train_batch_size} x "
        f"{settings.num_processes} processes x {passes} passes per generation)",
        f"legal group sizes for this batch: {_listed(legal) if legal else 'none'}",
    ]
    if settings.generation_batch_size is None:
        unit = group // math.gcd(group, settings.num_processes * passes)
        sizes = nearest_multiples(settings.per_device_train_batch_size, unit)
        batches = [size * settings.num_processes * passes for size in sizes]
        lines.append(
            f"nearest legal batch for num_generations {group}: per_device_train_batch_size "
            f"{_listed(sizes, 'or')} (generation batch {_listed(batches, 'or')})"
        )
    else:
        unit = math.lcm(group, settings.per_device_train_batch_size * settings.num_processes)
        lines.append(
            f"nearest legal batch for num_generations {group}: generation_batch_size "
            f"{_listed(nearest_multiples(generation, unit), 'or')}"
        )
    return "\n".join(lines)


def _listed(values: list[int], word: str = "") -> str:
    return (f" {word} " if word else ", ").join(str(value) for value in values)
