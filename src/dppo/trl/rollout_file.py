"""`record_rollouts`: what was rolled out, in a file that `dppo audit` reads."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback

from dppo.audit import Recording, save_recording
from dppo.errors import ConfigurationError
from dppo.trl.decision import Decision


class RolloutFile(TrainerCallback):
    """Collects generations, and writes them at every checkpoint and at the end, on one rank.

    Args:
        path: Of the file, which must not exist: what a run before a resume has recorded is kept.
            Replaced whole, so that it is never half written.

    Raises:
        ConfigurationError: It exists.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._generations: list[Recording] = []
        if self._path.exists():
            raise ConfigurationError(
                f"record_rollouts={path!r} exists, and would be overwritten; give another name, "
                "also to a run that is resumed"
            )

    def add(self, decision: Decision) -> None:
        """A generation that was decided on."""
        self._generations.append(recording(decision))

    def add_gradients(self, gradient_NGK: NDArray[np.float32]) -> None:
        """Those of the latest generation, shape (P, G, K)."""
        latest: Any = replace(self._generations[-1], gradients_PGK=gradient_NGK)  # not yet float64
        self._generations[-1] = latest

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written."""
        self._write(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        self._write(state)

    def _write(self, state: Any) -> None:
        if not state.is_world_process_zero or not self._generations:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(self._path.name + ".part")
        save_recording(part, joined(self._generations), gradient_dtype=np.float32)
        os.replace(part, self._path)


def recording(decision: Decision) -> Recording:
    """One generation; no surprisal if a completion has none."""
    rows, shape = decision.rows, decision.rewards_PG.shape
    surprisal = rows.surprisal.reshape(shape)
    return Recording.of(
        decision.rewards_PG,
        rows.completion_tokens.reshape(shape),
        prompt_tokens_N=rows.prompt_tokens.reshape(shape).max(axis=1),
        advantage_NG=decision.choices[0].advantages,
        surprisal_norm_NG=None if np.isnan(surprisal).any() else surprisal,
    )


def joined(generations: list[Recording]) -> Recording:
    """The prompts of all generations, one after the other; without what any of them lacks."""
    surprisals = [g.surprisal_PG for g in generations if g.surprisal_PG is not None]
    gradients = [g.gradients_PGK for g in generations if g.gradients_PGK is not None]
    count = len(generations)
    return Recording.of(
        np.concatenate([g.rewards_PG for g in generations]),
        np.concatenate([g.completion_tokens_PG for g in generations]),
        prompt_tokens_N=np.concatenate([g.prompt_tokens_P for g in generations]),
        advantage_NG=np.concatenate([g.advantages_PG for g in generations]),
        surprisal_norm_NG=np.concatenate(surprisals) if len(surprisals) == count else None,
        gradient_NGK=np.concatenate(gradients) if len(gradients) == count else None,
    )
