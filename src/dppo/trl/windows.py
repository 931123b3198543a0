"""Prompts before rollout: windows of candidates, and the loader that rolls out K of every M.

The loader works ahead of the trainer, so a window is drawn before the generations just before it
have been observed (`DPPOConfig.observation_lag`). What was drawn waits here, by the number of the
generation that will roll it out; rows carry nothing but what the data set gave them.

Suffixes: `_M` candidates of a window, `_N` all prompts of a data set.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import Sampler

from dppo.errors import ConfigurationError, HostDriftError
from dppo.estimator.designs import generator
from dppo.estimator.windows import random_order
from dppo.pruner import Pruner
from dppo.trl.clock import PhaseClock
from dppo.trl.config import DPPOConfig
from dppo.trl.prompt_ids import Ids, believed_rate, believed_rates, dataset_ids, row_id
from dppo.types import Selection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Window:
    """The candidates of a generation and which of them are rolled out."""

    generation: int
    ids_M: Ids
    selection: Selection
    visited: float
    """Share of the candidates of which something was known."""

    @property
    def ids(self) -> Ids:
        """Of the prompts that are rolled out, in the order of their groups, shape (K,)."""
        return self.ids_M[self.selection.kept]

    @property
    def pi(self) -> NDArray[np.float64]:
        """Their inclusion probabilities, shape (K,)."""
        return self.selection.pi[self.selection.kept]

    def to_dict(self) -> dict[str, Any]:
        """Numbers and arrays."""
        return {
            "generation": self.generation,
            "ids": self.ids_M,
            "kept": self.selection.kept,
            "pi": self.selection.pi,
            "visited": self.visited,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Window":
        """The reverse of `to_dict`."""
        selection = Selection(state["kept"], state["pi"])
        return cls(state["generation"], state["ids"], selection, state["visited"])


class Windows:
    """Draws the windows of an epoch, and keeps them until their generation is over.

    Args:
        pruner: Draws them.
        args: The configuration.
        clock: Told of the time that a draw takes.
    """

    def __init__(self, pruner: Pruner, args: DPPOConfig, clock: PhaseClock) -> None:
        self.pruner, self.args, self._clock = pruner, args, clock
        self.epoch = 0
        self._first, self._skipped = 0, 0
        self._keep_at: Callable[[int], float | None] = lambda index: None
        self._open: dict[int, Window] = {}

    def begin_epoch(
        self, epoch: int, *, first: int, skipped: int, keep_at: Callable[[int], float | None]
    ) -> None:
        """Number the windows of an epoch, before the loader asks for them.

        Args:
            epoch: Which order of the prompts they are cut from.
            first: Generation that rolls out the epoch's first window.
            skipped: Windows at its start that a resumed run passes over.
            keep_at: Rate that replaces `prompt_keep` for a window of this epoch, or None.
        """
        self.epoch, self._first, self._skipped, self._keep_at = epoch, first, skipped, keep_at

    def size(self, index: int) -> int:
        """Candidates of a window of this epoch: M, or K where nothing is pruned."""
        if self._first + index in self._open:  # drawn, if under another end of training
            return len(self._open[self._first + index].ids_M)
        args, pruned = self.args, self._keep_at(index) is None
        return args.candidates_per_generation if pruned else args.prompts_per_generation

    def place(self, generation: int, position: int) -> list[int]:
        """Epoch, and batches of it that are over, inside a generation or at its beginning."""
        index = generation - self._first
        return [self.epoch, index * self.args.batches_per_generation + position]

    def draw(
        self, index: int, ids_M: Ids, believed_M: NDArray[np.float64] | None
    ) -> NDArray[np.bool_]:
        """Which candidates of a window of this epoch to roll out, shape (M,)."""
        count = self.args.prompts_per_generation
        if index < self._skipped:  # whatever it yields is passed over
            return np.arange(len(ids_M)) < count
        number = self._first + index
        if number not in self._open:
            keep = self._keep_at(index)
            with self._clock.running("prune"):
                chosen = self.pruner.select_prompts(
                    ids_M, count=count, step=number, keep=keep, solve_rate=believed_M
                )
                visited = float(self.pruner.visited(ids_M).mean())
            self._open[number] = Window(number, ids_M, chosen, visited)
        elif not np.array_equal(self._open[number].ids_M, ids_M):
            raise ConfigurationError(
                f"the candidates of generation {number} are not those it had when the checkpoint "
                "was saved: the data set, or the order in which it streams, has changed"
            )
        return self._open[number].selection.kept

    def of(self, generation: int, rows: list[dict[str, Any]], *, first_row: int) -> Window:
        """The window of a generation, after checking that `rows` are its prompts.

        Args:
            generation: Its number; windows before it are over.
            rows: The rows of this rank.
            first_row: Their place among those of all ranks.

        Raises:
            HostDriftError: The loader handed out other rows.
        """
        self._open = {number: w for number, w in self._open.items() if number >= generation}
        window = self._open.get(generation)
        with self._clock.running("prune"):
            if window is not None and self._holds(window, rows, first_row):
                return window
        raise HostDriftError(
            f"the rows of generation {generation} are not the prompts that were drawn for it; "
            "their weights would be wrong. Train through `train()` with the trainer's own loader, "
            "or set prompt_keep=1.0"
        )

    def _holds(self, window: Window, rows: list[dict[str, Any]], first_row: int) -> bool:
        place = np.arange(first_row, first_row + len(rows)) // self.args.group_size
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        found = [row_id(rows[start], self.args.prompt_id_column) for start in starts.tolist()]
        return found == window.ids[place[starts]].tolist()

    def get(self, generation: int) -> Window:
        """The window of a generation, of a checkpoint that was saved while it was under way."""
        return self._open[generation]

    def clear(self) -> int:
        """Forget the windows that were drawn; return the number of the last, -1 without any."""
        last = max(self._open, default=-1)
        self._open.clear()
        return last

    def state(self, generation: int) -> list[dict[str, Any]]:
        """The windows from that of `generation` on, arrays and numbers."""
        return [w.to_dict() for number, w in sorted(self._open.items()) if number >= generation]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Take over what `state` returned."""
        self._open = {w["generation"]: Window.from_dict(w) for w in state}


class WindowSampler(Sampler[int]):
    """Indices of the prompts to roll out: each G times in a row, each generation S * mu times.

    In every epoch each of the first M * (N // M) prompts of its permutation is a candidate once.
    The permutation is a function of `data_seed` and the epoch alone.
    """

    def __init__(self, windows: Windows, dataset: Dataset) -> None:
        self._windows, args = windows, windows.args
        self._ids_N = dataset_ids(dataset, args.prompt_id_column)
        column = args.prompt_prior_column
        self._believed_N = None if column is None else believed_rates(dataset, column)
        self._candidates = args.candidates_per_generation
        if args.prompt_id_column is None:
            _remark_on_duplicates(self._ids_N)

    def __len__(self) -> int:
        """Rows of an epoch, the same for every epoch."""
        args = self._windows.args
        rows = args.prompts_per_generation * args.group_size * args.batches_per_generation
        return len(self._ids_N) // self._candidates * rows

    def __iter__(self) -> Iterator[int]:
        """The rows of an epoch."""
        windows, args = self._windows, self._windows.args
        order = np.arange(len(self._ids_N))
        if args.shuffle_dataset:
            # Its own key: iteration 0 of this stream shuffles the rows of a generation.
            rng = generator(args.order_seed, windows.epoch, stream="shuffle", iteration=1)
            order = random_order(rng, len(order))
        for index in range(len(order) // self._candidates):
            start = index * self._candidates
            candidates = order[start : start + windows.size(index)]
            believed = None if self._believed_N is None else self._believed_N[candidates]
            kept = windows.draw(index, self._ids_N[candidates], believed)
            rows = np.repeat(candidates[kept], args.group_size).tolist()
            for _ in range(args.batches_per_generation):
                yield from rows


def _remark_on_duplicates(ids_N: Ids) -> None:
    counts = np.unique(ids_N, return_counts=True)[1]
    shared = int(counts[counts > 1].sum())
    if shared:
        logger.warning(
            "%d of %d prompts have the text of another and share its history; if they are "
            "different tasks, give prompt_id_column",
            *(shared, len(ids_N)),
        )


class WindowStream(TorchIterableDataset[dict[str, Any]]):
    """The same for a data set that can only be read through, pass after pass without an end."""

    def __init__(self, windows: Windows, dataset: IterableDataset) -> None:
        args = windows.args
        self._windows = windows
        self._dataset = dataset.shuffle(seed=args.order_seed) if args.shuffle_dataset else dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows, copies of their own."""
        windows, args = self._windows, self._windows.args
        examples = self._passes()
        for index in itertools.count():
            candidates = list(itertools.islice(examples, windows.size(index)))
            ids = np.array([row_id(row, args.prompt_id_column) for row in candidates])
            kept = windows.draw(index, ids, self._believed(candidates))
            chosen = [row for row, keep in zip(candidates, kept.tolist(), strict=True) if keep]
            for _ in range(args.batches_per_generation):
                for row in chosen:
                    for _ in range(args.group_size):
                        yield copy.deepcopy(row)

    def _passes(self) -> Iterator[dict[str, Any]]:
        needed = self._windows.args.candidates_per_generation
        for number in itertools.count():
            self._dataset.set_epoch(number)
            read = 0
            for row in self._dataset:
                read += 1
                yield row
            if read < needed:
                raise ConfigurationError(
                    f"the stream ended after {read} prompts, but prompt_keep="
                    f"{self._windows.args.prompt_keep} draws from windows of {needed}. Raise "
                    "prompt_keep, or lower the number of prompts per generation"
                )

    def _believed(self, rows: list[dict[str, Any]]) -> NDArray[np.float64] | None:
        column = self._windows.args.prompt_prior_column
        if column is None:
            return None
        return np.array([believed_rate(row.get(column), column) for row in rows])
