"""Whether a model may be called packed: tried at the start of training, on five short sequences.

Suffixes: `_B` sequences, `_L` columns of the padded batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.packing.layout import Price
from dppo.trl import rows
from dppo.trl.packed import IGNORED, Form, PackedModel

logger = logging.getLogger(__name__)

PROBE = ((4, 3), (4, 2), (1, 2), (4, 1), (3, 4))
"""Prompt and completion tokens of the self-check; prompts of equal length are equal."""


@dataclass(frozen=True)
class Probe:
    """Five short sequences, padded as the host pads."""

    ids_BL: Tensor
    mask_BL: Tensor
    completion: int
    """Columns of the completions."""

    @classmethod
    def drawn(cls, vocabulary: int, device: Any) -> "Probe":
        """Of random tokens."""
        rng = np.random.default_rng(0)
        left, right = (max(row[side] for row in PROBE) for side in (0, 1))
        prompts = {n: rng.integers(0, vocabulary, n) for n in sorted({n for n, _ in PROBE})}
        ids, mask = (np.zeros((len(PROBE), left + right), dtype=np.int64) for _ in range(2))
        for row, (prompt, completion) in enumerate(PROBE):
            here = slice(left - prompt, left + completion)
            ids[row, here] = [*prompts[prompt], *rng.integers(0, vocabulary, completion)]
            mask[row, here] = 1
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), right)

    @property
    def labels_BL(self) -> Tensor:
        """The completions."""
        labels = self.ids_BL.masked_fill(self.mask_BL == 0, IGNORED)
        labels[:, : -self.completion] = IGNORED
        return labels

    def changed(self, row: int, vocabulary: int) -> "Probe":
        """With another first token of one completion."""
        ids = self.ids_BL.clone()
        ids[row, -self.completion] = (ids[row, -self.completion] + 1) % vocabulary
        return replace(self, ids_BL=ids)

    def packed(self, model: PackedModel) -> Tensor:
        """Log-probs, packed."""
        labels = self.labels_BL
        outputs = model(
            input_ids=self.ids_BL, attention_mask=self.mask_BL, labels=labels, fused_lm_head=True
        )
        return outputs.log_probs.float()

    def padded(self, model: Any) -> Tensor:
        """Log-probs of padded rows, positions from 0 with each."""
        outputs = model(
            input_ids=self.ids_BL,
            attention_mask=self.mask_BL,
            position_ids=(self.mask_BL.cumsum(dim=1) - 1).clamp(min=0),
            labels=self.labels_BL,
            fused_lm_head=True,
        )
        return outputs.log_probs.float()

    def alone(self, model: Any) -> Tensor:
        """Log-probs of each sequence alone and unpadded."""
        labels, parts = self.labels_BL, []
        for row, mask_L in enumerate(self.mask_BL.bool()):
            ids = self.ids_BL[row : row + 1, mask_L]
            one = model(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
                labels=labels[row : row + 1, mask_L],
                fused_lm_head=True,
            ).log_probs.float()
            first, last = (int(i) for i in mask_L.nonzero()[[0, -1], 0])
            pad = (first, self.ids_BL.shape[1] - 1 - last)
            parts.append(torch.nn.functional.pad(one, pad))
        return torch.cat(parts)


def problem(
    model: Any, form: Form, *, vocabulary: int, device: Any, gradient: bool = True
) -> str | None:
    """What is wrong with a model that is called packed; None if nothing is.

    Sequences are apart if a changed token of one moves no other's log-probs, not at all; where
    it does so in padded rows too (experts that rows share), not twice as much. Log-probs, and the
    gradient of a parameter, must be those of each sequence alone, as nearly as padded rows
    with the same positions are, or rounding of the result would have it.

    Args:
        model: With the host's fused head.
        form: How to call it packed; where it shares prompts, so does the check.
        vocabulary: Size.
        device: Of the model.
        gradient: Whether to compare gradients, which sharded parameters do not allow.
    """
    probe = Probe.drawn(vocabulary, device)
    # A high price of tokens: as few of them as can be.
    cheap = replace(form, price=Price(hidden=1 << 20), reach=None, widest=None)
    packed = PackedModel(model, form=cheap, completion=probe.completion)
    training = model.training
    model.eval()  # dropout would differ
    try:
        with torch.no_grad():
            together = _moved(probe, vocabulary, lambda given: given.packed(packed))
            apart = _moved(probe, vocabulary, lambda given: given.padded(model))
        if not together <= 2 * apart:
            return f"a changed token moves the log-probs of other sequences by {together:.2g}"
        with torch.set_grad_enabled(gradient):
            return _difference(model, probe.packed(packed), probe.padded(model), probe.alone(model))
    finally:
        model.train(training)


def _moved(probe: Probe, vocabulary: int, score: Callable[[Probe], Tensor]) -> float:
    """Largest difference that another's token makes; NaN if there is one."""
    before, largest = score(probe), []
    for row in range(len(PROBE)):
        moved = (score(probe.changed(row, vocabulary)) - before).abs()
        moved[row] = 0
        largest.append(moved.max())
    return float(torch.stack(largest).max())


NOISE = 8
"""How many times the rounding of padded rows may be exceeded. They may by chance have none, so a
few units in the last place are allowed, too: of log-probs, and more of gradients, which are
sums of all layers'. A wrong position or label is off by far more in a trained model."""


def _precision(model: Any) -> float:
    dtype = next(model.parameters()).dtype
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return torch.finfo(dtype).eps


def _difference(model: Any, packed: Tensor, padded: Tensor, alone: Tensor) -> str | None:
    eps = _precision(model)
    least = max(4 * eps, 64 * torch.finfo(torch.float32).eps)
    off, noise = (float((x - alone).detach().abs().max()) for x in (packed, padded))
    if not off <= max(NOISE * noise, least * max(1.0, float(alone.detach().abs().max()))):
        return f"log-probs are off by {off:.2g}, those of padded rows by {noise:.2g}"
    if not alone.requires_grad:
        return None
    weight = torch.linspace(0.5, 2.0, len(PROBE), device=alone.device)[:, None]
    for parameter in (p for p in model.parameters() if p.requires_grad):
        gradients = [
            torch.autograd.grad(
                (weight * values).sum(), parameter, allow_unused=True, retain_graph=True
            )[0]
            for values in (packed, padded, alone)
        ]
        if any(g is None for g in gradients) or not gradients[2].any():
            continue  # as of an adapter's first factor while the second is 0
        off, noise = (float((g - gradients[2]).abs().max()) for g in gradients[:2])
        if not off <= max(NOISE * noise, 8 * least * float(gradients[2].abs().max())):
            return f"a gradient is off by {off:.2g}, that of padded rows by {noise:.2g}"
        return None
    return "no trainable parameter has a gradient to compare"


def form_of(trainer: Any) -> Form | None:
    """How the trainer's model is called packed, on every rank; None, and said why, if it is not."""
    args, accelerator = trainer.args, trainer.accelerator
    policy = accelerator.unwrap_model(trainer.model)
    form: Form | None = None
    why = _unpackable(trainer, policy)
    if why is None:
        try:
            form = Form.of(trainer.model.config, checkpointing=bool(args.gradient_checkpointing))
        except Exception as error:  # a configuration may be anything
            why = f"its configuration is not understood: {type(error).__name__}: {error}"
    if form is not None:
        why = _check(trainer, replace(form, shares=False))
        if why is None:
            hindrance = _check(trainer, form) if form.shares else None
            if hindrance is not None:
                logger.warning("packing: completions do not share their prompt: %s", hindrance)
            return replace(form, shares=form.shares and hindrance is None)
    attention = getattr(trainer.model.config, "_attn_implementation", "its")
    logger.warning(
        "rows are not packed with %s and %s attention: %s. Rows of like length share micro-batches "
        "instead, as with packing='bucket'",
        *(type(policy).__name__, attention, why),
    )
    return None


def _unpackable(trainer: Any, policy: Any) -> str | None:
    """Why a model cannot be packed whatever its attention does, if so."""
    if trainer._is_vlm:
        return "images are laid out by its own code"
    adapters = getattr(policy, "peft_config", {})
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return "a prompt-learning adapter puts its virtual tokens before each row"
    config = trainer.model.config
    if rows.follows_length(config):
        return "its rotary frequencies follow the longest sequence of a call"
    if getattr(config.get_text_config(), "alibi", False):
        return "its distances (alibi) are rounded by their place in the row"
    reference = getattr(trainer.ref_model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    of_reference = getattr(reference, "_attn_implementation", attention)
    if of_reference != attention:
        return f"the reference model has {of_reference} attention"
    return None


def _check(trainer: Any, form: Form) -> str | None:
    """None if the form is right on every rank, or what is wrong."""
    accelerator = trainer.accelerator
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    # A wrapper for data parallelism would wait for a backward pass.
    model = trainer.model_wrapped if sharded else accelerator.unwrap_model(trainer.model)
    vocabulary = trainer.model.config.get_text_config().vocab_size
    options = {"vocabulary": vocabulary, "device": accelerator.device, "gradient": not sharded}
    try:
        with accelerator.autocast():
            why = problem(model, form, **options)
    except Exception as error:  # whatever a model's code raises: it is a question, not a step
        why = f"it cannot be called packed: {type(error).__name__}: {error}"
    right = torch.tensor([why is None], device=accelerator.device)
    if accelerator.gather(right).all():
        return None
    return why or "it is not right on another process"
