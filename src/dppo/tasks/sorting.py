"""The built-in verifiable task: write the digits of a prompt in ascending order.

A prompt is 3 to 16 decimal digits followed by ``=``; the one right answer is the same digits,
sorted. Longer prompts are harder, because every digit of the answer must be right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo._checks import natural, one_of
from dppo.errors import InvalidInputError

if TYPE_CHECKING:
    from datasets import Dataset

MIN_DIGITS = 3
MAX_DIGITS = 16
_SPLITS = ("train", "test")
_TEST_SHARE = 8  # one prompt in 8 is held out


def sorting_dataset(size: int, *, seed: int, split: str = "train") -> Dataset:
    """Draw distinct sorting prompts with their answers.

    The number of digits is uniform on 3 to 16, except that short strings, of which few exist,
    become rarer once a large dataset has used them up. A hash of the digits, and nothing else,
    decides the split of a prompt, so that no train prompt is ever a test prompt, whatever the
    sizes and seeds.

    Args:
        size: Number of rows, at least 1.
        seed: Seed of the draw, at least 0. The same arguments give the same rows in the same
            order; a larger ``size`` appends rows.
        split: ``"train"`` (7/8 of all prompts) or ``"test"`` (the other 1/8).

    Returns:
        A ``datasets.Dataset`` of ``size`` rows with the string columns ``prompt``, such as
        ``"3141="``, and ``answer``, such as ``"1134"``. No prompt occurs twice.

    Raises:
        InvalidInputError: If ``size`` is not an integer of at least 1, ``seed`` is not an
            integer of at least 0, or ``split`` is neither ``"train"`` nor ``"test"``.

    Example:
        >>> from dppo.tasks import sorting_dataset
        >>> rows = sorting_dataset(100, seed=0, split="test")
        >>> rows.column_names
        ['prompt', 'answer']
        >>> rows[0]["answer"] == "".join(sorted(rows[0]["prompt"].rstrip("=")))
        True
    """
    if natural("size", size) == 0:
        raise InvalidInputError("size must be at least 1, got 0")
    generator = np.random.default_rng(natural("seed", seed))
    one_of("split", split, _SPLITS)

    # Imported here because importing dppo.tasks must stay cheap.
    from datasets import Dataset  # noqa: PLC0415

    digits: dict[str, None] = {}  # a set that keeps the order of the draw
    for candidate in _random_digit_strings(generator):
        if _split_of(candidate) == split:
            digits[candidate] = None
            if len(digits) == size:
                break
    return Dataset.from_dict(
        {
            "prompt": [f"{text}=" for text in digits],
            "answer": ["".join(sorted(text)) for text in digits],
        }
    )


def sorting_reward(
    completions: Sequence[str] | Sequence[Sequence[dict[str, Any]]],
    answer: Sequence[str],
    **kwargs: Any,
) -> list[float]:
    """Score completions of the sorting task: 1.0 if exactly right, else 0.0.

    The signature is the one TRL's trainers expect of a reward function: they pass every column
    of the dataset by name, already repeated so that it lines up with the completions.

    Args:
        completions: One entry per completion: its text, or, for a conversational dataset, its
            list of messages ``{"role": ..., "content": ...}``, of which the last one counts.
        answer: The right answers, one per completion.
        **kwargs: What else TRL passes (``prompts``, ``completion_ids``, ...); ignored.

    Returns:
        One reward per completion, 1.0 if its text without surrounding white space equals the
        answer and 0.0 if not.

    Raises:
        InvalidInputError: If the two lengths differ, or a completion is neither a string nor a
            non-empty list of messages whose last one has a string ``content``.

    Example:
        >>> from dppo.tasks import sorting_reward
        >>> sorting_reward(["1134", "1143"], ["1134", "1134"])
        [1.0, 0.0]
        >>> sorting_reward([[{"role": "assistant", "content": "1134"}]], ["1134"])
        [1.0]
    """
    if len(completions) != len(answer):
        raise InvalidInputError(
            f"completions and answer must have equal length, got {len(completions)} "
            f"and {len(answer)}"
        )
    return [
        float(_completion_text(completion).strip() == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def _random_digit_strings(generator: np.random.Generator) -> Iterator[str]:
    """Yield digit strings without end, their lengths uniform on MIN_DIGITS to MAX_DIGITS."""
    block = 1024  # one call of the generator per string would dominate the running time
    while True:
        lengths = generator.integers(MIN_DIGITS, MAX_DIGITS + 1, size=block)
        digits = generator.integers(0, 10, size=(block, MAX_DIGITS), dtype=np.uint8)
        for length, row in zip(lengths.tolist(), digits + ord("0"), strict=True):
            yield row[:length].tobytes().decode("ascii")


def _split_of(digits: str) -> str:
    """Return the split of a digit string: a stable hash, not Python's salted ``hash``."""
    digest = hashlib.blake2b(digits.encode("ascii"), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _TEST_SHARE == 0 else "train"


def _completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    text = completion[-1].get("content") if completion else None
    if not isinstance(text, str):
        raise InvalidInputError(
            "a completion must be a string or a non-empty list of messages whose last one has "
            f"a string content, got {completion!r}"
        )
    return text
