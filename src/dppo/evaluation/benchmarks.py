"""The items of a benchmark and what scores them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dppo.errors import ConfigurationError, InvalidInputError
from dppo.tasks.chat import chat_settings, conversation
from dppo.tasks.gym import GYM_REWARD, PREFIX, is_gym, load_gym
from dppo.tasks.named import MATH_REWARD, NAMED, is_named, load_named
from dppo.tasks.sorting import sorting_dataset

BUILTIN = "builtin"
_MADE_ITEMS = 512
_MADE_FROM = 1_000_003
"""Added to the seed of made problems, so that they are not those of a training with that seed."""


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        number: Its row in the whole benchmark, whatever `limit` leaves of it.
        prompt: A text, or a conversation.
        columns: The row's other columns, which scoring gets by name.
    """

    number: int
    prompt: Any
    columns: dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """Problems and their reward function, in the form of TRL's reward functions."""

    name: str
    items: list[Item]
    reward: Callable[..., Any]

    def score(self, item: Item, texts: Sequence[str]) -> list[float | None]:
        """Scores completions of one item.

        Args:
            item: The problem.
            texts: The completions.

        Returns:
            One score each; None where the reward gives none.

        Raises:
            InvalidInputError: The reward returned another number of values.
        """
        chat = not isinstance(item.prompt, str)
        given: dict[str, Any] = {name: [value] * len(texts) for name, value in item.columns.items()}
        given["prompts"] = [item.prompt] * len(texts)
        given["completions"] = [
            [{"role": "assistant", "content": text}] if chat else text for text in texts
        ]
        scores = list(self.reward(**given))
        if len(scores) != len(texts):
            raise InvalidInputError(
                f"the reward returned {len(scores)} values for {len(texts)} completions"
            )
        there = [math.nan if score is None else float(score) for score in scores]
        return [None if math.isnan(score) else score for score in there]


def default_reward(name: str) -> str:
    """The name of the reward function of a benchmark.

    Raises:
        ConfigurationError: There is no such benchmark; lists those there are.
    """
    if name == BUILTIN:
        return "dppo.tasks:sorting_reward"
    if is_named(name):
        return MATH_REWARD
    if is_gym(name):
        return GYM_REWARD
    raise ConfigurationError(
        f"benchmarks: there is no {name!r}; there are {', '.join([*NAMED, BUILTIN])} and "
        f"{PREFIX}TASK"
    )


def load_benchmark(
    name: str,
    reward: Callable[..., Any],
    *,
    limit: int | None,
    seed: int,
    data_dir: str | None = None,
    chat: bool | None = None,
    system_prompt: str | None = None,
) -> Benchmark:
    """Loads the problems of a benchmark.

    Args:
        name: A mathematics set by name, "builtin" or `reasoning-gym:TASK`.
        reward: Scores completions.
        limit: How many problems; a seeded draw, in the benchmark's order. All by default.
        seed: Of the draw, and of problems that are made.
        data_dir: Where local copies are; the hub by default.
        chat: Whether prompts become conversations; by default those of mathematics do.
        system_prompt: Of the conversations.

    Returns:
        The benchmark.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    chat, system_prompt = chat_settings(name, chat=chat, system_prompt=system_prompt)
    if is_named(name):
        rows = load_named(name, split="test", data_dir=data_dir)
    elif is_gym(name):
        rows = load_gym(name, limit or _MADE_ITEMS, seed=seed + _MADE_FROM)
    else:
        rows = sorting_dataset(limit or _MADE_ITEMS, seed=seed, split="test")
    chosen = range(len(rows))
    if limit is not None and limit < len(rows):
        chosen = sorted(random.Random(seed).sample(chosen, limit))
    items = []
    for number in chosen:
        columns = dict(rows[number])
        prompt = columns.pop("prompt")
        items.append(Item(number, conversation(prompt, system_prompt) if chat else prompt, columns))
    return Benchmark(name, items, reward)
