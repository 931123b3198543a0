"""What one rollout of a rank returned, kept until its survivors are decided.

Suffixes: `_B` rows of this rank, `_T` tokens.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dppo.estimator.sizes import surprisal_norm
from dppo.trl.recorder import SampledLogProbs
from dppo.trl.windows import Window


class Rollout:
    """The host's rollout, as its `_generate` returned it."""

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        self.inputs = inputs
        self.rewards: Tensor | None = None
        """Shape (N, F), gathered over the ranks."""
        self.window: Window | None = None
        """The candidates that the prompts were drawn from."""
        self.completions: list[Any] = []
        self.completion_ids: list[list[int]] = []
        self._prompt_ids: list[list[int]] = []
        self._tool_mask: list[list[int]] | None = None
        self._log_probs: Sequence[Any] | NDArray[np.floating[Any]] | None = None
        self._extra_fields: dict[str, Any] = {}

    @property
    def scored(self) -> Tensor:
        """The rewards, once they have been computed."""
        assert self.rewards is not None
        return self.rewards

    def note(self, generated: tuple[Any, ...], recorder: SampledLogProbs | None) -> None:
        """Take over what `_generate` returned, and the log-probs recorded meanwhile."""
        self._prompt_ids, self.completion_ids, self._tool_mask, self.completions = generated[:4]
        self._log_probs, self._extra_fields = generated[4], generated[5]
        if self._log_probs is None and recorder is not None and recorder.calls == 1:
            recorded = recorder.log_probs().cpu().numpy()
            longest = max(map(len, self.completion_ids))
            if recorded.shape[0] == len(self.completion_ids) and recorded.shape[1] >= longest:
                self._log_probs = recorded[:, :longest]

    def replace(self, places: Sequence[int], other: "Rollout") -> None:
        """Take rows of another rollout in place of some of these, in the host's own lists."""
        if self._log_probs is None or other._log_probs is None:
            self._log_probs = None
        elif isinstance(self._log_probs, np.ndarray):
            self._log_probs = list(self._log_probs)
        pairs: list[tuple[Any, Any]] = [
            (self.inputs, other.inputs),
            (self.completions, other.completions),
            (self.completion_ids, other.completion_ids),
            (self._prompt_ids, other._prompt_ids),
            (self._tool_mask, other._tool_mask),
            (self._log_probs, other._log_probs),
            *((rows, other._extra_fields.get(key)) for key, rows in self._extra_fields.items()),
        ]
        for mine, others in pairs:
            if isinstance(mine, list) and others is not None:
                for row, place in enumerate(places):
                    mine[place] = others[row]

    def completion_tokens(self) -> NDArray[np.int64]:
        """Tokens of each completion, shape (B,)."""
        return np.array([len(ids) for ids in self.completion_ids], dtype=np.int64)

    def merge_extra_fields(self) -> None:
        """Give the rows what a rollout function returned besides tokens, as the host will again."""
        for key, values in self._extra_fields.items():
            for i, row in enumerate(self.inputs):
                if not isinstance(values, list):
                    row[key] = values
                elif i < len(values):
                    row[key] = values[i]

    def facts(
        self, *, per: str, masked_unless_ending_in: Sequence[int] | None
    ) -> NDArray[np.float64]:
        """What is gathered of each row, shape (B, 5).

        Prompt, completion and loss tokens, the surprisal norm, and a hash of the prompt in 24 bits,
        which is what float32 holds.

        Args:
            per: "sequence" or "token", see `surprisal_norm`.
            masked_unless_ending_in: Completions that end in another token are out of the loss; None
                keeps them all.
        """
        tokens = self.completion_tokens()
        columns = np.arange(tokens.max(initial=0))
        mask_BT = columns < tokens[:, None]
        if self._tool_mask is not None:
            mask_BT &= _padded(self._tool_mask, mask_BT.shape) == 1
        if masked_unless_ending_in is not None:
            ends = np.array([ids[-1] if ids else -1 for ids in self.completion_ids])
            mask_BT &= np.isin(ends, masked_unless_ending_in)[:, None]
        surprisal = np.full(len(tokens), np.nan)
        if self._log_probs is not None:
            surprisal = _surprisal(_padded(self._log_probs, mask_BT.shape), mask_BT, per)
        prompt = [len(ids) for ids in self._prompt_ids]
        same = [zlib.crc32(np.asarray(ids, np.int64).tobytes()) % 2**24 for ids in self._prompt_ids]
        return np.column_stack((prompt, tokens, mask_BT.sum(axis=1), surprisal, same))


def _padded(rows_B: Sequence[Any] | NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Ragged rows as an array of `shape`, NaN where a row ends or an entry is None."""
    if isinstance(rows_B, np.ndarray):
        return rows_B.astype(np.float64)
    result = np.full(shape, np.nan)
    for row, values in zip(result, rows_B, strict=True):
        known = np.array(list(values), dtype=np.float64)[: shape[1]]
        row[: len(known)] = known
    return result


def _surprisal(
    log_probs_BT: NDArray[np.float64], mask_BT: NDArray[np.bool_], per: str
) -> NDArray[np.float64]:
    """Surprisal norms, shape (B,); NaN for a row of which no token in the loss has a log-prob.

    Engines return None or NaN for a token they could not score; it is taken for a typical one.
    """
    known = mask_BT & np.isfinite(log_probs_BT)
    norm = surprisal_norm(np.where(known, log_probs_BT, 0.0), known, per="token")
    tokens, scored = mask_BT.sum(axis=1), known.sum(axis=1)
    norm = norm * np.sqrt(tokens / np.maximum(scored, 1))
    if per == "sequence":
        norm = norm / np.maximum(tokens, 1)
    return np.where(scored > 0, norm, np.nan)
