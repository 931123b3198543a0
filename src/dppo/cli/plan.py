"""`dppo plan`: how many prompts, completions and steps a configuration means. Loads no model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dppo.cli.arithmetic import BatchSettings, BatchShape, batch_shape, legal_group_sizes
from dppo.cli.fields import PLAN_OPTIONS, RUN_OPTIONS, config_fields
from dppo.cli.launch_file import launched_processes
from dppo.cli.length import (
    COMPARED_GROUP_SIZES,
    RunLength,
    dead_group_probability,
    expected_trained,
    run_length,
)
from dppo.cli.options import Settings, read_settings
from dppo.config import PruneConfig, parse_keep
from dppo.errors import ConfigurationError
from dppo.estimator.weights import check_prompt_pruning, loss_denominator

SUMMARY = "print the batch arithmetic of a configuration, without loading a model"
EXAMPLES = """\
examples:
  dppo plan --num-prompts 8000 --num-processes 3 --per-device-train-batch-size 4 \\
      --gradient-accumulation-steps 2 --num-generations 6 --num-train-epochs 2
  dppo plan --config run.yaml --num-prompts 7473 --solve-rate 0.3 --json
  dppo plan --config configs/qwen3-4b-math.yaml --num-prompts 7500 \\
      --accelerate-config configs/accelerate/zero3-8gpu.yaml
"""
OPTIONS = {**RUN_OPTIONS, **PLAN_OPTIONS}


@dataclass(frozen=True)
class Pruning:
    """Expected completions trained, out of those an unpruned run would train.

    Attributes:
        completion_keep: The configured value.
        trained_per_step: Per optimizer step; None where the rule or the run decides.
        trained_total: Over the run; None where that or the run's length is unknown.
    """

    completion_keep: float | str
    trained_per_step: float | None
    trained_total: float | None


@dataclass(frozen=True)
class Plan:
    """Everything that is printed.

    Attributes:
        settings: What the user asked for.
        batch: The batch settings, with defaults.
        shape: Of one generation and one step.
        length: Of the run; None if neither its prompts nor its steps are known.
        dead: Probability of a dead group by group size; empty if the solve rate is unknown.
        pruning: Expected completions trained.
    """

    settings: Settings
    batch: BatchSettings
    shape: BatchShape
    length: RunLength | None
    dead: dict[int, float]
    pruning: Pruning


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo plan`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: For bad options or arithmetic that cannot work.
    """
    plan = make_plan(read_settings(arguments, run_options=OPTIONS))
    if plan.settings.run.get("json"):
        print(json.dumps(_as_json(plan), indent=2))
    else:
        print("\n".join(_table(plan)))
    return 0


def make_plan(settings: Settings) -> Plan:
    """Works out the arithmetic of a configuration.

    Args:
        settings: What the user asked for.

    Returns:
        The plan.

    Raises:
        ConfigurationError: For arithmetic that cannot work.
    """
    check_pruning(settings.config)
    prompts = settings.run.get("num_prompts")
    if prompts is not None and prompts < 1:
        raise ConfigurationError(f"num_prompts is too small: {prompts}")
    batch = batch_settings(settings.config, num_processes=_processes(settings))
    shape = batch_shape(batch)
    length = run_length(batch, shape, prompts, prior=has_prior(settings.config))
    dead = _dead_groups(settings.run.get("solve_rate"), batch.num_generations)
    chance = dead.get(batch.num_generations, 0.0)
    pruning = expected_pruning(settings.config, shape, length=length, dead=chance)
    return Plan(settings, batch, shape, length, dead, pruning)


def _processes(settings: Settings) -> int | None:
    """How many processes train together, if the user has said it."""
    given, path = settings.run.get("num_processes"), settings.run.get("accelerate_config")
    if path is None:
        return given
    if given is not None:
        raise ConfigurationError(
            f"give only one of num_processes ({given}) and accelerate_config ({path})"
        )
    return launched_processes(Path(path), settings.config)


def check_pruning(config: dict[str, Any]) -> None:
    """Refuses pruning options that training would refuse.

    Args:
        config: Fields of `DPPOConfig` that the user set.

    Raises:
        ConfigurationError: With the option and what it may be.
        UnsupportedLossError: For a loss type that cannot be pruned.
    """
    names = ("completion_rule", "completion_prune_rate", "sampling_design")
    names += ("prompt_keep", "prompt_rule", "prompt_prune_rate")
    PruneConfig(**{name: config[name] for name in names if name in config})
    prompts = config.get("prompt_keep", 1.0) != 1
    loss_type = config.get("loss_type", "dapo")  # TRL's default, also where it is absent
    if config.get("completion_keep") != 1 or prompts:
        loss_denominator(loss_type)
    if prompts:
        check_prompt_pruning(loss_type, entropy_coef=config.get("entropy_coef", 0.0))


def has_prior(config: dict[str, Any]) -> bool:
    """Whether prompts may be pruned though none is visited twice.

    Args:
        config: Fields of `DPPOConfig` that the user set.
    """
    return bool(config.get("prompt_prior_column") or config.get("allow_single_epoch"))


def batch_settings(config: dict[str, Any], *, num_processes: int | None = None) -> BatchSettings:
    """Picks the arithmetic out of a configuration.

    Args:
        config: Fields of `DPPOConfig` that the user set.
        num_processes: How many processes train together; by default the launcher's WORLD_SIZE.

    Returns:
        The settings, with the defaults of the installed config classes.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
    values: dict[str, Any] = {"num_processes": processes}
    table = config_fields().fields
    for field in fields(BatchSettings):
        if field.name != "num_processes":
            values[field.name] = config.get(field.name, table[field.name].default)
    return BatchSettings(**values)


def _dead_groups(solve_rate: float | None, group_size: int) -> dict[int, float]:
    if solve_rate is None:
        return {}
    sizes = sorted({group_size, *COMPARED_GROUP_SIZES})
    return {size: dead_group_probability(solve_rate, size) for size in sizes}


def expected_pruning(
    config: dict[str, Any], shape: BatchShape, *, length: RunLength | None, dead: float
) -> Pruning:
    """Expected trained completions at the configured `completion_keep`.

    Args:
        config: Fields of `DPPOConfig` that the user set.
        shape: Of one step.
        length: The run's length, if known.
        dead: Probability of a dead group; 0 if unknown.

    Returns:
        The expectation; without numbers under the rule "threshold", where it depends on the
        rewards.

    Raises:
        ConfigurationError: If `completion_keep` is out of range.
    """
    table = config_fields().fields
    keep = config.get("completion_keep", table["completion_keep"].default)
    rule = config.get("completion_rule", table["completion_rule"].default)
    mode, rate = parse_keep("completion_keep", keep)
    if mode == "auto" and rule in {"proportional", "uniform"}:
        return Pruning(keep, None, None)
    rate = 1.0 if mode == "shadow" else rate
    if rule == "threshold" and rate < 1:
        return Pruning(keep, None, None)
    off = rate == 1
    share = rate if off or rule != "inert" else 1.0  # "inert" keeps every live completion
    chance = 0.0 if off else dead
    total = None
    if length is not None:
        total = expected_trained(length.trained_total, keep=share, dead=chance)
    return Pruning(keep, expected_trained(shape.trained_per_step, keep=share, dead=chance), total)


def _as_json(plan: Plan) -> dict[str, Any]:
    run_options = plan.settings.run
    return {
        "settings": asdict(plan.batch),
        "num_prompts": run_options.get("num_prompts"),
        **asdict(plan.shape),
        **({} if plan.length is None else asdict(plan.length)),
        "legal_group_sizes": legal_group_sizes(plan.shape.completions_per_generation),
        "solve_rate": run_options.get("solve_rate"),
        "dead_group_probability": {str(size): chance for size, chance in plan.dead.items()},
        "completion_keep": plan.pruning.completion_keep,
        "expected_trained_per_step": plan.pruning.trained_per_step,
        "expected_trained_total": plan.pruning.trained_total,
        "notes": list(plan.settings.notes),
    }


def _table(plan: Plan) -> list[str]:
    rows = _batch_rows(plan.batch, plan.shape)
    rows += _length_rows(plan.settings, plan.shape, plan.length)
    if plan.dead:
        text = ", ".join(f"G={size} {chance:.1%}" for size, chance in plan.dead.items())
        rows.append((f"dead groups at solve rate {plan.settings.run['solve_rate']:g}", text))
    else:
        rows.append(("dead groups", "give --solve-rate"))
    rows += _pruning_rows(plan.shape, plan.length, plan.pruning)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return lines + [f"note: {note}" for note in plan.settings.notes]


def _batch_rows(batch: BatchSettings, shape: BatchShape) -> list[tuple[str, str]]:
    sizes = legal_group_sizes(shape.completions_per_generation)
    drawn, window = shape.prompts_per_generation, shape.candidates_per_generation
    candidates = f"{window:,} (effective keep {drawn / window:.3f})"
    return [
        ("group size (num_generations)", f"{batch.num_generations}"),
        ("completions per generation", f"{shape.completions_per_generation:,}"),
        ("prompts per generation", f"{shape.prompts_per_generation:,}"),
        *([("candidates per generation", candidates)] if batch.prompt_keep < 1 else []),
        ("prompts per step", f"{shape.prompts_per_step:,g}"),
        ("completions trained per step, unpruned", f"{shape.trained_per_step:,}"),
        ("legal group sizes for this batch", ", ".join(map(str, sizes))),
    ]


def _length_rows(
    settings: Settings, shape: BatchShape, length: RunLength | None
) -> list[tuple[str, str]]:
    if length is None:
        return [("steps", "give --num-prompts (or --max-steps)")]
    rows = [("prompts", "give --num-prompts for steps per epoch")]
    if length.generations_per_epoch is not None:
        prompts, unused = settings.run["num_prompts"], length.unused_prompts_per_epoch or 0
        text = f"{unused:,} of {prompts:,} prompts unused per epoch"
        drawn = shape.prompts_per_generation
        if unused:
            unit = "window" if shape.candidates_per_generation > drawn else "generation"
            text += f" (less than one {unit} of {shape.candidates_per_generation})"
        rows = [
            ("generations per epoch", f"{length.generations_per_epoch:,}"),
            ("steps per epoch", f"{length.steps_per_epoch:,}"),
            ("remainder", text),
        ]
    return [
        *rows,
        ("steps in total", f"{length.total_steps:,}"),
        ("rollouts per step", f"{length.completions_per_step:,g}"),
        ("rollouts in total", f"{length.completions_total:,}"),
    ]


def _pruning_rows(
    shape: BatchShape, length: RunLength | None, pruning: Pruning
) -> list[tuple[str, str]]:
    name = f"completions trained at completion_keep {pruning.completion_keep}"
    if pruning.trained_per_step is None:
        chosen = pruning.completion_keep == "auto"
        return [(name, "chosen while training" if chosen else "depends on the rewards")]
    text = f"{pruning.trained_per_step:,.4g} of {shape.trained_per_step:,} per step"
    if length is not None and pruning.trained_total is not None:
        text += f", {pruning.trained_total:,.0f} of {length.trained_total:,} in total"
    return [(name, text + " (expected, at equal lengths)")]
