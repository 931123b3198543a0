"""Rewards for final answers in mathematics, through math-verify."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from dppo.errors import ConfigurationError, InvalidInputError
from dppo.rewards.pool import TIMEOUT, Pool
from dppo.rewards.verify import NO_ANSWER, NO_GOLD, RIGHT, WRONG

__all__ = ["MathReward", "completion_text", "math_reward"]

METRICS = {
    NO_ANSWER: "math/unparseable_answer",
    NO_GOLD: "math/unparseable_gold",
    TIMEOUT: "math/timeout",
}


class MathReward:
    r"""1 for a right final answer, 0 for another, None where there is nothing to judge by.

    The last \boxed of a completion is judged, else what follows the last "####", else the last
    expression of the text (`dppo.rewards.extract`). A gold answer that cannot be read gives None,
    an answer that cannot be read 0. Both are counted, apart: in `counts`, and as shares of the
    batch in TRL's metrics `math/unparseable_answer`, `math/unparseable_gold`, `math/timeout`.

    Judging runs in processes of its own, which are reused and are killed where an item takes longer
    than the limit. It works from any thread and from asyncio.

    Args:
        time_limit: Seconds for one completion.
        on_timeout: Reward of one that took longer: None, or a number.
        workers: Processes; None: one for each core, at most 4.

    Raises:
        ConfigurationError: A value is outside its range, or math-verify is not installed.

    Example:
        >>> reward = MathReward(workers=1)  # doctest: +SKIP
        >>> reward(["\\boxed{8,000}", "72"], answer=["8000", "71"])  # doctest: +SKIP
        [1.0, 0.0]
    """

    def __init__(
        self,
        time_limit: float = 5.0,
        *,
        on_timeout: float | None = None,
        workers: int | None = None,
    ) -> None:
        if not time_limit > 0 or not math.isfinite(time_limit):
            raise ConfigurationError(f"time_limit={time_limit}: must be seconds > 0")
        if workers is not None and workers < 1:
            raise ConfigurationError(f"workers={workers}: must be at least 1")
        self.__name__ = "math_reward"
        self.on_timeout = on_timeout
        self.counts: Counter[str] = Counter()
        """Completions by verdict, of all calls."""
        self._pool = Pool(workers=workers, time_limit=time_limit)

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[str],
        log_metric: Callable[[str, float], Any] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Judge completions.

        Args:
            completions: Texts, or lists of messages, of which the last counts.
            answer: Gold answers, one for each.
            log_metric: Called with the name and value of each metric; TRL gives it.
            **kwargs: What else TRL passes; ignored.

        Raises:
            InvalidInputError: The numbers differ, or a completion or gold answer is no text.
            ConfigurationError: math-verify is not installed.
        """
        if len(completions) != len(answer):
            raise InvalidInputError(
                f"completions and answer must have equal length, got {len(completions)} and "
                f"{len(answer)}"
            )
        if find_spec("math_verify") is None:
            raise ConfigurationError(
                "math_reward needs math-verify, which is not installed: "
                "pip install 'math-verify[antlr4_13_2]'"
            )
        golds = [gold if isinstance(gold, str) else str(gold) for gold in answer]
        texts = [completion_text(completion) for completion in completions]
        verdicts = self._pool.judge(list(zip(golds, texts, strict=True)))
        found = Counter(verdicts)
        self.counts.update(found)
        if log_metric is not None and verdicts:
            for verdict, name in METRICS.items():
                log_metric(name, found[verdict] / len(verdicts))
        scores = {RIGHT: 1.0, WRONG: 0.0, NO_ANSWER: 0.0, NO_GOLD: None, TIMEOUT: self.on_timeout}
        return [scores[verdict] for verdict in verdicts]


def completion_text(completion: Any) -> str:
    """Text of a completion: itself, or that of its last message.

    Raises:
        InvalidInputError: It is neither.
    """
    if isinstance(completion, str):
        return completion
    messages = isinstance(completion, list | tuple) and completion
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # parts, as of images and text
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(content, str):
        raise InvalidInputError(
            "a completion must be a text, or a non-empty list of messages whose last one has a "
            f"content, got {completion!r:.200}"
        )
    return content


_default = MathReward()


def math_reward(
    completions: Sequence[Any], answer: Sequence[str], **kwargs: Any
) -> list[float | None]:
    """`MathReward` with its defaults, as a function.

    Args:
        completions: As there.
        answer: As there.
        **kwargs: As there.

    Raises:
        InvalidInputError: As there.
        ConfigurationError: As there.
    """
    return _default(completions, answer, **kwargs)
