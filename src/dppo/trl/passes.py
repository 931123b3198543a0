"""The old and reference passes, given survivors only.

Suffixes: `_R` rows of a micro-batch, `_B` rows of a rank's generation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from dppo.trl import rows


def score_kept(
    score: Callable[[Tensor, Tensor, int], Tensor],
    batch: dict[str, Any],
    *,
    bins: Sequence[NDArray[np.int64]],
    trim: Callable[[dict[str, Any]], dict[str, Any]],
) -> Tensor:
    """Log-probs of the rows in `bins`, NaN in every other row.

    For NaN the host takes the sampling ratio for 1 and leaves the row out of its averages.

    Args:
        score: (input ids, attention mask, completion width) -> log-probs, the host's forward pass.
        batch: As `split` returns it.
        bins: Rows to score together, `PADDING` among them where ranks need equal shapes.
        trim: Cuts the columns that are padding in all rows of a bin.

    Returns:
        Shape (B, C); 0 where a scored row has padding.
    """
    completion_ids = batch["completion_ids"]
    result = torch.full(completion_ids.shape, torch.nan, device=completion_ids.device)
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


def split(input_ids: Tensor, attention_mask: Tensor, completion: int) -> dict[str, Tensor]:
    """Prompts, left-padded, and completions, right-padded, of rows of both.

    Args:
        input_ids: Shape (B, P + C).
        attention_mask: Shape (B, P + C).
        completion: C.
    """
    prompt = input_ids.shape[1] - completion
    return {
        "prompt_ids": input_ids[:, :prompt],
        "prompt_mask": attention_mask[:, :prompt],
        "completion_ids": input_ids[:, prompt:],
        "completion_mask": attention_mask[:, prompt:],
    }


def filled(trainer: Any, generation: dict[str, Any]) -> dict[str, Any]:
    """The generation with the old and reference log-probs of rows that are not trained on, too.

    Old ones are computed at the parameters at hand: right only before the generation's first step.
    """
    found = dict(generation)
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        values = generation.get(key)
        if values is not None and lacks(values).any():
            scores = _scored(trainer, generation, lacks(values), reference=key.startswith("ref"))
            found[key] = torch.where(lacks(values)[:, None], scores.to(values), values)
    return found


def lacks(values: Tensor | None) -> Tensor:
    """Which rows of log-probs were left out."""
    return torch.zeros(0, dtype=torch.bool) if values is None else values.isnan().any(dim=1)


def _scored(trainer: Any, generation: dict[str, Any], here: Tensor, *, reference: bool) -> Tensor:
    model, adapter = trainer.model, nullcontext()
    if reference and trainer.ref_model is not None:
        model = trainer.ref_model
    elif reference:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        adapter = use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None)
    rows, size = np.flatnonzero(here.cpu().numpy()), trainer.args.per_device_train_batch_size
    decision = trainer._decision
    trainer._decision = None  # else only its survivors are scored

    def score(ids: Tensor, mask: Tensor, kept: int) -> Tensor:
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, kept)[0]

    options = trainer.args.gradient_checkpointing_kwargs
    bins = np.array_split(rows, range(size, len(rows), size))
    try:
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, options), adapter:
            return score_kept(score, generation, bins=bins, trim=trainer._trimmed)
    finally:
        trainer._decision = decision
