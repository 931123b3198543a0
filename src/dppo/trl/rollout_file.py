"""`record_rollouts`: what was rolled out, in a file that `dppo audit` reads."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from dppo.audit import Recording, save_recording
from dppo.trl.decision import Decision


class RolloutFile(TrainerCallback):
    """Collects generations, and writes them at every checkpoint and at the end, on one rank.

    Args:
        path: Of the file; replaced whole, so that it is never half written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._generations: list[Decision] = []

    def add(self, decision: Decision) -> None:
        """A generation that was decided on."""
        self._generations.append(decision)

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
        save_recording(part, recording(self._generations))
        os.replace(part, self._path)


def recording(generations: list[Decision]) -> Recording:
    """The prompts of all generations, one after the other; no surprisal if any has none."""
    shape = generations[0].rewards_PG.shape

    def joined(name: str) -> Any:
        return np.concatenate([getattr(d.rows, name).reshape(shape) for d in generations])

    surprisal = joined("surprisal")
    return Recording.of(
        np.concatenate([d.rewards_PG for d in generations]),
        np.maximum(joined("completion_tokens"), 1),
        prompt_tokens_N=joined("prompt_tokens").max(axis=1),
        advantage_NG=np.concatenate([d.choices[0].advantages for d in generations]),
        surprisal_norm_NG=None if np.isnan(surprisal).any() else surprisal,
    )
