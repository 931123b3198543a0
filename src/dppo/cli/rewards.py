"""Finds reward functions by name and checks that the data set has what they need."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from dppo._rewards import check_signature
from dppo.errors import ConfigurationError

Reward = Callable[..., Any]


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """Imports reward functions.

    Args:
        names: `module:function` each; modules of the current directory are found, too.

    Returns:
        The functions.

    Raises:
        ConfigurationError: With one line for each name that leads to no function.
    """
    found, problems = [], []
    for name in names:
        try:
            found.append(_load(name))
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError("\n".join(problems))
    return found


def check_rewards(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Checks that every reward function can be called with what TRL will pass.

    Args:
        rewards: The functions.
        columns: The columns of the data set.

    Raises:
        ConfigurationError: If one needs a column that is not there, or has no `**kwargs` and
            does not take everything that is passed.
    """
    problems = []
    for reward in rewards:
        try:
            check_signature(reward, columns)
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError("\n".join(problems))


def _load(name: str) -> Reward:
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigurationError(f"reward: expected module:function, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"reward {name}: no module named {error.name!r}") from error
    finally:
        sys.path.remove(os.getcwd())
    reward = getattr(module, attribute, None)
    if not callable(reward):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigurationError(
            f"reward {name}: {module_name} has no function {attribute!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    return reward
