"""Loads the training prompts and the held-out prompts of a run, and checks their columns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dppo.cli.rows import Prompts, hold_out, load_rows, with_column
from dppo.errors import ConfigurationError
from dppo.tasks.chat import chat_settings, with_conversations
from dppo.tasks.gym import is_gym, load_gym
from dppo.tasks.named import is_named, load_named

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN = "builtin"
_MADE_PROMPTS = 2048
"""How many prompts to make where nobody says; a file has as many as it has."""
_OPTIONS = ("prompt_column", "answer_column", "num_prompts", "eval_prompts")
_OPTIONS += ("data_dir", "system_prompt", "chat")


def prompt_options(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run options that `load_prompts` takes, without the name of the data set.

    Args:
        run: The command's own options; those that an older job lacks are left at their defaults.
    """
    return {name: run[name] for name in _OPTIONS if name in run}


def load_prompts(
    name: str,
    *,
    prompt_column: str = "prompt",
    num_prompts: int | None = None,
    eval_prompts: int,
    seed: int,
    answer_column: str | None = None,
    data_dir: str | None = None,
    system_prompt: str | None = None,
    chat: bool | None = None,
) -> Prompts:
    """Loads a data set and holds some prompts out of it.

    Args:
        name: "builtin", a data set by name, `reasoning-gym:TASK`, a file, or a name on the hub.
        prompt_column: The column to use as `prompt`.
        num_prompts: How many prompts to train on; all by default.
        eval_prompts: How many prompts to hold out.
        seed: Of the draw.
        answer_column: The column to use as `answer`.
        data_dir: Where local copies of data sets by name are; the hub by default.
        system_prompt: The system message of a conversation.
        chat: Whether prompts become conversations; decided by the data set by default.

    Returns:
        The two disjoint sets.

    Raises:
        ConfigurationError: If there is no such file or column, or the data set is too small.
    """
    for option, value in (("eval_prompts", eval_prompts), ("num_prompts", num_prompts)):
        if value is not None and value < (option == "num_prompts"):
            raise ConfigurationError(f"{option} is too small: {value}")
    chat, system_prompt = chat_settings(name, chat=chat, system_prompt=system_prompt)
    made = num_prompts or _MADE_PROMPTS
    if name == BUILTIN:
        prompts = _builtin_prompts(made, eval_prompts, seed)
    elif is_named(name):
        prompts = _named_prompts(name, eval_prompts, seed=seed, data_dir=data_dir)
    elif is_gym(name):
        prompts = hold_out(load_gym(name, made + eval_prompts, seed=seed), eval_prompts, seed=seed)
    else:
        rows = with_prompt_column(load_rows(name), prompt_column)
        rows = rows if answer_column is None else with_column(rows, answer_column, "answer")
        prompts = hold_out(rows, eval_prompts, seed=seed)
    if num_prompts is not None:
        prompts = _first(prompts, num_prompts, name=name, eval_prompts=eval_prompts)
    if not chat:
        return prompts
    held_out = prompts.held_out and with_conversations(prompts.held_out, system_prompt)
    return Prompts(with_conversations(prompts.train, system_prompt), held_out)


def with_prompt_column(rows: Dataset, column: str) -> Dataset:
    """The data set with what is in `column` as `prompt`; see `with_column`."""
    return with_column(rows, column, "prompt")


def _builtin_prompts(num_prompts: int, eval_prompts: int, seed: int) -> Prompts:
    from dppo.tasks import sorting_dataset

    train = sorting_dataset(num_prompts, seed=seed, split="train")
    if eval_prompts == 0:
        return Prompts(train, None)
    return Prompts(train, sorting_dataset(eval_prompts, seed=seed, split="test"))


def _named_prompts(name: str, eval_prompts: int, *, seed: int, data_dir: str | None) -> Prompts:
    """Held-out prompts come from the test split, never from what is trained on."""
    train = load_named(name, split="train", data_dir=data_dir)
    if eval_prompts == 0:
        return Prompts(train, None)
    test = load_named(name, split="held_out", data_dir=data_dir)
    drawn = sorted(random.Random(seed).sample(range(len(test)), min(eval_prompts, len(test))))
    return Prompts(train, test.select(drawn))


def _first(prompts: Prompts, count: int, *, name: str, eval_prompts: int) -> Prompts:
    if count > len(prompts.train):
        raise ConfigurationError(
            f"num_prompts is {count}, but {name} has {len(prompts.train)} prompts besides "
            f"the {eval_prompts} held out"
        )
    return Prompts(prompts.train.select(range(count)), prompts.held_out)
