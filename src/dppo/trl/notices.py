"""What a user should be told once: notes about what is normal, warnings about what is not."""

import logging
import warnings

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SILENT_GENERATIONS = 10
"""Generations in a row without a gradient after which a warning is due."""

FEW = 4
"""Survivors of an optimizer step below which a warning is due."""

HOST_TOLERANCE = 1e-2
"""Relative difference of advantages that float32 rounding of rewards explains."""


class Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._silent = 0
        self._reasons: dict[str, int] = {}

    def surprisal(self, surprisal_N: NDArray[np.float64], loss_tokens_N: NDArray[np.int64]) -> None:
        """Without the rollout's log-probs, sizes are coarser."""
        in_loss = loss_tokens_N > 0
        if in_loss.any() and np.isnan(surprisal_N[in_loss]).all() and self._first("surprisal"):
            logger.warning(
                "the rollout gave no log-probs (continuous batching, or several turns with tools): "
                "completions are sized by advantage and cost alone. Still unbiased; on recorded "
                "gradients that gives up about a tenth of the efficiency"
            )

    def drift(self, difference: float, largest: float) -> None:
        """The host's advantages are not those that the probabilities were computed from."""
        if difference > HOST_TOLERANCE * max(largest, 1.0) and self._first("drift"):
            warnings.warn(
                f"the host's advantages differ by up to {difference:.3g} from those that pruning "
                "assumed. The gradient stays unbiased, but probabilities are not the best ones",
                stacklevel=2,
            )

    def live(self, live_share: float, dropped: dict[str, int]) -> None:
        """Warn when nothing has had a gradient for a while, and say why."""
        if live_share > 0:
            self._silent, self._reasons = 0, {}
            return
        self._silent += 1
        for reason, count in dropped.items():
            self._reasons[reason] = self._reasons.get(reason, 0) + count
        if self._silent >= SILENT_GENERATIONS and self._first("silent"):
            total = sum(self._reasons.values())
            shares = ", ".join(
                f"{_PLAIN[reason]} {count / total:.0%}"
                for reason, count in self._reasons.items()
                if count
            )
            warnings.warn(
                f"no gradient in {self._silent} generations in a row; completions: {shares}. "
                "Nothing is learned from them: vary the difficulty of the prompts, the group size "
                "or the temperature (constant groups), or max_completion_length (truncated ones)",
                stacklevel=2,
            )

    def few(self, kept: float) -> None:
        """Legal, but hardly what was meant."""
        if 0 < kept < FEW and self._first("few"):
            logger.warning(
                "an optimizer step trains on %.0f completions only: its gradient is unbiased but "
                "very noisy. Raise completion_keep or the batch",
                kept,
            )

    def zero_loss(self, loss: float, grad_norm: float) -> None:
        """The most asked question: a loss of 0 with a gradient is as it should be."""
        if abs(loss) < 1e-6 and grad_norm > 0 and self._first("zero loss"):
            logger.info(
                "loss is 0 and that is normal: advantages are centred and the ratio is 1, so the "
                "value is 0 while the gradient is not (grad_norm %.3g). Watch reward and grad_norm",
                grad_norm,
            )

    def first_kl(self, value: float) -> None:
        """A KL that does not start near 0 means another reference than the user may think."""
        if self._first("kl"):
            logger.info("first KL to the reference: %.3g", value)

    def _first(self, what: str) -> bool:
        new = what not in self._said
        self._said.add(what)
        return new


_PLAIN = {
    "all_right": "all right (every reward of the group 1)",
    "all_wrong": "all wrong (every reward of the group 0)",
    "constant": "the same other reward in the group",
    "masked": "truncated and masked",
    "unscorable": "without a score",
    "zero_advantage": "advantage exactly 0",
    "sampled_out": "sampled out",
}
