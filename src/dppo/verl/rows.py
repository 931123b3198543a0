"""Rows of verl's TransferQueue: read what is decided from, copy rows, add rows that weigh nothing.

A key is `{uid}_{session}_{index}`: the prompt as submitted, the completion of it, and the output of
the agent loop.
"""

import copy
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import (
    SYNTHETIC_PADDING_SEQ_LEN,
    construct_minimal_padding_template,
)
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from dppo.errors import HostDriftError


def places(batch: KVBatchMeta, prompts: Sequence[str], group: int) -> NDArray[np.int64]:
    """Flat index into (P, G) of every row of a batch.

    Args:
        batch: What was rolled out.
        prompts: The uids that were submitted, in order.
        group: Completions of a prompt.

    Raises:
        HostDriftError: A row is of no prompt that was submitted, or is one of several of a session.
    """
    of_uid = {uid: number for number, uid in enumerate(prompts)}
    found = np.empty(len(batch), dtype=np.int64)
    for row, key in enumerate(batch.keys):
        uid, session, index = key.rsplit("_", 2)
        if uid not in of_uid:
            raise HostDriftError(f"row {key} belongs to no prompt that was submitted in this step")
        if int(index) or int(session) >= group:
            raise HostDriftError(
                f"row {key} is one of several outputs of a session, or beyond the {group}: "
                "which share an advantage is not known; set trainer.v1.trainer_mode=sync"
            )
        found[row] = of_uid[uid] * group + int(session)
    return found


def copied(batch: KVBatchMeta, sources: Sequence[int], **tags: Any) -> KVBatchMeta:
    """New rows with all that some rows of the batch hold, keys of their own, and these tags."""
    keys = [f"{batch.keys[source]}-{uuid.uuid4().hex}_0_0" for source in sources]
    if not keys:
        return batch.select_keys([])
    rows = [batch.keys[source] for source in sources]
    distinct = sorted(set(rows), key=rows.index)
    held = tq.kv_batch_get(keys=distinct, partition_id=batch.partition_id)
    of_key = {key: held[number] for number, key in enumerate(distinct)}
    samples = [{name: of_key[row][name] for name in of_key[row].keys()} for row in rows]  # noqa: SIM118 - a TensorDict
    given = [{**copy.deepcopy(batch.tags[source]), **tags} for source in sources]
    tq.kv_batch_put(
        keys=keys,
        partition_id=batch.partition_id,
        fields=list_of_dict_to_tensordict(samples),
        tags=given,
    )
    return KVBatchMeta(
        keys=keys,
        tags=given,
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def with_padding(batch: KVBatchMeta, count: int, *, eos: int) -> KVBatchMeta:
    """The batch and `count` rows of two tokens and no loss after it."""
    if not count:
        return batch
    source = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)[0]
    template, tag = construct_minimal_padding_template(source, batch.tags[0], eos)
    sample = {name: _shortened(value) for name, value in template.items()}
    uid = f"pad{uuid.uuid4().hex}"
    sample["uid"] = uid
    tag |= {"prompt_len": 1, "response_len": 1, "seq_len": 2}
    keys = [f"{uid}_{number}_0" for number in range(count)]
    tags = [copy.deepcopy(tag) for _ in keys]
    tq.kv_batch_put(
        keys=keys,
        partition_id=batch.partition_id,
        fields=list_of_dict_to_tensordict([copy.deepcopy(sample) for _ in keys]),
        tags=tags,
    )
    return joined([batch, _meta(batch, keys, tags)])


def _shortened(value: Any) -> Any:
    """Verl's padding is of 128 tokens; the last of its prompt and the one of its response do."""
    long = SYNTHETIC_PADDING_SEQ_LEN
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    for length, kept in ((long, 2), (long - 1, 1)):
        for axis in (0, value.dim() - 1):
            if value.shape[axis] == length:
                return value.narrow(axis, 0, kept).clone()
    return value


def joined(parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """Rows of several metas, in order."""
    keys = [key for part in parts for key in part.keys]
    return _meta(parts[0], keys, [tag for part in parts for tag in part.tags])


def _meta(like: KVBatchMeta, keys: list[str], tags: list[dict[str, Any]]) -> KVBatchMeta:
    return KVBatchMeta(
        keys=keys,
        tags=tags,
        partition_id=like.partition_id,
        fields=like.fields,
        extra_info=like.extra_info,
    )
