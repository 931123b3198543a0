"""Reward functions keep the host's contract, or the error says which one broke it and how.

The host checks the number of rewards. Here also: that the function can be called with what it will
be passed (before any work), and that what it returns are numbers.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from dppo.errors import ConfigurationError, InvalidInputError

ALWAYS_PASSED = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
)


def checked_rewards(reward_funcs: Any, columns: Iterable[str] | None) -> Any:
    """Wrap the plain functions among `reward_funcs`; models and names pass through.

    Args:
        reward_funcs: What the trainer was given: one, a list of them, or None.
        columns: Columns of the data set, None if unknown (streaming).

    Raises:
        ConfigurationError: A function cannot take what it will be passed.
    """
    if reward_funcs is None:
        return None
    listed = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for func in listed:
        if _is_plain(func):
            check_signature(func, columns)
    return [checked(func) if _is_plain(func) else func for func in listed]


def check_signature(func: Callable[..., Any], columns: Iterable[str] | None) -> None:
    """Refuse a function that lacks **kwargs for what it will be passed, or needs what it won't.

    Raises:
        ConfigurationError: The message lists what will be passed.
    """
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will tell
    if columns is None:
        passed = list(ALWAYS_PASSED)
    else:
        passed = [*ALWAYS_PASSED, *(c for c in columns if c not in ("prompt", "completion"))]
    name = get_callable_name(func)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    surplus = [key for key in passed if key not in named]
    if surplus and not takes_any:
        raise ConfigurationError(
            f"reward function {name!r} has no **kwargs, but will be passed {', '.join(surplus)} "
            f"besides what it names; add **kwargs (all that is passed: {', '.join(passed)})"
        )
    needed = {p.name for p in parameters if p.default is p.empty and p.name in named}
    missing = sorted(needed - set(passed) - {"environments"})
    if missing and columns is not None:
        raise ConfigurationError(
            f"reward function {name!r} needs {', '.join(missing)}, which the data set does not "
            f"have; passed are {', '.join(passed)}"
        )


def checked(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its result checked and made a list of floats and None."""
    name = get_callable_name(func)

    @functools.wraps(func, updated=())
    def sync_checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check_result(name, func(*args, **kwargs), len(kwargs["prompts"]))

    @functools.wraps(func, updated=())
    async def async_checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check_result(name, await func(*args, **kwargs), len(kwargs["prompts"]))

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
    numbers = [r is None or isinstance(r, Real) for r in rewards]
    if len(rewards) != expected or not all(numbers):
        odd = next((r for r, ok in zip(rewards, numbers, strict=True) if not ok), None)
        detail = "" if odd is None else f", among them {odd!r} ({type(odd).__name__})"
        raise InvalidInputError(
            f"reward function {name!r} returned {len(rewards)} values{detail}, but one number or "
            f"None for each of {expected} completions was expected"
        )
    return [None if r is None else float(r) for r in rewards]


def _is_plain(func: Any) -> bool:
    return callable(func) and not isinstance(func, torch.nn.Module | str)
