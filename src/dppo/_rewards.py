"""What a reward function will be called with, checked before anything is loaded. No framework."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from dppo.errors import ConfigurationError

ALWAYS_PASSED = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
)
NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns of the data set that reward functions do not get by name."""


def callable_name(func: Any) -> str:
    """The name of a function, of what a `functools.partial` calls, or of a callable's class."""
    name = getattr(func, "__name__", None) or getattr(getattr(func, "func", None), "__name__", None)
    return name or type(func).__name__


def check_signature(func: Callable[..., Any], columns: Iterable[str] | None) -> None:
    """Refuse a function that lacks **kwargs for what it will be passed, or needs what it won't.

    Args:
        func: A reward function in TRL's form.
        columns: Columns of the data set; None if unknown (streaming, environments).

    Raises:
        ConfigurationError: The message lists what will be passed.
    """
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will tell
    passed = [*ALWAYS_PASSED, *(c for c in columns or () if c not in NOT_PASSED)]
    name = callable_name(func)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    surplus = [key for key in passed if key not in {p.name for p in named}]
    if surplus and not takes_any:
        raise ConfigurationError(
            f"reward function {name!r} must accept **kwargs: it does not name "
            f"{', '.join(surplus)}, and will be called with {', '.join(passed)}"
        )
    known = {*passed, "environments"}
    missing = [p.name for p in named if p.default is p.empty and p.name not in known]
    if missing and columns is not None:
        raise ConfigurationError(
            f"reward function {name!r} needs {', '.join(missing)}, which the data set does not "
            f"have; its columns are {', '.join(columns)}"
        )
