"""Rewards for form: a boxed answer, and length as in DAPO."""

from collections.abc import Callable, Sequence
from typing import Any

from dppo.errors import ConfigurationError
from dppo.rewards.extract import BOX, final_answer
from dppo.rewards.mathematics import completion_text

__all__ = ["format_reward", "overlong_penalty"]


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""1.0 where the last \boxed of a completion is closed and not empty, else 0.0.

    Args:
        completions: Texts, or lists of messages, of which the last counts.
        **kwargs: What else TRL passes; ignored.

    Example:
        >>> format_reward([r"\boxed{3}", r"\boxed{3", "3"])
        [1.0, 0.0, 0.0]
    """
    texts = [completion_text(completion) for completion in completions]
    return [float(BOX in text and final_answer(text) is not None) for text in texts]


def overlong_penalty(max_length: int, buffer: int) -> Callable[..., list[float]]:
    """A reward for length: 0 up to max_length - buffer tokens, then linearly down to -1.

    min(0, max(-1, (max_length - buffer - length) / buffer)), the soft overlong punishment of DAPO
    (Yu et al., arXiv 2503.14476, eq. 13).

    Args:
        max_length: Tokens at which it is -1; usually `max_completion_length`.
        buffer: Tokens over which it falls, in [1, max_length].

    Raises:
        ConfigurationError: A value is outside its range.

    Example:
        >>> overlong_penalty(100, 20)(completion_ids=[[0] * 80, [0] * 90, [0] * 120])
        [0.0, -0.5, -1.0]
    """
    if max_length < 1 or not 1 <= buffer <= max_length:
        raise ConfigurationError(
            f"max_length={max_length}, buffer={buffer}: 1 <= buffer <= max_length is needed"
        )

    def overlong(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        over = [(max_length - buffer - len(ids)) / buffer for ids in completion_ids]
        return [min(0.0, max(-1.0, value)) for value in over]

    return overlong
