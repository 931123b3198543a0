"""The update: frozen advantages put back, and rows handed to verl's workers step by step.

Suffix: `_B` rows of a batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from dppo.packing.spread import PADDING
from dppo.verl import rows
from dppo.verl.loss import FACTOR, KEPT
from dppo.verl.plan import Layout


class Updating:
    """The workers, told how the rows lie when they update.

    Args:
        group: verl's.
        laid: The rows.
    """

    def __init__(self, group: Any, laid: Layout) -> None:
        self._group, self._laid = group, laid

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """One pass over the list: its mini-batches are the optimizer steps, in order."""
        batch.extra_info.update(
            mini_batch_size=self._laid.step_rows,
            global_batch_size=self._laid.step_rows,
            epochs=1,
            dataloader_kwargs={"shuffle": False},
        )
        return self._group.update_actor(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def with_advantages(
    batch: KVBatchMeta, advantages_N: NDArray[np.float64], place_of: Mapping[str, int]
) -> KVBatchMeta:
    """Put the advantages of the full batch in place of those that verl made of survivors.

    Args:
        batch: Survivors and padding.
        advantages_N: Of all completions.
        place_of: Place of a survivor among them, by key.
    """
    known = [place_of.get(key) for key in batch.keys]
    value_B = np.array([0.0 if place is None else advantages_N[place] for place in known])
    mask = _mask(batch)
    values = _per_token(mask, value_B).values() * mask.values()
    advantages = torch.nested.nested_tensor_from_jagged(values, mask.offsets())
    return _put(batch, advantages=advantages, returns=advantages.clone())


def laid_out(batch: KVBatchMeta, laid: Layout, place_of: Mapping[str, int]) -> KVBatchMeta:
    """The rows of all optimizer steps with their factors, as `Layout` has them.

    A row that several steps train on, and padding that has run out, is copied: keys are unique.

    Args:
        batch: Survivors, and at least one row of padding.
        laid: Where they go.
        place_of: Place of a survivor among all completions, by key.
    """
    row_of = {place_of[key]: row for row, key in enumerate(batch.keys) if key in place_of}
    padding = [row for row, key in enumerate(batch.keys) if key not in place_of]
    spare, used = iter(padding), set[int]()
    order, again = [], []
    for place in laid.rows.tolist():
        row = next(spare, padding[0]) if place == PADDING else row_of[place]
        if row in used:
            again.append(row)
            row = len(batch) + len(again) - 1
        used.add(row)
        order.append(row)
    unused = [batch.keys[row] for row in padding if row not in used]
    pool = rows.joined([batch, rows.copied(batch, again, is_padding=True)]) if again else batch
    chosen = pool.select_keys([pool.keys[row] for row in order])
    if unused:
        tq.kv_clear(keys=unused, partition_id=batch.partition_id)
    mask = _mask(chosen)
    result = _put(
        chosen, **{FACTOR: _per_token(mask, laid.factor), KEPT: _per_token(mask, laid.kept)}
    )
    result.extra_info = batch.extra_info
    return result


def _mask(batch: KVBatchMeta) -> Tensor:
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    return data["response_mask"]


def _put(batch: KVBatchMeta, **fields: Tensor) -> KVBatchMeta:
    """Verl's workers see the fields that the latest put returned."""
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(fields, batch_size=len(batch)),
    )


def _per_token(like: Tensor, value_B: NDArray[Any]) -> Tensor:
    """Jagged, the value of each row on every token of it."""
    offsets = like.offsets()
    values = torch.repeat_interleave(torch.from_numpy(value_B).float(), offsets.diff())
    return torch.nested.nested_tensor_from_jagged(values, offsets)
