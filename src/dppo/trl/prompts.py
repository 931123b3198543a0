"""Prompts that do not fit: found before training, measured as the model will see them."""

import logging
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational

from dppo.errors import ConfigurationError

logger = logging.getLogger(__name__)


def check_prompt_column(dataset: Any) -> None:
    """Refuse a data set without a `prompt` column.

    Raises:
        ConfigurationError: The message lists the columns that are there.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and "prompt" not in columns:
        raise ConfigurationError(
            f"the data set has no column 'prompt'; found {', '.join(map(repr, columns))}. Rename "
            "yours: dataset.rename_column(NAME, 'prompt'), or --prompt-column NAME on the command "
            "line"
        )


def prompt_lengths(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> list[int]:
    """Tokens of every prompt, with the chat template where prompts are conversations."""
    lengths: list[int] = []
    plain = dataset.with_format(None)
    for start in range(0, len(plain), 1000):
        prompts = plain[start : start + 1000]["prompt"]
        if prompts and is_conversational({"prompt": prompts[0]}):
            encoded: Any = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template
            )
        else:
            encoded = tokenizer(text=prompts)
        ids = encoded["input_ids"]
        lengths += [len(row) for row in ids]
    return lengths


def fitting_prompts(dataset: Dataset, lengths: list[int], *, limit: int, action: str) -> Dataset:
    """Leave out ("drop") or refuse ("error") prompts of more than `limit` tokens.

    Raises:
        ConfigurationError: A prompt is too long and `action` is "error", or none is left.
    """
    long = [i for i, length in enumerate(lengths) if length > limit]
    if not long:
        return dataset
    if action == "error":
        raise ConfigurationError(
            f"{len(long)} of {len(lengths)} prompts are longer than {limit} tokens; the first is "
            f"prompt {long[0]} with {lengths[long[0]]}. Raise max_prompt_length, lower "
            "max_completion_length, or set overlong_prompts='drop'"
        )
    if len(long) == len(lengths):
        raise ConfigurationError(
            f"all {len(lengths)} prompts are longer than {limit} tokens (the shortest has "
            f"{min(lengths)}): nothing is left to train on. Raise max_prompt_length"
        )
    shown = ", ".join(map(str, long[:10])) + (", ..." if len(long) > 10 else "")
    logger.warning(
        "%d of %d prompts are longer than %d tokens and left out: %s",
        *(len(long), len(lengths), limit, shown),
    )
    drop = set(long)
    return dataset.select([i for i in range(len(lengths)) if i not in drop])


def prompt_limit(context: int | None, *, max_prompt: int | None, max_completion: int) -> int | None:
    """Longest prompt that leaves room for the completion; None if nothing limits it.

    Raises:
        ConfigurationError: `max_prompt` + `max_completion` exceed the model's context.
    """
    if context is None:
        return max_prompt
    room = context - max_completion
    if room < 1 or (max_prompt is not None and max_prompt > room):
        raise ConfigurationError(
            f"the model's context of {context} tokens has no room for max_completion_length="
            f"{max_completion}"
            + (f" and max_prompt_length={max_prompt}; lower one of them" if max_prompt else "")
        )
    return room if max_prompt is None else max_prompt
