"""Generates and scores the completions of one model on one benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dppo.errors import ConfigurationError
from dppo.evaluation.benchmarks import Benchmark, Item
from dppo.evaluation.generate import Policy, row_seed
from dppo.evaluation.records import GREEDY, SAMPLED, RecordFile


@dataclass(frozen=True)
class Settings:
    """How completions are made.

    Attributes:
        samples: Sampled completions of each item; 0 for the greedy one alone.
        max_new_tokens: Of a completion.
        temperature: Of the sampling.
        batch_size: Completions generated at a time.
        seed: Of the sampling.
    """

    samples: int
    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int

    @property
    def modes(self) -> tuple[str, ...]:
        """Greedy, and sampled if there are samples."""
        return (GREEDY, SAMPLED) if self.samples else (GREEDY,)


@dataclass(frozen=True)
class _Row:
    """One completion to make; rows of a like length are made together."""

    ids: list[int]
    item: Item
    sample: int


def evaluate_benchmark(
    policy: Policy,
    benchmark: Benchmark,
    settings: Settings,
    *,
    file: RecordFile,
    advance: Callable[[int], None],
) -> None:
    """Makes, scores and writes what is not yet in the file.

    An item whose prompt and `max_new_tokens` do not fit the model's context is skipped, and an
    item that fails is written with its error; neither stops the others.

    Args:
        policy: The model.
        benchmark: The problems.
        settings: How completions are made.
        file: Where records are and go.
        advance: Called with the number of items done, over both modes.

    Raises:
        ConfigurationError: No prompt fits, or conversations meet a model without a chat template.
    """
    items = benchmark.items
    done = 0
    for mode in settings.modes:
        todo = [i for i in items if not file.is_done(mode, i.number, prompt=i.prompt)]
        done += len(items) - len(todo)
        for record in _records(policy, benchmark, settings, mode=mode, todo=todo):
            file.write(record)
            done += 1
            advance(done)


def _records(
    policy: Policy, benchmark: Benchmark, settings: Settings, *, mode: str, todo: list[Item]
) -> Iterator[dict[str, Any]]:
    ready: list[_Row] = []
    too_long = 0
    for item in todo:
        try:
            ids = policy.encode(item.prompt)
        except ConfigurationError:
            raise
        except Exception as error:  # of one item; the others go on
            yield _record(item, mode, error=error)
            continue
        total = len(ids) + settings.max_new_tokens
        if policy.context is not None and total > policy.context:
            too_long += 1
            if too_long == len(benchmark.items):
                raise ConfigurationError(
                    f"no prompt of {benchmark.name} leaves room for {settings.max_new_tokens} new "
                    f"tokens in the model's context of {policy.context}; lower --max-new-tokens"
                )
            text = f"{len(ids)} tokens and {settings.max_new_tokens} new ones exceed the context"
            yield _record(item, mode, skipped=f"{text} of {policy.context}")
            continue
        count = 1 if mode == GREEDY else settings.samples
        ready += [_Row(ids, item, sample) for sample in range(count)]
    ready.sort(key=lambda row: (len(row.ids), row.item.number, row.sample))
    yield from _generated(policy, benchmark, settings, mode=mode, rows=ready)


def _generated(
    policy: Policy, benchmark: Benchmark, settings: Settings, *, mode: str, rows: list[_Row]
) -> Iterator[dict[str, Any]]:
    count = 1 if mode == GREEDY else settings.samples
    made: dict[int, dict[int, str | Exception]] = {}
    for start in range(0, len(rows), settings.batch_size):
        batch = rows[start : start + settings.batch_size]
        outcomes = _complete(policy, batch, settings, mode=mode, benchmark=benchmark.name)
        for row, outcome in zip(batch, outcomes, strict=True):
            made.setdefault(row.item.number, {})[row.sample] = outcome
            if len(made[row.item.number]) == count:
                by_sample = made.pop(row.item.number)
                ordered = [by_sample[sample] for sample in range(count)]
                yield _scored(benchmark, row.item, mode, ordered)


def _complete(
    policy: Policy, batch: Sequence[_Row], settings: Settings, *, mode: str, benchmark: str
) -> list[str | Exception]:
    """A text per row; of a batch that fails, each row is tried alone."""
    seeds = None
    if mode == SAMPLED:
        seeds = [row_seed(settings.seed, benchmark, row.item.number, row.sample) for row in batch]
    try:
        return list(
            policy.complete(
                [row.ids for row in batch],
                seeds=seeds,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
            )
        )
    except Exception as error:
        if len(batch) == 1:
            return [error]
    outcomes: list[str | Exception] = []
    for row in batch:
        outcomes += _complete(policy, [row], settings, mode=mode, benchmark=benchmark)
    return outcomes


def _scored(
    benchmark: Benchmark, item: Item, mode: str, outcomes: Sequence[str | Exception]
) -> dict[str, Any]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    texts = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors:
        return _record(item, mode, completions=texts, error=errors[0])
    try:
        return _record(item, mode, completions=texts, scores=benchmark.score(item, texts))
    except Exception as error:  # of one item; the others go on
        return _record(item, mode, completions=texts, error=error)


def _record(
    item: Item,
    mode: str,
    *,
    completions: Sequence[str] = (),
    scores: Sequence[float | None] = (),
    error: Exception | None = None,
    skipped: str | None = None,
) -> dict[str, Any]:
    record = {
        "item": item.number,
        "prompt": item.prompt,
        "gold": item.columns.get("answer"),
        "mode": mode,
        "completions": list(completions),
        "scores": list(scores),
    }
    if error is not None:
        record["error"] = f"{type(error).__name__}: {error}"
    if skipped is not None:
        record["skipped"] = skipped
    return record
