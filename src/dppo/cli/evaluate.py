"""Mean reward on held-out prompts: one sampled completion each, at the training temperature."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from dppo._rewards import callable_name
from dppo.cli.rewards import Reward
from dppo.errors import InvalidInputError

if TYPE_CHECKING:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


@dataclass(frozen=True)
class Evaluation:
    """A mean reward and how well it is known.

    Attributes:
        mean: Over the scored completions.
        standard_error: Sample standard deviation (ddof 1) over the square root of `count`.
        count: Completions that got a score.
        unscored: Completions without any.
    """

    mean: float
    standard_error: float
    count: int
    unscored: int


def evaluate(
    trainer: GRPOTrainer,
    rows: Dataset,
    *,
    rewards: Sequence[Reward],
    seed: int,
    advance: Callable[[int], None],
) -> Evaluation:
    """Samples and scores one completion for every row; leaves the random state as it was.

    Args:
        trainer: Its model, tokenizer and sampling settings are used. With several processes each
            does its share of the rows.
        rows: The held-out prompts, with the columns that the rewards need.
        rewards: The reward functions; summed with the trainer's `reward_weights`.
        seed: Of the sampling.
        advance: Called with the number of rows done by this process.

    Returns:
        The evaluation of all rows.
    """
    from accelerate.utils import gather_object

    accelerator, arguments = trainer.accelerator, _arguments(trainer)
    model = accelerator.unwrap_model(trainer.model)
    mine = rows.shard(accelerator.num_processes, accelerator.process_index)
    size = arguments.generation_batch_size // accelerator.num_processes  # as many as a rollout
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    scores: list[float | None] = []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed + accelerator.process_index)
            for start in range(0, len(mine), size):
                batch = mine.select(range(start, min(start + size, len(mine)))).to_list()
                scores += _score(trainer, batch, _sample(trainer, model, batch), rewards)
                advance(len(scores))
    finally:
        model.train(was_training)
    return summarise(gather_object(scores))


def summarise(scores: Sequence[float | None]) -> Evaluation:
    """Mean and standard error of the scores there are.

    Example:
        >>> summarise([0.0, 1.0, None]).mean
        0.5
    """
    values = [score for score in scores if score is not None]
    count = len(values)
    if count == 0:
        return Evaluation(math.nan, math.nan, 0, len(scores))
    mean = sum(values) / count
    squares = sum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan
    return Evaluation(mean, error, count, len(scores) - count)


def total_rewards(
    per_function: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> list[float | None]:
    """Weighted sum over the functions; None where no function gave a score.

    Example:
        >>> total_rewards([[1.0, None], [0.0, None]], [0.7, 0.3])
        [0.7, None]
    """
    totals: list[float | None] = []
    for scores in zip(*per_function, strict=True):
        parts = [
            weight * float(score)
            for weight, score in zip(weights, scores, strict=True)
            if score is not None and not math.isnan(score)
        ]
        totals.append(sum(parts) if parts else None)
    return totals


def _sample(trainer: GRPOTrainer, model: Any, batch: list[dict[str, Any]]) -> list[list[int]]:
    """Token ids of one completion per row, up to and including the end of sequence."""
    tokenizer = _tokenizer(trainer)
    settings = _sampling_settings(trainer, model, tokenizer)
    conversational = not isinstance(batch[0]["prompt"], str)
    texts = [row["prompt"] for row in batch]
    if conversational:
        texts = [
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=getattr(trainer, "chat_template", None),
                **_mapping(_arguments(trainer).chat_template_kwargs),
            )
            for messages in texts
        ]
    inputs = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not conversational,
    ).to(model.device)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    generated = model.generate(input_ids=ids, attention_mask=mask, **settings)
    ends = set(settings["eos_token_id"])
    return [_until_end(row, ends) for row in generated[:, ids.shape[1] :].tolist()]


def _sampling_settings(trainer: GRPOTrainer, model: Any, tokenizer: Any) -> dict[str, Any]:
    """As TRL samples in training. Given to `generate` one by one, so that none is overruled."""
    arguments = _arguments(trainer)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {
        "max_new_tokens": arguments.max_completion_length,
        "do_sample": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": sorted({*ends, tokenizer.eos_token_id} - {None}),
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "disable_compile": True,
        **_mapping(arguments.generation_kwargs),
    }


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def _score(
    trainer: GRPOTrainer,
    batch: list[dict[str, Any]],
    ids: list[list[int]],
    rewards: Sequence[Reward],
) -> list[float | None]:
    prompts = [row["prompt"] for row in batch]
    completions: list[Any] = _tokenizer(trainer).batch_decode(ids, skip_special_tokens=True)
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns = set(batch[0]) - {"prompt", "completion", "completion_ids"}
    given = {name: [row[name] for row in batch] for name in columns}
    given |= {"prompts": prompts, "completions": completions, "completion_ids": ids}
    given |= {"trainer_state": trainer.state, "log_extra": _no_log, "log_metric": _no_log}
    per_function = []
    for reward in rewards:
        scores = reward(**given)
        scores = list(asyncio.run(scores) if inspect.iscoroutine(scores) else scores)
        if len(scores) != len(batch):
            raise InvalidInputError(
                f"reward {callable_name(reward)} returned {len(scores)} values for {len(batch)} "
                "completions"
            )
        per_function.append(scores)
    return total_rewards(per_function, _arguments(trainer).reward_weights or [1.0] * len(rewards))


def _tokenizer(trainer: GRPOTrainer) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _arguments(trainer: GRPOTrainer) -> GRPOConfig:
    return cast("GRPOConfig", trainer.args)


def _mapping(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """The config class has turned text into a dictionary by now."""
    return value if isinstance(value, dict) else {}


def _no_log(*_: Any, **__: Any) -> None:
    """Stands in for the trainer's logging functions, so that an evaluation logs nothing."""
