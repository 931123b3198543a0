"""What one rollout of a rank returned, kept until its survivors are decided.

Suffixes: `_B` rows of this rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dppo.estimator.sizes import surprisal_norm
from dppo.trl.recorder import SampledLogProbs


class Rollout:
    """The host's rollout, as its `_generate` returned it."""

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        self.inputs = inputs
        self.rewards: Tensor | None = None
        """Shape (N, F), gathered over the ranks."""
        self.completions: list[Any] = []
        self.completion_ids: list[list[int]] = []
        self._prompt_ids: list[list[int]] = []
        self._tool_mask: list[list[int]] | None = None
        self._log_probs: list[Any] | None = None
        self._extra_fields: dict[str, Any] = {}

    def note(self, generated: tuple[Any, ...], recorder: SampledLogProbs | None) -> None:
        """Take over what `_generate` returned, and the log-probs recorded meanwhile."""
        self._prompt_ids, self.completion_ids, self._tool_mask, self.completions = generated[:4]
        self._log_probs, self._extra_fields = generated[4], generated[5]
        if self._log_probs is None and recorder is not None and recorder.calls == 1:
            recorded = recorder.log_probs().cpu().numpy()
            longest = max(map(len, self.completion_ids))
            if recorded.shape[0] == len(self.completion_ids) and recorded.shape[1] >= longest:
                self._log_probs = list(recorded)

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
        """Prompt, completion and loss tokens and the surprisal norm of each row, shape (B, 4).

        Args:
            per: "sequence" or "token", see `surprisal_norm`.
            masked_unless_ending_in: Completions that end in another token are out of the loss; None
                keeps them all.
        """
        facts = np.empty((len(self.completion_ids), 4))
        for i, ids in enumerate(self.completion_ids):
            mask = np.ones(len(ids)) if self._tool_mask is None else np.asarray(self._tool_mask[i])
            ends = masked_unless_ending_in
            if ends is not None and (not ids or ids[-1] not in ends):
                mask = np.zeros(len(ids))
            log_probs = None if self._log_probs is None else self._log_probs[i]
            norm = _surprisal(log_probs, mask, per)
            facts[i] = len(self._prompt_ids[i]), len(ids), mask.sum(), norm
        return facts


def _surprisal(log_probs: Any, mask: NDArray[np.floating[Any]], per: str) -> float:
    """Surprisal norm; tokens without a log-prob are taken for typical ones, NaN if none has one."""
    if log_probs is None or not mask.any():
        return float("nan")
    # Engines return None or NaN for a token they could not score.
    values = np.array(list(log_probs)[: len(mask)], dtype=np.float64)
    known = (mask == 1) & np.isfinite(values)
    if not known.any():
        return float("nan")
    total = float(surprisal_norm(np.where(known, values, 0.0), known, per="token"))
    tokens = float(mask.sum())
    total *= np.sqrt(tokens / known.sum())
    return total / tokens if per == "sequence" else total
