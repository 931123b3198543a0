"""Rows of a file or of the hub: columns under the names that trainers use, and held-out ones."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dppo.errors import ConfigurationError

if TYPE_CHECKING:
    from datasets import Dataset

_LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        train: To train on.
        held_out: For the evaluations; None if they are off. Shares no prompt with `train`.
    """

    train: Dataset
    held_out: Dataset | None


def load_rows(name: str) -> Dataset:
    """Loads a file or the training split of a hub data set.

    Args:
        name: A path ending in .parquet, .json, .jsonl or .csv, or a name on the hub.

    Returns:
        The rows.

    Raises:
        ConfigurationError: If the file does not exist.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    loader = _LOADERS.get(Path(name).suffix)
    if loader is None:
        return load_dataset(name, split="train")
    if not Path(name).is_file():
        raise ConfigurationError(f"dataset: there is no file {name}")
    try:
        return load_dataset(loader, data_files=name, split="train")
    except (ValueError, DatasetGenerationError) as error:
        raise ConfigurationError(f"dataset: {name} cannot be read: {error}") from error


def with_column(rows: Dataset, column: str, role: str) -> Dataset:
    """Renames a column to `prompt` or `answer`, where trainers and rewards look for it.

    Args:
        rows: The data set.
        column: The column that holds it.
        role: The new name.

    Returns:
        The data set with a column `role`; a former one of that name is left out.

    Raises:
        ConfigurationError: If there is no such column; lists those there are.
    """
    if column not in rows.column_names:
        raise ConfigurationError(
            f"the data set has no column {column!r}; it has {', '.join(rows.column_names)}. "
            f"Name the one with the {role}s: --{role}-column NAME"
        )
    if column == role:
        return rows
    if role in rows.column_names:
        rows = rows.remove_columns(role)
    return rows.rename_column(column, role)


def hold_out(rows: Dataset, count: int, *, seed: int) -> Prompts:
    """Draws prompts for evaluation; a prompt that occurs twice never lands on both sides.

    Args:
        rows: The data set.
        count: How many distinct prompts to hold out.
        seed: Of the draw.

    Returns:
        The two sets, in the order of `rows`.

    Raises:
        ConfigurationError: If the data set has too few prompts for that.
    """
    if count == 0:
        return Prompts(rows, None)
    first_row: dict[str, int] = {}
    keys = [json.dumps(prompt, sort_keys=True, default=str) for prompt in rows["prompt"]]
    for index, key in enumerate(keys):
        first_row.setdefault(key, index)
    if len(first_row) <= count:
        raise ConfigurationError(
            f"the data set has {len(first_row)} different prompts, too few to hold out {count} for "
            "evaluation; lower --eval-prompts, or switch the evaluation off with --eval-prompts 0"
        )
    chosen = set(random.Random(seed).sample(sorted(first_row), count))
    train = [index for index, key in enumerate(keys) if key not in chosen]
    held_out = sorted(first_row[key] for key in chosen)
    return Prompts(rows.select(train), rows.select(held_out))
