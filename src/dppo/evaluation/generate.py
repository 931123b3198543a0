"""Completions of a model, greedy or sampled, each row with random numbers of its own.

A sampled token is the argmax of logits / temperature - log E, with E exponential: exactly a draw
from the softmax. Every row draws its E from a generator that benchmark, item and sample seed, so
that what is drawn depends neither on the other rows of a batch nor on their order. What is left is
the rounding of the logits, which padding and batch size may change in the last bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from dppo.errors import ConfigurationError


class Policy(Protocol):
    """What an evaluation needs of a model."""

    context: int | None

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt, with the chat template if it is a conversation."""
        ...

    def complete(
        self,
        rows: Sequence[list[int]],
        *,
        seeds: Sequence[int] | None,
        max_new_tokens: int,
        temperature: float,
    ) -> list[str]:
        """One text per row; greedy without seeds."""
        ...


def row_seed(seed: int, benchmark: str, item: int, sample: int) -> int:
    """The seed of one completion, the same in every run and process."""
    key = f"{seed}/{benchmark}/{item}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class ModelPolicy:
    """A causal language model of transformers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Prepares generation.

        Args:
            model: In evaluation mode.
            tokenizer: With a pad token.
        """
        self._model, self._tokenizer = model, tokenizer
        text_config = model.config.get_text_config()
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._ends = sorted({*ends, tokenizer.eos_token_id} - {None})
        self._pad = self._ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt, with the chat template if it is a conversation.

        Raises:
            ConfigurationError: The tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise ConfigurationError(
                "the model's tokenizer has no chat template, which conversations need; give "
                "--no-chat for plain prompts"
            )
        text = self._tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def complete(
        self,
        rows: Sequence[list[int]],
        *,
        seeds: Sequence[int] | None,
        max_new_tokens: int,
        temperature: float,
    ) -> list[str]:
        """One text per row.

        Args:
            rows: Token ids of the prompts.
            seeds: One per row; None for greedy.
            max_new_tokens: At most so many.
            temperature: Of the sampling.

        Returns:
            The texts, without special tokens.
        """
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        device = self._model.device
        processors = LogitsProcessorList()
        if seeds is not None:
            processors.append(_OwnNoise(seeds, temperature, device))
        with torch.no_grad():
            made = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=processors,
                max_new_tokens=max_new_tokens,
                pad_token_id=self._pad,
                eos_token_id=self._ends,
                disable_compile=True,
                **_ARGMAX,
            )
        texts = [self._until_end(row) for row in made[:, width:].tolist()]
        return self._tokenizer.batch_decode(texts, skip_special_tokens=True)

    def _until_end(self, ids: list[int]) -> list[int]:
        first = next((index for index, token in enumerate(ids) if token in self._ends), len(ids))
        return ids[:first]


_ARGMAX = {
    "do_sample": False,
    # Given so that nothing of the model's own generation settings changes the distribution.
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "num_beams": 1,
}


class _OwnNoise(LogitsProcessor):
    """Adds each row's own Gumbel noise to logits / temperature."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(  # type: ignore[reportIncompatibleMethodOverride] - as the host calls it
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> Any:
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() / self._temperature - noise.log()
