"""`dppo compare`: methods side by side, on the same prompts, seeds and evaluation set."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.cli.arithmetic import batch_shape
from dppo.cli.compare.methods import Method, read_methods
from dppo.cli.data import BUILTIN, load_prompts, prompt_options
from dppo.cli.fields import RUN_OPTIONS, Field, config_fields
from dppo.cli.job import check_folders
from dppo.cli.length import run_length
from dppo.cli.options import Settings, read_settings
from dppo.cli.plan import batch_settings
from dppo.cli.rewards import check_rewards, load_rewards
from dppo.cli.train import check_alphabet, reward_names, with_defaults
from dppo.errors import ConfigurationError

SUMMARY = "train several methods in turns and compare reward, time and tokens"
EXAMPLES = """\
examples:
  dppo compare
  dppo compare --methods grpo dppo packing cppo@3 --seeds 5 --output-dir runs/compared
  dppo compare --methods dppo quarter=dppo,completion_keep=0.25 --model Qwen/Qwen3-0.6B \\
      --dataset problems.jsonl --prompt-column question --reward my_rewards:exact

methods: grpo (TRL's own trainer), dppo, packing, pruning, dppo-unclipped, paper, and the biased
peers cppo, pods, dapo, greso, algorithm-1; NAME@N for N seeds only; NAME=BASE,option=value,... for
one's own. A run that has ended is not run again: the same command goes on where it stopped.
"""
OPTIONS = {
    **RUN_OPTIONS,
    **{
        field.name: field
        for field in (
            Field("methods", "list[str]", ["grpo", "dppo", "packing", "pruning"], "see below"),
            Field("seeds", "int", 3, "how many seeds, from --seed on"),
            Field("eval_every", "int", 5, "steps between two evaluations on held-out prompts"),
            Field("final_samples", "int", 4, "completions per held-out prompt at the end"),
        )
    },
}
OUTPUT = "runs/compare"


@dataclass(frozen=True)
class Plan:
    """A checked comparison.

    Attributes:
        methods: The rows.
        jobs: By seed and method.
        folder: Where everything goes.
        total: Optimizer steps, and one for the end of each run.
    """

    methods: list[Method]
    jobs: dict[int, dict[str, dict[str, Any]]]
    folder: Path
    total: int


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo compare`.

    Returns:
        The exit code: 0, or 1 if a run failed.

    Raises:
        ConfigurationError: For whatever can be found wrong before a model is loaded.
    """
    plan = prepare(arguments)
    from dppo.cli.compare.carry_out import carry_out
    from dppo.cli.compare.results import report
    from dppo.cli.runner import readable_output

    with readable_output():
        failed, ran = carry_out(plan)
        report(plan, failed, command=shlex.join(["dppo", "compare", *arguments]), ran=ran)
    return 1 if failed else 0


def prepare(arguments: Sequence[str]) -> Plan:
    """Reads and checks everything that needs no model.

    Args:
        arguments: The words after `dppo compare`.

    Raises:
        ConfigurationError: With what is wrong.
    """
    given = read_settings(arguments, run_options=OPTIONS)
    missing = config_fields().missing
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not installed; install dppo with its extra 'tasks'"
        )
    chosen = {name: field.default for name, field in OPTIONS.items()} | given.run
    for name in ("seeds", "eval_every", "final_samples", "eval_prompts"):
        if chosen[name] < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {chosen[name]}")
    for name in ("resume_from_checkpoint", "logging_steps", "record_rollouts"):
        if name in given.config:
            raise ConfigurationError(f"{name} is not an option of dppo compare: {EXAMPLES[-70:]}")
    methods = read_methods(chosen["methods"], given.config)
    settings = _completed(given)
    folder = Path(settings.config.pop("output_dir"))
    check_folders(settings.run["model"], str(folder))
    rewards = reward_names(settings.run)
    seed = settings.config.get("seed", config_fields().fields["seed"].default)
    prompts = load_prompts(
        settings.run["dataset"],
        **prompt_options(settings.run),
        seed=seed,
    )
    check_rewards(load_rewards(rewards), prompts.train.column_names)
    if settings.run["model"] == BUILTIN:
        check_alphabet(prompts.train["prompt"])
    batch = batch_settings(settings.config)
    length = run_length(batch, batch_shape(batch), len(prompts.train))
    assert length is not None  # the data set is here
    jobs = {
        seed + number: {
            method.name: _job(
                method, settings, rewards=rewards, folder=folder, seeds=(seed + number, seed)
            )
            for method in methods
            if method.seeds is None or number < method.seeds
        }
        for number in range(chosen["seeds"])
    }
    runs = sum(len(of_seed) for of_seed in jobs.values())
    return Plan(methods, jobs, folder, runs * (length.total_steps + 1))


def _completed(given: Settings) -> Settings:
    """With the defaults of `dppo train`, but for what makes a method."""
    run_options = {n: v for n, v in given.run.items() if n in RUN_OPTIONS}
    others = {n: v for n, v in given.run.items() if n not in RUN_OPTIONS}
    settings = with_defaults(Settings(given.config, run_options))
    config = {n: v for n, v in settings.config.items() if n != "completion_keep"}
    config = {**config, "output_dir": given.config.get("output_dir", OUTPUT)}
    config = {**config, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    if "completion_keep" in given.config:  # for a method that leaves it open
        config["completion_keep"] = given.config["completion_keep"]
    defaults = {n: f.default for n, f in OPTIONS.items() if n not in RUN_OPTIONS}
    return Settings(config, {**settings.run, **defaults, **others})


def _job(
    method: Method, settings: Settings, *, rewards: list[str], folder: Path, seeds: tuple[int, int]
) -> dict[str, Any]:
    """One run; `seeds` are its own and that of the data, which all runs share."""
    seed, data_seed = seeds
    run_options = {n: v for n, v in settings.run.items() if n in RUN_OPTIONS}
    return {
        "method": method.name,
        "trainer": method.trainer,
        "options": method.options,
        "config": {**settings.config, "seed": seed},
        "run": {**run_options, "reward": rewards},
        "data_seed": data_seed,
        "eval_every": settings.run["eval_every"],
        "final_samples": settings.run["final_samples"],
        "folder": str(folder / method.name / f"seed-{seed}"),
    }
