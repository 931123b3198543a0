"""The packed forward: rows of a padded batch laid end to end in dense rows, computed, laid back.

It stands in for the model in the host's log-prob function, so that the host's code stays what it
is. Sequences in one row are kept apart

* by lengths, in one flat row, where attention takes them (flash attention);
* by positions, which start at 0 with each sequence: transformers builds a block-causal mask from
  them where no mask is given (sdpa, eager);
* by a mask of our own, where completions share their prompt (sdpa, eager).

Whether a model really keeps them apart is checked, never assumed (`self_check`). What is padding is
decided from the mask, never from token ids: pad may be the end of sequence.

Suffixes: `_B` rows of the padded batch, `_L` its columns, `_N` dense rows, `_W` their columns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer import utils as head

from dppo.packing.layout import Dense, Price, dense, flat
from dppo.packing.spread import Room
from dppo.trl import rows
from dppo.trl.decision import Rows

IGNORED = -100
"""Label of a token that is not scored."""


WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
"""What configurations call the tokens that a layer with local attention looks back."""


@dataclass(frozen=True)
class Form:
    """How a model is called packed."""

    price: Price
    """Of a token."""
    flat: bool = False
    """Attention takes the lengths of sequences in one row."""
    shares: bool = True
    """Attention takes a mask, so that completions may share a prompt."""
    reach: int | None = None
    """Longest sequence of which every token sees all before it (sliding window)."""
    widest: int | None = None
    """Tokens that a row may have."""
    additive: bool = False
    """The mask is added to the scores."""

    @classmethod
    def of(cls, config: Any, *, checkpointing: bool = False) -> "Form":
        """As the configuration of a text model suggests; to be checked.

        Args:
            config: Of the model.
            checkpointing: Whether one layer's activations are in memory at a time.
        """
        text = config.get_text_config()
        attention = str(getattr(text, "_attn_implementation", None))
        layers = getattr(text, "num_hidden_layers", 1)
        eager = attention == "eager"
        heads = text.num_attention_heads * (1 if checkpointing else layers) if eager else 0
        reaches = [getattr(text, name, None) for name in WINDOWS]
        return cls(
            Price(getattr(text, "hidden_size", 1), layers, heads),
            flat="flash" in attention,
            shares=attention in {"sdpa", "eager"},
            reach=min((reach for reach in reaches if reach), default=None),
            # Others may have buffers that are as wide as the context.
            widest=None
            if rows.shift_invariant(config)
            else getattr(text, "max_position_embeddings", None),
            additive=eager,
        )


def room_of(rows_N: Rows, form: Form, args: Any) -> Room:
    """A packed micro-batch: by default it holds what a padded one of the host would.

    A row that is longer than `packing_capacity` has one of its own.

    Args:
        rows_N: Of the generation.
        form: How the model is called.
        args: The configuration.
    """
    longest = int((rows_N.prompt_tokens + rows_N.completion_tokens).max())
    width = int(rows_N.prompt_tokens.max() + rows_N.completion_tokens.max())
    given = args.packing_capacity or args.per_device_train_batch_size * width
    return Room(
        capacity=max(given, longest, 1),
        price=form.price,
        shares=form.shares and (form.reach is None or longest <= form.reach),
        prompt_N=rows_N.prompt_tokens,
        completion_N=rows_N.completion_tokens,
        group_N=rows_N.groups(args.num_generations),
    )


class PackedModel:
    """Called as the host calls the model, with a padded batch; computes it packed.

    Args:
        model: With the host's fused head: `model(..., shift_labels=, fused_lm_head=True)`.
        form: How it is called.
        completion: Columns of the completions; prompts are the columns before.
        window: Of the packer.
        vocabulary: Size, to bound the memory of the host's head by; None: as it is.
        capacity: Tokens whose memory may be used; None: the padded batch's.
        count: Told of tokens and pairs of tokens, by name: `real`, `computed`, `pairs`, `attended`.
    """

    def __init__(
        self,
        model: Any,
        *,
        form: Form,
        completion: int,
        window: int = 64,
        vocabulary: int | None = None,
        capacity: int | None = None,
        count: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        self._model, self._form, self._completion = model, form, completion
        self._window, self._capacity, self._count = window, capacity, count
        self._vocabulary = vocabulary

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any
    ) -> SimpleNamespace:
        """Log-probs (and entropies) as the model would return them for the padded batch."""
        mask_BL = attention_mask.bool() & (labels != IGNORED).any(dim=1, keepdim=True)
        scored = bool(mask_BL.any())
        if not scored:  # yet backward needs a graph
            mask_BL[0, -1] = True
        sizes = self._sizes(input_ids, mask_BL)
        layout = self._layout(*sizes, input_ids.shape)
        tokens = Tokens.of(mask_BL, layout)
        # Of the token after each one, in its own row.
        following = torch.full_like(labels, IGNORED)
        following[:, :-1] = labels[:, 1:]
        with small_tiles(self._vocabulary, layout.rows * layout.width):
            outputs = self._model(
                input_ids=tokens.dense(input_ids, 0),
                # A row's tail is sequences of one token, at position 0.
                position_ids=tokens.dense(tokens.position_BL, 0),
                shift_labels=tokens.dense(following, IGNORED),
                **self._apart(tokens, sizes),
                **options,
            )
        if self._count is not None:
            self._count(self._counts(layout, sizes, scored=scored))
        return SimpleNamespace(
            log_probs=tokens.padded(outputs.log_probs),
            entropy=tokens.padded(outputs.entropy),
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    def _sizes(self, input_ids: Tensor, mask_BL: Tensor) -> tuple[Any, Any, Any]:
        """Prompt and completion tokens of each row, and what is equal where prompts are."""
        split = input_ids.shape[1] - self._completion
        group_B = torch.arange(len(input_ids), device=input_ids.device)
        if self._form.shares and split > 0:
            prompts = input_ids[:, :split].masked_fill(~mask_BL[:, :split], -1)
            group_B = torch.unique(prompts, dim=0, return_inverse=True)[1]
        counts = torch.stack([mask_BL[:, :split].sum(1), mask_BL[:, split:].sum(1), group_B])
        prompt_B, completion_B, group_B = counts.cpu().numpy()
        return prompt_B, completion_B, group_B

    def _layout(self, prompt_B: Any, completion_B: Any, group_B: Any, shape: Any) -> Dense:
        if self._form.flat:
            return flat(prompt_B, completion_B)
        reach = self._form.reach
        whole = reach is None or int((prompt_B + completion_B).max()) <= reach
        tokens = int(np.prod(shape))
        return dense(
            prompt_B,
            completion_B,
            group_B,
            price=self._form.price,
            padded=(min(tokens, self._capacity or tokens), shape[1]),
            shares=self._form.shares and whole,
            window=self._window,
            widest=self._form.widest,
        )

    def _apart(self, tokens: "Tokens", sizes: tuple[Any, Any, Any]) -> dict[str, Any]:
        """What keeps sequences apart beside their positions."""
        layout = tokens.layout
        if self._form.flat:
            length_B = sizes[0] + sizes[1]
            length_B = length_B[length_B > 0]
            ends = torch.from_numpy(np.concatenate(([0], np.cumsum(length_B))).astype(np.int32))
            ends, longest = ends.to(tokens.target.device), int(length_B.max())
            return {
                **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
                **{"max_length_q": longest, "max_length_k": longest},
            }
        if not layout.shares:
            return {}
        mask = tokens.visible(np.where(tokens.branching_B, sizes[0] - 1, 0))
        if self._form.additive:
            dtype = next(self._model.parameters()).dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return {"attention_mask": mask}

    def _counts(
        self, layout: Dense, sizes: tuple[Any, Any, Any], *, scored: bool
    ) -> dict[str, int]:
        length_B = (sizes[0] + sizes[1]) * scored
        pairs, computed = int((length_B * (length_B + 1) // 2).sum()), layout.rows * layout.width
        return {
            "real": int(length_B.sum()),
            "computed": computed,
            "pairs": pairs,
            "attended": pairs if self._form.flat else computed * layout.width,
        }


@contextmanager
def small_tiles(vocabulary: int | None, tokens: int) -> Iterator[None]:
    """Let the host's head hold no more scores at once than 256 tokens have, in this block.

    It computes tiles of up to 4,096 tokens by 32,768 words, 0.5 GB before copies, and allocates
    those also where the vocabulary is small.
    """
    if vocabulary is None:
        yield
        return
    whole = head._CHUNKED_LOGPROB_CHUNK_SIZE
    columns = max(256 * vocabulary // min(max(tokens, 1), 4096), 1024)
    head._CHUNKED_LOGPROB_CHUNK_SIZE = min(columns, vocabulary, whole)
    try:
        yield
    finally:
        head._CHUNKED_LOGPROB_CHUNK_SIZE = whole


@dataclass(frozen=True)
class Tokens:
    """The tokens that are computed: where they are in the padded batch, and in the dense rows."""

    layout: Dense
    position_BL: Tensor
    """Place in its sequence."""
    row: Tensor
    """Shape (tokens,). Row of the padded batch."""
    source: Tensor
    """Shape (tokens,). Index into the padded batch, flat."""
    target: Tensor
    """Shape (tokens,). Index into the dense rows, flat."""

    @classmethod
    def of(cls, mask_BL: Tensor, layout: Dense) -> "Tokens":
        """Those under `mask_BL`, a shared prompt's once."""
        device = mask_BL.device
        first_B = torch.from_numpy(layout.first_B).to(device)
        start_B = torch.from_numpy(layout.start_B).to(device)
        position_BL = mask_BL.long().cumsum(dim=1) - 1
        row, column = (mask_BL & (position_BL >= first_B[:, None])).nonzero(as_tuple=True)
        target = start_B[row] + position_BL[row, column]
        return cls(layout, position_BL, row, row * mask_BL.shape[1] + column, target)

    def dense(self, values_BL: Tensor, fill: int) -> Tensor:
        """Values of the tokens in dense rows, shape (N, W); `fill` where there is none."""
        laid = values_BL.new_full((self.layout.rows * self.layout.width,), fill)
        laid = laid.scatter(0, self.target, values_BL.reshape(-1)[self.source])
        return laid.view(self.layout.rows, self.layout.width)

    def padded(self, values_NW: Tensor | None) -> Tensor | None:
        """Values of the tokens in the padded batch, but its last column; 0 where there is none."""
        if values_NW is None:
            return None
        flat_values = values_NW.new_zeros(self.position_BL.numel())
        flat_values = flat_values.scatter(0, self.source, values_NW.reshape(-1)[self.target])
        return flat_values.view(self.position_BL.shape)[:, :-1]

    @property
    def branching_B(self) -> Any:
        """Whether a row's prompt is shared."""
        tree_B = self.layout.tree_B
        return np.bincount(tree_B)[tree_B] > 1

    def visible(self, shared_B: Any) -> Tensor:
        """Shape (N, 1, W, W). Which token sees which: its prompt's, and its own branch's before it.

        Args:
            shared_B: Tokens of each row that others share.
        """
        device = self.target.device
        tree_B, shared_B = (torch.from_numpy(a).to(device) for a in (self.layout.tree_B, shared_B))
        in_prompt = self.position_BL < shared_B[:, None]
        branch_BL = torch.arange(len(tree_B), device=device)[:, None].expand_as(in_prompt)
        tree_NW = self.dense(tree_B[:, None].expand_as(in_prompt), -1)
        branch_NW = self.dense(branch_BL.masked_fill(in_prompt, -1), -1)
        seen = branch_NW[:, None] == -1
        seen = seen | (branch_NW[:, None] == branch_NW[:, :, None])
        seen &= tree_NW[:, None] == tree_NW[:, :, None]
        return seen.tril_()[:, None]
