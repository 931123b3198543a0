"""Reads how many processes an `accelerate` configuration starts, and checks it against a run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dppo.cli.yaml_file import read_yaml
from dppo.errors import ConfigurationError


def launched_processes(path: Path, config: dict[str, Any]) -> int:
    """Number of processes that `accelerate launch --config_file` starts.

    Args:
        path: The file.
        config: Fields of `DPPOConfig` that the user set.

    Returns:
        The number, of all machines.

    Raises:
        ConfigurationError: The file cannot be read, does not say it, starts unequally many on its
            machines, or contradicts the configuration of the run.
    """
    content = read_yaml(path)
    processes, machines = content.get("num_processes"), content.get("num_machines", 1)
    if not isinstance(processes, int) or processes < 1:
        raise ConfigurationError(
            f"{path}: num_processes must be a positive number, got {processes!r}"
        )
    if not isinstance(machines, int) or machines < 1 or processes % machines:
        raise ConfigurationError(
            f"{path}: num_processes ({processes}) counts those of all machines, so it must be a "
            f"multiple of num_machines ({machines!r})"
        )
    if content.get("use_cpu") and processes > 1:
        raise ConfigurationError(
            f"{path}: with use_cpu, accelerate starts one process whatever num_processes says; "
            "remove it, set distributed_type: MULTI_GPU, and train with --use-cpu"
        )
    sharding = content.get("deepspeed_config") or {}
    for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        given = sharding.get(name, "auto")
        option = name.replace("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
        of_run = config.get(option, 1 if name.startswith("gradient") else 8)
        if given not in ("auto", of_run):
            raise ConfigurationError(
                f"{path}: deepspeed_config.{name} is {given}, but {option} of the run is {of_run}; "
                'write "auto"'
            )
    return processes
