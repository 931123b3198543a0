"""`dppo train`: checks a configuration, then trains, and evaluates before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dppo._checkpoints import checkpoint_path
from dppo.cli.arithmetic import batch_shape
from dppo.cli.builtin import BUILTIN_CONFIG
from dppo.cli.data import BUILTIN, load_prompts, prompt_options
from dppo.cli.fields import RUN_OPTIONS, config_fields
from dppo.cli.job import Job, check_folders
from dppo.cli.length import run_length
from dppo.cli.options import Settings, read_settings
from dppo.cli.plan import batch_settings, check_pruning, has_prior
from dppo.cli.rewards import check_rewards, load_rewards
from dppo.errors import ConfigurationError
from dppo.tasks.gym import GYM_REWARD, is_gym
from dppo.tasks.named import MATH_REWARD, is_named

SUMMARY = "train with DPPO; without options: the built-in task, on a CPU"
EXAMPLES = """\
examples:
  dppo train
  dppo train --completion-keep 1.0 --output-dir runs/unpruned
  dppo train --config run.yaml --model Qwen/Qwen3-0.6B --dataset problems.jsonl \\
      --prompt-column question --reward my_rewards:exact
"""
OPTIONS = RUN_OPTIONS
_OWN_DEFAULTS = {"disable_tqdm": True, "output_dir": "runs/train"}


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo train`.

    Returns:
        The exit code: 0, or 130 after an interrupt.

    Raises:
        ConfigurationError: For whatever can be found wrong before weights are loaded.
    """
    job = prepare(arguments)
    from dppo.cli.runner import train

    return train(job)


def prepare(arguments: Sequence[str]) -> Job:
    """Reads and checks everything that needs no model.

    Args:
        arguments: The words after `dppo train`.

    Returns:
        The job.

    Raises:
        ConfigurationError: With what is wrong.
    """
    settings = with_defaults(read_settings(arguments, run_options=OPTIONS))
    missing = config_fields().missing
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not installed; install dppo with its extra 'tasks'"
        )
    check_pruning(settings.config)
    batch = batch_settings(settings.config)
    shape = batch_shape(batch)
    resume = checkpoint_path(
        settings.config.get("resume_from_checkpoint"), settings.config["output_dir"]
    )
    check_folders(settings.run["model"], settings.config["output_dir"])
    rewards = load_rewards(reward_names(settings.run))
    prompts = load_prompts(
        settings.run["dataset"],
        **prompt_options(settings.run),
        seed=settings.config.get("seed", config_fields().fields["seed"].default),
    )
    check_rewards(rewards, prompts.train.column_names)
    if settings.run["model"] == BUILTIN:
        check_alphabet(prompts.train["prompt"])
    run_length(batch, shape, len(prompts.train), prior=has_prior(settings.config))
    resumed = {} if resume is None else {"resume_from_checkpoint": resume}
    return Job({**settings.config, **resumed}, settings.run, prompts, rewards)


def with_defaults(settings: Settings) -> Settings:
    """Adds the command's defaults below what the user asked for.

    Args:
        settings: What the user asked for.

    Returns:
        Complete run options; and those of the built-in run where model and data set are built in.
    """
    run_options = {name: field.default for name, field in RUN_OPTIONS.items()} | settings.run
    builtin = run_options["model"] == run_options["dataset"] == BUILTIN
    defaults = BUILTIN_CONFIG if builtin else _OWN_DEFAULTS
    return replace(settings, config={**defaults, **settings.config}, run=run_options)


def check_alphabet(prompts: Sequence[Any]) -> None:
    """Refuses prompts that the built-in model cannot read.

    Args:
        prompts: The training prompts.

    Raises:
        ConfigurationError: If a text holds anything but digits and "=".
    """
    for prompt in prompts:
        if isinstance(prompt, str) and set(prompt) - set("0123456789="):
            raise ConfigurationError(
                f'the built-in model reads only digits and "=", not {prompt!r:.60}; give --model'
            )


def reward_names(run_options: dict[str, Any]) -> list[str]:
    """Names of the reward functions that were asked for, or of the data set's own.

    Args:
        run_options: The command's own options.

    Raises:
        ConfigurationError: There are none, and the data set has none of its own.
    """
    if run_options["reward"]:
        return run_options["reward"]
    name = run_options["dataset"]
    if name == BUILTIN:
        return ["dppo.tasks:sorting_reward"]
    if is_named(name):
        return [MATH_REWARD]
    if is_gym(name):
        return [GYM_REWARD]
    raise ConfigurationError(
        f"the data set {name} needs a reward function: --reward module:function"
    )
