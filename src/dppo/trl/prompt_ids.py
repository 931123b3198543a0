"""By what a prompt's visits are remembered: a column of the data set, or a hash of the prompt.

Suffixes: `_N` all prompts of a data set.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from dppo.errors import ConfigurationError
from dppo.estimator.history import MOST_ID

Ids = NDArray[np.int64]

CHUNK = 1000
"""Rows read at once."""

COMPARED = 10_000
"""Prompts that tell one data set from another, evenly spaced."""


def content_id(prompt: Any) -> int:
    """63-bit hash of a text or a conversation; the same in every process."""
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=list)  # arrays, too
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MOST_ID


def row_id(row: Mapping[str, Any], column: str | None) -> int:
    """Id of the prompt of a row.

    Raises:
        ConfigurationError: The column is missing, or holds neither a whole number nor a text.
    """
    name = "prompt" if column is None else column
    if name not in row:
        asked = "the column 'prompt'" if column is None else f"prompt_id_column={column!r}"
        raise ConfigurationError(
            f"{asked} is none of the columns {', '.join(map(repr, row))}; rename a column, or give "
            "another"
        )
    if column is None:
        return content_id(row[name])
    value = row[column]
    value = value.item() if hasattr(value, "item") else value  # of a formatted data set
    if isinstance(value, str):
        return content_id(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_ID:
        raise ConfigurationError(
            f"prompt_id_column={column!r} must hold texts or whole numbers from 0 to 2^63 - 1, "
            f"got {value!r}"
        )
    return value


def dataset_ids(dataset: Dataset, column: str | None) -> Ids:
    """Ids of all prompts, shape (N,)."""
    name = "prompt" if column is None else column
    ids: list[int] = []
    one = dataset.select_columns([name]).with_format(None)
    for start in range(0, len(one), CHUNK):
        ids += [row_id({name: value}, column) for value in one[start : start + CHUNK][name]]
    return np.array(ids, dtype=np.int64)


def dataset_digest(dataset: Dataset) -> str:
    """What tells this data set from another: number of rows, columns and prompts."""
    count = len(dataset)
    place = np.unique(np.linspace(0, max(count - 1, 0), min(count, COMPARED)).astype(np.int64))
    ids: Ids = np.empty(0, dtype=np.int64)
    if "prompt" in dataset.column_names and count:
        ids = dataset_ids(dataset.select(place.tolist()), None)
    digest = blake2b(ids.astype("<i8").tobytes(), digest_size=8)
    digest.update(json.dumps(sorted(dataset.column_names)).encode())
    return f"{count} rows, {digest.hexdigest()}"


def believed_rates(dataset: Dataset, column: str) -> NDArray[np.float64]:
    """Solve rates believed of all prompts, shape (N,).

    Raises:
        ConfigurationError: The column holds something else than rates.
    """
    return np.array([believed_rate(value, column) for value in dataset.with_format(None)[column]])


def believed_rate(value: Any, column: str) -> float:
    """A solve rate, checked."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ConfigurationError(
            f"prompt_prior_column={column!r} must hold solve rates from 0 to 1, got {value!r}"
        )
    return float(value)
