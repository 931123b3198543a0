"""What was generated and trained since the start, for summaries."""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.pruner import DROP_REASONS
from dppo.trl.decision import Decision


class Totals:
    """Sums over generations and ranks. Tokens are completion tokens; passes are averaged."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._skipped: dict[str, float] = dict.fromkeys(DROP_REASONS, 0.0)
        self._sample_size: list[float] = []

    def add_unpruned(self, completion_tokens: NDArray[np.int64], *, group: int) -> None:
        """A generation that is trained on whole; the tokens of all ranks, `group` per prompt."""
        for kind in ("rolled_out", "candidates"):
            self._counts[f"prompts_{kind}"] += completion_tokens.size // group
        for kind in ("generated", "trained"):
            self._counts[f"completion_tokens_{kind}"] += int(completion_tokens.sum())
            self._counts[f"completions_{kind}"] += completion_tokens.size

    def add(self, decision: Decision, sample_size: float | None) -> None:
        """A pruned generation, with the effective sample size of its survivors as a share."""
        skipped = decision.tokens_by_reason
        generated = int(decision.rows.completion_tokens.sum())
        kept = sum(int(c.kept.sum()) for c in decision.choices) / len(decision.choices)
        self._counts["completion_tokens_generated"] += generated
        self._counts["completion_tokens_trained"] += generated - sum(skipped.values())
        self._counts["completions_generated"] += decision.rows.completion_tokens.size
        self._counts["completions_trained"] += kept
        prompts = len(decision.rewards_PG)
        candidates = prompts if decision.window is None else len(decision.window.ids_M)
        self._counts["prompts_rolled_out"] += prompts
        self._counts["prompts_candidates"] += candidates
        for reason, tokens in skipped.items():
            self._skipped[reason] += tokens
        if sample_size is not None:
            self._sample_size.append(sample_size)

    def to_dict(self, seconds: dict[str, float]) -> dict[str, Any]:
        """JSON-ready."""
        names = ("completion_tokens_generated", "completion_tokens_trained")
        names += ("completions_generated", "completions_trained")
        names += ("prompts_candidates", "prompts_rolled_out")
        return {
            **{name: round(self._counts[name]) for name in names},
            "completion_tokens_skipped": {r: round(n) for r, n in self._skipped.items()},
            "effective_sample_size": float(np.mean(self._sample_size))
            if self._sample_size
            else None,
            "seconds": dict(seconds),
        }
