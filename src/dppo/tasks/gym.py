"""Tasks of the package reasoning-gym (Stojanovski et al., arXiv 2505.24760): `reasoning-gym:TASK`.

A row carries what it was made from, so that the reward can make its entry again and have the task
score it, in whichever process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigurationError
from dppo.tasks.named import last_boxed

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "reasoning-gym:"
GYM_REWARD = "dppo.tasks.gym:reasoning_gym_reward"


def is_gym(name: str) -> bool:
    """Whether a data set is a task of reasoning-gym."""
    return name.startswith(PREFIX)


def load_gym(name: str, size: int, *, seed: int) -> Dataset:
    """Makes the rows of a task.

    Args:
        name: `reasoning-gym:TASK`.
        size: How many.
        seed: Of the task.

    Returns:
        Rows with `prompt`, `answer`, and `index`, `gym_task`, `gym_size` and `gym_seed`, which
        the reward needs.

    Raises:
        ConfigurationError: The package is not installed, or has no such task.
    """
    from datasets import Dataset  # noqa: PLC0415 - importing dppo.tasks must stay cheap

    task = name.removeprefix(PREFIX)
    made = _dataset(task, size, seed)
    entries = [made[index] for index in range(size)]
    return Dataset.from_dict(
        {
            "prompt": [str(entry["question"]) for entry in entries],
            # Some tasks have no single answer: their scoring looks at the entry instead.
            "answer": ["" if e["answer"] is None else str(e["answer"]) for e in entries],
            "index": list(range(size)),
            "gym_task": [task] * size,
            "gym_size": [size] * size,
            "gym_seed": [seed] * size,
        }
    )


def reasoning_gym_reward(
    completions: Sequence[Any],
    index: Sequence[int],
    gym_task: Sequence[str],
    gym_size: Sequence[int],
    gym_seed: Sequence[int],
    **kwargs: Any,
) -> list[float]:
    """What the task's own `score_answer` gives, 0 to 1.

    Args:
        completions: Texts, or conversations whose last message counts.
        index: The number of each row.
        gym_task: The task of each row.
        gym_size: The size of its data set.
        gym_seed: The seed of its data set.
        **kwargs: What else TRL passes; ignored.

    Returns:
        One reward per completion.
    """
    rewards = []
    origins = zip(gym_task, gym_size, gym_seed, strict=True)
    for completion, number, origin in zip(completions, index, origins, strict=True):
        made = _dataset(*origin)
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rewards.append(float(made.score_answer(answer_text(text), made[number])))
    return rewards


def answer_text(text: str) -> str:
    r"""The answer in a completion: in its last <answer> tags, else ``\boxed``, else all of it.

    Example:
        >>> answer_text("I think <answer> 12 </answer>.")
        '12'
    """
    _, opened, rest = text.rpartition("<answer>")
    if opened and "</answer>" in rest:
        return rest.partition("</answer>")[0].strip()
    return last_boxed(text) or text.strip()


@lru_cache(maxsize=8)
def _dataset(task: str, size: int, seed: int) -> Any:
    try:
        reasoning_gym = import_module("reasoning_gym")  # an optional package
    except ImportError as error:
        raise ConfigurationError(
            f"dataset: {PREFIX}{task} needs the package reasoning-gym, which is not installed: "
            "pip install reasoning-gym"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise ConfigurationError(f"dataset: {PREFIX}{task} cannot be made: {error}") from error
