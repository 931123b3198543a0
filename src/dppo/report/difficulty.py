"""How often prompts are solved, early and late in a run, from a recording of its rollouts."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
from numpy.typing import NDArray

from dppo.audit import load_recording
from dppo.errors import DPPOError

BINS = ("none", "under 1/3", "1/3 to 2/3", "over 2/3", "all")
"""Shares of right completions. Five whatever the group size, so that runs compare."""


@dataclass(frozen=True, eq=False)
class Solved:
    """Shares of prompts by `BINS`, of the early and the late third of a recording.

    Attributes:
        early: One share a bin; they add up to 1.
        late: The same.
        prompts: Prompts in each third.
        source: Name of the file.
    """

    early: NDArray[np.float64]
    late: NDArray[np.float64]
    prompts: int
    source: str


def read_solved(folder: Path) -> tuple[Solved | None, list[str]]:
    """Reads the recording of a run's folder, if there is one.

    Args:
        folder: Of the run.

    Returns:
        What the first readable one holds, and what there is to say about the others.
    """
    notes: list[str] = []
    found: Solved | None = None
    for path in sorted(folder.glob("*.npz")):
        if found is not None:
            notes.append(f"{path.name} is left out: {found.source} is the recording that is shown")
            continue
        try:
            whole = is_zipfile(path)  # else half written
            rewards_PG = load_recording(path).rewards_PG if whole else None
        except (DPPOError, BadZipFile, EOFError, zlib.error):
            rewards_PG = None
        if rewards_PG is None:
            notes.append(f"{path.name} is no recording of rollouts and is left out")
            continue
        found = solved(rewards_PG, path.name)
        if found is None:
            notes.append(f"{path.name} is left out: fewer than 6 prompts, or no reward is 1")
    return found, notes


def solved(rewards_PG: NDArray[np.float64], source: str) -> Solved | None:
    """Sorts prompts by their share of right completions, those with the reward 1.

    Args:
        rewards_PG: Of a recording, in the order of the run; NaN: no score.
        source: Name of the file.

    Returns:
        The shares; None with fewer than 6 scored prompts, or if nothing is right.
    """
    scored_PG = np.isfinite(rewards_PG)
    rewards_PG, scored_PG = (array[scored_PG.any(axis=1)] for array in (rewards_PG, scored_PG))
    right_P = (rewards_PG == 1).sum(axis=1) / scored_PG.sum(axis=1)
    third = len(right_P) // 3
    if third < 2 or not right_P.any():
        return None
    return Solved(_histogram(right_P[:third]), _histogram(right_P[-third:]), third, source)


def _histogram(right_P: NDArray[np.float64]) -> NDArray[np.float64]:
    bounds = [right_P > 0, right_P >= 1 / 3, right_P > 2 / 3, right_P == 1]
    bin_P = np.sum(bounds, axis=0)
    return np.bincount(bin_P, minlength=len(BINS)) / len(right_P)
