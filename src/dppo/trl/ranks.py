"""Several processes: rows moved to the ranks that run them, and failures that all ranks share.

Only token rows and their log-probs move. Gradients and weights go through the host, which may have
sharded them. Every function here is a collective: all ranks call it, or none.

Suffixes: `_W` ranks, `_B` rows of the rank that rolled them out, `_H` rows that a rank runs.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from dppo.errors import HostDriftError, RankError
from dppo.trl import rows as row_keys

Ints = NDArray[np.int64]


class Exchange:
    """Which rows of a generation each rank runs, and how they get there and back.

    Args:
        held_W: Global rows that each rank runs, in global order. A rank with none holds a row of
            its own all the same, to fill up with.
        rank: This one.
        rows: Rows that a rank rolls out, B.
    """

    def __init__(self, held_W: Sequence[Ints], *, rank: int, rows: int) -> None:
        self._here, self._idle = rows, not held_W[rank].size
        self.rows = np.array([rank * rows]) if self._idle else held_W[rank]
        """Shape (H,). Global rows, in global order, which is that of the ranks they come from."""
        self._given = [held[held // rows == rank] - rank * rows for held in held_W]
        self._taken = np.bincount(held_W[rank] // rows, minlength=len(held_W)).tolist()

    def there(self, values_B: Tensor) -> Tensor:
        """Rows from the ranks that rolled them out, shape (H, ...)."""
        came = _all_to_all(values_B[self._give(values_B)], self._gives, self._taken)
        return values_B[:1] if self._idle else came

    def back(self, values_H: Tensor, *, missing: float) -> Tensor:
        """Rows to the ranks that rolled them out, shape (B, ...); `missing` where nobody ran it."""
        sent = values_H[:0] if self._idle else values_H
        came = _all_to_all(sent, self._taken, self._gives)
        home = came.new_full((self._here, *came.shape[1:]), missing)
        home[self._give(came)] = came
        return home

    @property
    def _gives(self) -> list[int]:
        return [len(part) for part in self._given]

    def _give(self, values: Tensor) -> Tensor:
        return torch.from_numpy(np.concatenate(self._given)).to(values.device)


def places(held: Ints, rows_R: Ints) -> Ints:
    """Where global rows lie among those that are held, in global order; `PADDING` stays.

    Raises:
        HostDriftError: A row is not held.
    """
    real = rows_R != row_keys.PADDING
    place_R = np.minimum(np.searchsorted(held, rows_R), held.size - 1)
    if (held[place_R] != rows_R)[real].any():
        raise HostDriftError(
            f"rows {rows_R[real].tolist()} are to be trained on, but rows {held.tolist()} are at "
            "hand; the generation was made by another trainer, or with other batch sizes"
        )
    return np.where(real, place_R, row_keys.PADDING)


def _all_to_all(values: Tensor, gives: list[int], takes: list[int]) -> Tensor:
    sent = values.contiguous()
    flat = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
    result = flat.new_empty((sum(takes), *flat.shape[1:]))
    torch.distributed.all_to_all_single(result, flat, takes, gives)
    return result.view(torch.bool) if sent.dtype == torch.bool else result


def agree(accelerator: Any, value: int, what: str) -> None:
    """Stop all ranks if they have not decided alike.

    Raises:
        RankError: On every rank; names the ranks.
    """
    mine = torch.tensor([value], dtype=torch.int64, device=accelerator.device)
    found_W = accelerator.gather(mine).tolist()
    if len(set(found_W)) > 1:
        raise RankError(
            f"ranks do not agree on {what}: {_who(found_W)}. They must run the same code and "
            "configuration on the same data; nothing of this generation was trained on"
        )


def _who(values_W: list[int]) -> str:
    return "; ".join(
        f"ranks {[w for w, v in enumerate(values_W) if v == value]} have {value:x}"
        for value in sorted(set(values_W))
    )


def share_failure(accelerator: Any, error: Exception | None) -> None:
    """Raise on every rank what was raised on any.

    Raises:
        RankError: Another rank failed; the message is that rank's. A rank that failed itself
            raises its own error.
    """
    failed = torch.tensor([error is not None], device=accelerator.device)
    if not accelerator.gather(failed).any():
        return
    told_W = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    rank, message = next((rank, told) for rank, told in enumerate(told_W) if told is not None)
    raise RankError(f"rank {rank} failed, so all stop: {message}")


def moved(
    batch: dict[str, Any], exchange: Exchange, accelerator: Any, *, digest: int
) -> dict[str, Any]:
    """The rows of a generation that this rank runs, from whichever rank rolled them out.

    Args:
        batch: The host's, of this rank; tensors with a dimension are row-aligned.
        exchange: Who runs what.
        accelerator: Of the run.
        digest: Of the decision; ranks that differ in it do not train.

    Raises:
        RankError: Ranks have decided differently, or hold different things; on all of them.
        HostDriftError: There is something that cannot be moved.
    """
    aligned = {k: v for k, v in sorted(batch.items()) if isinstance(v, Tensor) and v.ndim}
    lists = sorted(key for key, value in batch.items() if isinstance(value, list | tuple))
    agree(accelerator, digest, "which completions to train on")
    kinds = [f"{key}:{value.dtype}:{value.ndim}" for key, value in aligned.items()]
    agree(accelerator, zlib.crc32("\n".join([*kinds, *lists]).encode()), "what a row consists of")
    if lists:
        raise HostDriftError(
            f"the host's batch has {', '.join(lists)} as lists, which cannot be moved between "
            "ranks; set completion_keep=1.0 and packing='none', and report this"
        )
    wide = [key for key, value in aligned.items() if value.ndim == 2]
    mine = torch.tensor([[aligned[key].shape[1] for key in wide]], device=accelerator.device)
    most = dict(zip(wide, accelerator.gather(mine).max(dim=0).values.tolist(), strict=True))
    return {
        **batch,
        **{key: exchange.there(_as_wide(key, v, most.get(key))) for key, v in aligned.items()},
    }


def _as_wide(key: str, values: Tensor, width: int | None) -> Tensor:
    """Padded as the host would, had it known the rows of all ranks."""
    if width is None or values.shape[1] == width:
        return values
    more = width - values.shape[1]
    sides = (more, 0) if key in row_keys.PROMPT_KEYS else (0, more)
    return torch.nn.functional.pad(values, sides, value=row_keys.outside_the_loss(key))
