"""Reward functions keep the host's contract, or the error says which one broke it and how.

The host checks the number of rewards. Here also: that the function can be called with what it will
be passed (before any work), and that what it returns are numbers.
"""

import functools
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import is_async_callable

from dppo._rewards import callable_name, check_signature
from dppo.errors import InvalidInputError
from dppo.trl import reward_failures
from dppo.trl.reward_failures import Failures


def checked_rewards(
    reward_funcs: Any, columns: Iterable[str] | None, failures: Failures | None = None
) -> Any:
    """Wrap the plain functions among `reward_funcs`; models and names pass through.

    Args:
        reward_funcs: What the trainer was given: one, a list of them, or None.
        columns: Columns of the data set, None if unknown (streaming).
        failures: What to do where a function raises; None: say where, and stop.

    Raises:
        ConfigurationError: A function cannot take what it will be passed.
    """
    if reward_funcs is None:
        return None
    listed = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for func in listed:
        if _is_plain(func):
            check_signature(func, columns)
    return [checked(func, failures) if _is_plain(func) else func for func in listed]


def checked(func: Callable[..., Any], failures: Failures | None = None) -> Callable[..., Any]:
    """The same function, its result checked and made a list of floats and None."""
    name, policy = callable_name(func), failures or Failures()

    @functools.wraps(func, updated=())
    def sync_checked(**kwargs: Any) -> list[float | None]:
        rows = len(kwargs["prompts"])
        try:
            return check_result(name, reward_failures.call(name, func, policy, kwargs), rows)
        except Exception as error:
            return policy.hold_back(error, rows)

    @functools.wraps(func, updated=())
    async def async_checked(**kwargs: Any) -> list[float | None]:
        rows = len(kwargs["prompts"])
        try:
            result = await reward_failures.acall(name, func, policy, kwargs)
            return check_result(name, result, rows)
        except Exception as error:
            return policy.hold_back(error, rows)

    wrapper = async_checked if is_async_callable(func) else sync_checked
    wrapper.__name__ = name
    return wrapper


def check_result(name: str, result: Any, expected: int) -> list[float | None]:
    """Return the rewards as floats, None where there is no score.

    Raises:
        InvalidInputError: Not one number or None for each completion.
    """
    if isinstance(result, torch.Tensor | np.ndarray):
        result = result.tolist()
    if isinstance(result, str) or not isinstance(result, Iterable):
        result = [result]
    rewards = [r.item() if isinstance(r, torch.Tensor | np.generic) else r for r in result]
    numbers = [r is None or (isinstance(r, Real) and not math.isinf(r)) for r in rewards]
    if len(rewards) != expected or not all(numbers):
        odd = next((r for r, ok in zip(rewards, numbers, strict=True) if not ok), None)
        detail = "" if odd is None else f", among them {odd!r} ({type(odd).__name__})"
        raise InvalidInputError(
            f"reward function {name!r} returned {len(rewards)} values{detail}, but a finite number "
            f"or None for each of {expected} completions was expected"
        )
    return [None if r is None else float(r) for r in rewards]


def _is_plain(func: Any) -> bool:
    return callable(func) and not isinstance(func, torch.nn.Module | str)
