"""An endless supply of prompts, some of them skipped, and the loader's order from it."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from dppo.errors import ConfigurationError
from dppo.estimator.designs import generator
from dppo.estimator.windows import random_order
from dppo.trl.config import DPPOConfig

MOST_SKIPPED = 1000
"""Passes over the data without a prompt that is taken."""


class PromptSupply:
    """Indices of prompts, pass after pass in random orders; each is taken with a probability.

    Args:
        ids_N: Shape (N,). Ids of the prompts.
        probability: Of taking a prompt, by its id, at the time it is asked for.
        seed: Of the orders and the draws.
    """

    def __init__(
        self, ids_N: NDArray[np.int64], probability: Callable[[int], float], *, seed: int
    ) -> None:
        self._ids_N, self._probability, self._seed = ids_N.tolist(), probability, seed
        self.passes = 0
        """Passes that are over."""
        self._rest: list[int] = []
        self._begin(0)

    def _begin(self, number: int) -> None:
        # Its own key: iteration 0 of this stream shuffles the rows of a generation, 1 windows.
        self._rng = generator(self._seed, number, stream="shuffle", iteration=2)
        self._rest = random_order(self._rng, len(self._ids_N)).tolist()[::-1]

    def __iter__(self) -> Iterator[int]:
        """Itself."""
        return self

    def __next__(self) -> int:
        """The next that is taken."""
        until = self.passes + MOST_SKIPPED
        while self.passes < until:
            while self._rest:
                index = self._rest.pop()
                if self._rng.random() < self._probability(self._ids_N[index]):
                    return index
            self.passes += 1
            self._begin(self.passes)
        raise ConfigurationError(f"every prompt was skipped in {MOST_SKIPPED} passes")


class SupplySampler(Sampler[int]):
    """Each prompt G times in a row, each generation as often as it is asked for.

    An epoch has as many generations as without skipping.
    """

    def __init__(self, supply: PromptSupply, args: DPPOConfig) -> None:
        self._supply, self._args = supply, args

    def __len__(self) -> int:
        """Rows of an epoch."""
        args = self._args
        rows = args.prompts_per_generation * args.group_size * args.batches_per_generation
        return self._generations * rows

    @property
    def _generations(self) -> int:
        return len(self._supply._ids_N) // self._args.prompts_per_generation

    def __iter__(self) -> Iterator[int]:
        """The rows of an epoch."""
        for _ in range(self._generations):
            chosen = [next(self._supply) for _ in range(self._args.prompts_per_generation)]
            rows = np.repeat(chosen, self._args.group_size).tolist()
            for _ in range(self._args.batches_per_generation):
                yield from rows
