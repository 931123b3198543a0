"""Prompts as conversations, the form in which trainers apply a model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigurationError
from dppo.tasks.named import MATH_SYSTEM_PROMPT, is_named

if TYPE_CHECKING:
    from datasets import Dataset


def chat_settings(
    name: str, *, chat: bool | None, system_prompt: str | None
) -> tuple[bool, str | None]:
    r"""Whether the prompts of a data set become conversations, and with which system message.

    Args:
        name: The data set.
        chat: What the user asked for; None for nothing.
        system_prompt: What the user gave; "" for no system message.

    Returns:
        By default a conversation with the usual request for ``\boxed`` for mathematics by name,
        and plain text for any other.

    Raises:
        ConfigurationError: A system prompt without a conversation.
    """
    if chat is None:
        chat = is_named(name) or bool(system_prompt)
    if not chat and system_prompt:
        raise ConfigurationError("system_prompt is part of a conversation; leave out --no-chat")
    if chat and system_prompt is None and is_named(name):
        return True, MATH_SYSTEM_PROMPT
    return chat, system_prompt or None


def conversation(prompt: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """A prompt as messages; one that is a conversation keeps its own system message.

    Example:
        >>> conversation("2 + 2?", None)
        [{'role': 'user', 'content': '2 + 2?'}]
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def with_conversations(rows: Dataset, system_prompt: str | None) -> Dataset:
    """The same rows, their prompts as conversations."""
    from datasets import Dataset  # noqa: PLC0415 - importing dppo.tasks must stay cheap

    columns: Any = rows.to_dict()
    columns["prompt"] = [conversation(prompt, system_prompt) for prompt in columns["prompt"]]
    return Dataset.from_dict(columns)
