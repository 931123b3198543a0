"""A checked run, and the checkpoint it may go on from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigurationError
from dppo.tasks.models import check_installed

if TYPE_CHECKING:
    from dppo.cli.data import Prompts
    from dppo.cli.rewards import Reward


@dataclass(frozen=True)
class Job:
    """A run that has passed every check that needs no model.

    Attributes:
        config: Fields of `DPPOConfig`, with the defaults of the command.
        run: The command's own options, complete.
        prompts: To train on and to evaluate on.
        rewards: The reward functions.
    """

    config: dict[str, Any]
    run: dict[str, Any]
    prompts: Prompts
    rewards: list[Reward]


def checkpoint_step(path: str | None) -> int | None:
    """The step a checkpoint was made at.

    Args:
        path: A directory that `dppo._checkpoints.checkpoint_path` returned.

    Returns:
        The step; None without a path.
    """
    if path is None:
        return None
    state = json.loads((Path(path) / "trainer_state.json").read_text(encoding="utf-8"))
    return state["global_step"]


def check_folders(model: str, output: str) -> None:
    """Refuses a model path that is not there and an output directory that cannot be.

    Args:
        model: A shipped model, a path or a hub name; only the last cannot be checked.
        output: The value of `output_dir`; made if need be.

    Raises:
        ConfigurationError: With the path.
    """
    check_installed(model)
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigurationError(f"model: there is no directory {model}")
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output_dir: {output} cannot be made: {error}") from error
