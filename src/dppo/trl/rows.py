"""Rows of the host's batch dictionaries: select, pad, cut to what is needed.

Everything is decided from masks, never from token ids: the pad token may be the end-of-sequence
token.

Suffixes: `_R` rows of a micro-batch, `_B` rows of a rank's generation.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from dppo.packing.spread import PADDING

PROMPT_KEYS = ("prompt_ids", "prompt_mask")
LOG_PROB_KEYS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
COMPLETION_KEYS = (
    *("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio"),
    *LOG_PROB_KEYS,
)
"""Shape (B, C), or (B, 1) for sequence-level ratios: cut on the right."""

UNTRIMMED_KEYS = ("pixel_values", "token_type_ids", "mm_token_type_ids")
"""Whose layout only the host knows: batches with one of these keep their width."""


def select_rows(batch: dict[str, Any], rows_R: NDArray[np.int64]) -> dict[str, Any]:
    """Rows of every row-aligned value of a generation; `PADDING` gives a row without loss tokens.

    Values are row-aligned by the host's own rule: tensors with a dimension, and lists.
    """
    source = np.where(rows_R == PADDING, 0, rows_R)
    index = torch.from_numpy(source)
    picked: dict[str, Any] = {}
    for key, value in batch.items():
        if value is None or (isinstance(value, Tensor) and value.ndim == 0):
            picked[key] = value
        elif isinstance(value, Tensor):
            picked[key] = value[index.to(value.device)]
        else:
            picked[key] = [value[i] for i in source.tolist()]
    return _blank(picked, torch.from_numpy(rows_R == PADDING))


def _blank(batch: dict[str, Any], padding_R: Tensor) -> dict[str, Any]:
    """Take the loss tokens of padding rows away, and every value that could be NaN (0 * NaN)."""
    if not padding_R.any():
        return batch
    for key in ("completion_mask", "advantages", "importance_sampling_ratio", *LOG_PROB_KEYS):
        if batch.get(key) is not None:
            batch[key] = batch[key].clone()
            batch[key][padding_R.to(batch[key].device)] = outside_the_loss(key)
    return batch


def outside_the_loss(key: str) -> float:
    """What the host has under a key where a row has no loss token."""
    return 1.0 if key == "importance_sampling_ratio" else 0.0


def counts(mask_RL: Tensor, shape: tuple[int, ...]) -> dict[str, int]:
    """Tokens and pairs of them of a padded micro-batch, see `packed.PackedModel`.

    Args:
        mask_RL: Real tokens.
        shape: Of what is computed, `mask_RL` and padding rows.
    """
    length_R = mask_RL.sum(dim=1)
    return {
        "real": int(length_R.sum()),
        "computed": shape[0] * shape[1],
        "pairs": int((length_R * (length_R + 1) // 2).sum()),
        "attended": shape[0] * shape[1] ** 2,
    }


def trim(batch: dict[str, Any], *, left: bool, multiple: int | None) -> dict[str, Any]:
    """Cut columns that are padding in every row.

    Args:
        batch: A micro-batch.
        left: Also cut the left padding of the prompts. It shifts positions, so only for models to
            which only distances matter (`shift_invariant`).
        multiple: Widths stay multiples of it.
    """
    if any(batch.get(key) is not None for key in UNTRIMMED_KEYS):
        return batch
    prompt_mask, completion_mask = batch["prompt_mask"], batch["completion_mask"]
    first = 0
    if left:
        width = prompt_mask.shape[1]
        first = width - _round_up(_last_used(prompt_mask.flip(1)), multiple, width)
    last = _round_up(_last_used(completion_mask), multiple, completion_mask.shape[1])
    cut = dict(batch)
    for key in PROMPT_KEYS:
        cut[key] = batch[key][:, first:]
    for key in COMPLETION_KEYS:
        value = batch.get(key)
        if value is not None and value.shape[1] > 1:
            cut[key] = value[:, :last]
    return cut


def shift_invariant(config: PreTrainedConfig) -> bool:
    """Whether padding on the left leaves log-probs alone up to rounding, as rotary embeddings do.

    Learned absolute positions do not, nor do rotary ones whose frequencies follow the length.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return False
    kinds = {r.get("rope_type", "default") for r in rope.values() if isinstance(r, dict)}
    kinds = kinds or {rope.get("rope_type", "default")}
    return kinds <= {"default", "linear", "llama3", "yarn"}


def follows_length(config: PreTrainedConfig) -> bool:
    """Whether rotary frequencies depend on the longest sequence of a call ("dynamic", "longrope").

    A row's log-probs then depend on which rows share its call, and how wide it is.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return False
    kinds = {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    return bool({*kinds, rope.get("rope_type")} & {"dynamic", "longrope"})


def _last_used(mask: Tensor) -> int:
    """One past the last column with a token; at least 1, for a row of no width has no forward."""
    used = mask.any(dim=0).nonzero()
    return max(int(used.max()) + 1 if used.numel() else 0, 1)


def _round_up(width: int, multiple: int | None, most: int) -> int:
    return width if not multiple else min(-(-width // multiple) * multiple, most)
