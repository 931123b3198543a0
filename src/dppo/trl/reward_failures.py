"""Where a reward function raises: the run stops and says where, or the row has no score.

Never 0: that would teach the model that an outage is a wrong answer.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dppo.errors import ConfigurationError, InvalidInputError, RewardError

logger = logging.getLogger(__name__)

METRIC = "dppo/rewards/failed"
PATIENCE = 10.0
"""Seconds of looking for the row that a function fails on."""


@dataclass
class Failures:
    """The policy, and what has failed.

    Attributes:
        skip: Whether rows that a function fails on go without a score.
        limit: Calls in a row in which a function fails on every row, until the run stops.
        shared: Whether an error waits in `raised`, the rows without a score, until all processes
            have been told; else the others would wait for this one.
        raised: What a function has raised and not been told yet.
        in_a_row: By function.
    """

    skip: bool = False
    limit: int = 10
    shared: bool = False
    raised: Exception | None = None
    in_a_row: dict[str, int] = field(default_factory=dict)

    def hold_back(self, error: Exception, rows: int) -> list[float | None]:
        """Keep an error until the processes share it; raise it where there is one process only."""
        if not self.shared:
            raise error
        self.raised = self.raised or error
        return [None] * rows

    def take(self) -> Exception | None:
        """What was held back, once."""
        error, self.raised = self.raised, None
        return error

    def scored(self, name: str, scores: list[Any], failed: int, given: dict[str, Any]) -> list[Any]:
        """Count the rows of a call that failed; return the scores.

        Raises:
            RewardError: All failed, too often.
        """
        rows = len(given["prompts"])
        log_metric = given.get("log_metric")
        if self.skip and log_metric is not None and rows:
            log_metric(METRIC, failed / rows)  # also 0: all ranks must log the same names
        whole = rows > 0 and failed == rows
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if whole else 0
        if self.in_a_row[name] >= self.limit:
            raise RewardError(
                f"reward function {name!r} failed on every completion, {self.limit} times in a row "
                "(reward_failure_limit); the messages above say how"
            )
        return scores

    def row_failed(self, name: str, error: Exception, given: dict[str, Any]) -> None:
        """Say which row has no score, and why."""
        logger.warning(
            "no score from reward function %r for a completion to %s: %s: %s",
            *(name, _start(given["prompts"][0]), type(error).__name__, error),
        )


def call(name: str, func: Callable[..., Any], failures: Failures, given: dict[str, Any]) -> Any:
    """Call a reward function; where it raises, row by row.

    Raises:
        RewardError: It raised and rows are not to be skipped; chained to what it raised.
    """
    try:
        return failures.scored(name, func(**given), 0, given)
    except (ConfigurationError, InvalidInputError):
        raise  # of what it was given, whichever the row
    except Exception as error:
        if not failures.skip:
            raise _told(name, error, _first_failing(func, given)) from error
    scores, failed = [], 0
    for row in _rows(given):
        try:
            scores += _only(func(**row))
        except Exception as error:
            failures.row_failed(name, error, row)
            scores.append(None)
            failed += 1
    return failures.scored(name, scores, failed, given)


async def acall(
    name: str, func: Callable[..., Any], failures: Failures, given: dict[str, Any]
) -> Any:
    """The same for an asynchronous function."""
    try:
        return failures.scored(name, await func(**given), 0, given)
    except (ConfigurationError, InvalidInputError):
        raise  # of what it was given, whichever the row
    except Exception as error:
        if not failures.skip:
            raise _told(name, error, None) from error
    scores, failed = [], 0
    for row in _rows(given):
        try:
            scores += _only(await func(**row))
        except Exception as error:
            failures.row_failed(name, error, row)
            scores.append(None)
            failed += 1
    return failures.scored(name, scores, failed, given)


def _rows(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each row alone; what is not one value per row is passed as it is."""
    count = len(given["prompts"])
    for row in range(count):
        yield {
            name: value[row : row + 1]
            if isinstance(value, list | tuple) and len(value) == count
            else value
            for name, value in given.items()
        }


def _only(scores: Any) -> list[Any]:
    """The score of a single row, whatever it came in."""
    found = scores.tolist() if hasattr(scores, "tolist") else list(scores)
    if len(found) != 1:
        raise ValueError(f"returned {len(found)} values for one completion")
    return found


def _first_failing(func: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Prompt of the first row that fails alone, if it is found soon."""
    began = time.monotonic()
    for row in _rows(given):
        try:
            func(**row)
        except Exception:
            return row["prompts"][0]
        if time.monotonic() - began > PATIENCE:
            return None
    return None


def _told(name: str, error: Exception, prompt: Any) -> RewardError:
    where = "" if prompt is None else f" on a completion to {_start(prompt)}"
    return RewardError(
        f"reward function {name!r} failed{where}: {type(error).__name__}: {error}. To leave such "
        "completions without a score, set reward_failures='skip'"
    )


def _start(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1].get("content", prompt)
    return f"the prompt {str(text)[:80]!r}"
