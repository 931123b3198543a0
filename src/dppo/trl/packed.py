"""The packed forward: rows of a padded batch laid end to end in dense rows, computed, laid back.

It stands in for the model in the host's log-prob function, so that the host's code stays what it
is. A dense row holds several sequences; positions start at 0 with each, and from that the model's
attention keeps them apart (transformers builds a block-causal mask from positions where no mask is
given). Whether a model really does is checked, never assumed (`isolates`).

What is padding is decided from the mask, never from token ids: pad may be the end of sequence.

Suffixes: `_B` rows of the padded batch, `_L` its columns, `_N` dense rows, `_W` their columns.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dppo.packing import Packing, pack

logger = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is not scored."""


@dataclass(frozen=True)
class Layout:
    """Where each real token of a padded batch lies in the dense rows."""

    source: Tensor
    """Shape (tokens,). Index into the padded batch, flat."""
    target: Tensor
    """Shape (tokens,). Index into the dense rows, flat."""
    position: Tensor
    """Shape (tokens,). Place in its sequence."""
    shape: tuple[int, int]
    """Dense rows and their width."""

    @classmethod
    def of(cls, mask_BL: Tensor, *, window: int, hidden: int) -> "Layout":
        """Lay out the tokens under `mask_BL`.

        Dense rows are a whole number of times as wide as the longest sequence: wider ones have
        less room to spare, but attention costs a token 1/6 width/hidden of all else.

        Args:
            mask_BL: Real tokens.
            window: Of the packer.
            hidden: Width of the model.
        """
        lengths_B = mask_BL.sum(dim=1).cpu().numpy()
        packing, width = _cheapest(lengths_B, window, hidden)
        start_B = np.empty(len(lengths_B), dtype=np.int64)
        for number, items in enumerate(packing.bins):
            before = np.cumsum(lengths_B[items]) - lengths_B[items]
            start_B[items] = number * width + before
        row, column = mask_BL.nonzero(as_tuple=True)
        position = mask_BL.long().cumsum(dim=1)[row, column] - 1
        target = torch.from_numpy(start_B).to(mask_BL.device)[row] + position
        source = row * mask_BL.shape[1] + column
        return cls(source, target, position, (len(packing.bins), width))

    def dense(self, values: Tensor, fill: int) -> Tensor:
        """Values of the tokens in dense rows, shape (N, W); `fill` where there is none."""
        rows = values.new_full((self.shape[0] * self.shape[1],), fill)
        return rows.scatter(0, self.target, values).view(self.shape)


WIDEST = 4
"""Longest sequences that a dense row may hold."""


def _cheapest(lengths_B: NDArray[np.int64], window: int, hidden: int) -> tuple[Packing, int]:
    longest = max(int(lengths_B.max()), 1)
    found: list[tuple[float, int, Packing]] = []
    for times in range(1, WIDEST + 1):
        packing = pack(lengths_B, capacity=times * longest, window=window)
        width = max(int(lengths_B[items].sum()) for items in packing.bins)
        computed = len(packing.bins) * max(width, 1)
        found.append((computed * (1 + width / (6 * hidden)), max(width, 1), packing))
    _, width, packing = min(found, key=lambda choice: choice[0])
    return packing, width


class PackedModel:
    """Called as the host calls the model, with a padded batch; computes it packed.

    Args:
        model: With the host's fused head: `model(..., shift_labels=, fused_lm_head=True)`.
        window: Of the packer.
        hidden: Width of the model; 1 keeps dense rows as narrow as they can be.
        count: Told of the tokens that were real, and that were computed.
    """

    def __init__(
        self,
        model: Any,
        *,
        window: int,
        hidden: int = 1,
        count: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model, self._window, self._hidden, self._count = model, window, hidden, count

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any
    ) -> SimpleNamespace:
        """Log-probs (and entropies) as the model would return them for the padded batch."""
        mask_BL = attention_mask.bool() & (labels != IGNORED).any(dim=1, keepdim=True)
        if not mask_BL.any():  # nothing to score; yet backward needs a graph
            mask_BL[0, -1] = True
        layout = Layout.of(mask_BL, window=self._window, hidden=self._hidden)
        # Of the token after each one, in its own row.
        following = torch.full_like(labels, IGNORED)
        following[:, :-1] = labels[:, 1:]
        outputs = self._model(
            input_ids=layout.dense(input_ids.reshape(-1)[layout.source], 0),
            # A row's tail is sequences of one token, at position 0.
            position_ids=layout.dense(layout.position, 0),
            shift_labels=layout.dense(following.reshape(-1)[layout.source], IGNORED),
            **options,
        )
        if self._count is not None:
            self._count(len(layout.source), layout.shape[0] * layout.shape[1])

        def padded(values_NW: Tensor | None) -> Tensor | None:
            if values_NW is None:
                return None
            flat = values_NW.new_zeros(input_ids.numel())
            flat = flat.scatter(0, layout.source, values_NW.reshape(-1)[layout.target])
            return flat.view(input_ids.shape)[:, :-1]

        return SimpleNamespace(
            log_probs=padded(outputs.log_probs),
            entropy=padded(outputs.entropy),
            aux_loss=getattr(outputs, "aux_loss", None),
        )


PROBE_LENGTHS = (7, 3, 5, 2)
"""Sequences of the self-check: two dense rows, the second with three of them and a tail."""


@torch.no_grad()
def deviation(model: Any, *, vocabulary: int, device: Any) -> float:
    """Largest difference of packed log-probs from those of each sequence alone, from position 0."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, vocabulary, length).tolist() for length in PROBE_LENGTHS]
    width = max(PROBE_LENGTHS)
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
    labels = padded.masked_fill(mask == 0, IGNORED)
    training = model.training
    model.eval()  # dropout would differ
    try:
        packed = PackedModel(model, window=len(ids))(
            input_ids=padded, attention_mask=mask, labels=labels, fused_lm_head=True
        ).log_probs
        largest = 0.0
        for row, tokens in enumerate(ids):
            alone = torch.tensor([tokens], device=device)
            place = torch.arange(len(tokens), device=device)[None]
            outputs = model(input_ids=alone, position_ids=place, labels=alone, fused_lm_head=True)
            found = packed[row, width - len(tokens) :].float()
            largest = max(largest, float((found - outputs.log_probs[0].float()).abs().max()))
        return largest
    finally:
        model.train(training)


def tolerance(dtype: torch.dtype) -> float:
    """Difference of log-probs that rounding explains; a leak makes it a hundred times as large.

    Sums of some hundred terms of order 1: about 100 eps in float32, and 10 eps in half precision,
    where accumulation is in float32.
    """
    eps = torch.finfo(dtype).eps
    return 10 * eps if eps > 1e-5 else 200 * eps


def isolates(trainer: Any) -> bool:
    """Whether the trainer's model keeps packed sequences apart, on every rank; said if not."""
    args, model = trainer.args, trainer.model_wrapped
    dtype = next(model.parameters()).dtype
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else dtype
    device = trainer.accelerator.device
    vocabulary = trainer.model.config.get_text_config().vocab_size
    try:
        with trainer.accelerator.autocast():
            found = deviation(model, vocabulary=vocabulary, device=device)
        why = f"log-probs are off by {found:.2g}"
    except Exception as error:  # whatever a model's code raises: it is a question, not a step
        found, why = float("inf"), f"it cannot be called packed: {type(error).__name__}: {error}"
    apart = torch.tensor([found <= tolerance(dtype)], device=device)
    if trainer.accelerator.gather(apart).all():
        return True
    attention = getattr(trainer.model.config, "_attn_implementation", "its")
    logger.warning(
        "packing='varlen' is not right for %s with %s attention (%s); rows of like length share "
        "micro-batches instead, as with packing='bucket'",
        *(type(trainer.accelerator.unwrap_model(trainer.model)).__name__, attention),
        why if not apart.item() else "on another process",
    )
    return False
