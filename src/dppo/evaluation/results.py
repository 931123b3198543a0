"""From records to numbers and a table, models side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dppo.evaluation.estimate import Estimate, over_benchmarks, over_items, pass_at_k
from dppo.evaluation.records import GREEDY, SAMPLED

Numbers = dict[str, dict[str, Any]]
_FULL_MARKS = 1 - 1e-9


def measure(
    records: Mapping[tuple[str, int], Mapping[str, Any]], items: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """The numbers of one model on one benchmark.

    A completion is correct if its score is 1. An item is left out of a mean if it failed, was
    skipped, or has too few completions with a score.

    Args:
        records: By mode and item.
        items: The items to count.
        ks: The k of pass@k of sampled completions.

    Returns:
        `measures`, by name; how many items there are, and how many were left out and why.
    """
    greedy = [records.get((GREEDY, item), {}) for item in items]
    sampled = [records.get((SAMPLED, item), {}) for item in items]
    measures = {"greedy pass@1": over_items([_passed(record, 1) for record in greedy])}
    for k in ks:
        measures[f"pass@{k}"] = over_items([_passed(record, k) for record in sampled])
    seen = [*greedy, *(sampled if ks else [])]
    return {
        "items": len(items),
        "measures": measures,
        "failed": sum("error" in record for record in seen),
        "skipped": sum("skipped" in record for record in seen),
        "unscored": sum(None in record.get("scores", ()) for record in seen),
    }


def _passed(record: Mapping[str, Any], k: int) -> float | None:
    if "error" in record or "skipped" in record:
        return None
    scores = [score for score in record.get("scores", ()) if score is not None]
    if len(scores) < k:
        return None
    return pass_at_k(len(scores), sum(score >= _FULL_MARKS for score in scores), k)


def means(of_model: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    """The mean over benchmarks of each measure.

    Args:
        of_model: By benchmark, what `measure` returned.
    """
    names = next(iter(of_model.values()))["measures"]
    return {
        name: over_benchmarks([one["measures"][name] for one in of_model.values()])
        for name in names
    }


def as_json(numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """All numbers, for eval.json.

    Args:
        numbers: By model and benchmark, what `measure` returned.
    """
    return {
        model: {
            "benchmarks": {
                name: {**one, "measures": _plain(one["measures"])} for name, one in of_model.items()
            },
            "mean": _plain(means(of_model)),
        }
        for model, of_model in numbers.items()
    }


def _plain(measures: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(estimate) for name, estimate in measures.items()}


def table(numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The lines to print: benchmarks down, measures and models across.

    Args:
        numbers: By model and benchmark, what `measure` returned.

    Returns:
        One block for each measure, with a column for each model.
    """
    first = next(iter(numbers.values()))
    benchmarks = list(first)
    averages = {model: means(of_model) for model, of_model in numbers.items()}
    lines = []
    for name in next(iter(averages.values())):
        rows = [[name, *numbers]]
        for benchmark in benchmarks:
            found = [of_model[benchmark]["measures"][name] for of_model in numbers.values()]
            rows.append([benchmark, *map(_cell, found)])
        if len(benchmarks) > 1:
            rows.append(["mean", *(_cell(average[name]) for average in averages.values())])
        lines += [*_aligned(rows), ""]
    return [*lines, *_notes(numbers)]


def _cell(estimate: Estimate) -> str:
    if math.isnan(estimate.mean):
        return "-"
    error = "" if math.isnan(estimate.standard_error) else f" ± {estimate.standard_error:.1%}"
    return f"{estimate.mean:.1%}{error}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _notes(numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    notes = []
    for model, of_model in numbers.items():
        for benchmark, one in of_model.items():
            reasons = [f"{one[why]} {why}" for why in ("failed", "skipped", "unscored") if one[why]]
            if reasons:
                notes.append(f"{model} on {benchmark}: {', '.join(reasons)}; left out of the means")
    return notes
