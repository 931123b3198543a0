"""The old and reference passes, given survivors only.

Suffixes: `_R` rows of a micro-batch, `_B` rows of a rank's generation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dppo.trl import rows


def score_kept(
    score: Callable[[Tensor, Tensor, int], Tensor],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    bins: Sequence[NDArray[np.int64]],
    trim: Callable[[dict[str, Any]], dict[str, Any]],
) -> Tensor:
    """Log-probs of the rows in `bins`, NaN in every other row.

    For NaN the host takes the sampling ratio for 1 and leaves the row out of its averages.

    Args:
        score: (input ids, attention mask, completion width) -> log-probs, the host's forward pass.
        input_ids: Shape (B, P + C), prompts left-padded, completions right-padded.
        attention_mask: Shape (B, P + C).
        logits_to_keep: C.
        bins: Rows to score together, `PADDING` among them where ranks need equal shapes.
        trim: Cuts the columns that are padding in all rows of a bin.

    Returns:
        Shape (B, C); 0 where a scored row has padding.
    """
    split = input_ids.shape[1] - logits_to_keep
    batch = {
        "prompt_ids": input_ids[:, :split],
        "prompt_mask": attention_mask[:, :split],
        "completion_ids": input_ids[:, split:],
        "completion_mask": attention_mask[:, split:],
    }
    result = torch.full(batch["completion_ids"].shape, torch.nan, device=input_ids.device)
    for rows_R in bins:
        part = trim(rows.select_rows(batch, rows_R))
        width = part["completion_ids"].shape[1]
        log_probs = score(
            torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1),
            torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1),
            width,
        )
        real = torch.from_numpy(rows_R != rows.PADDING)
        kept = torch.from_numpy(rows_R)[real].to(result.device)
        result[kept] = 0.0
        result[kept, :width] = log_probs[real.to(log_probs.device)].to(result)
    return result
