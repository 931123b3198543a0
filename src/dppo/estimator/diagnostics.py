"""What pruning costs and gains, before and after it is done. Nothing here changes an estimate."""

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import Floats, finite, not_empty, one_of, reject, same_shape, share
from dppo.errors import InvalidInputError
from dppo.types import check_inclusion

__all__ = ["effective_sample_size", "predicted_efficiency", "pruning_variance"]

DESIGN_VARIANCE = {"poisson": 1.0, "systematic": 0.5}
"""kappa: the share of Poisson's variance a design has left. 0.5 for systematic with stratified
order is conservative on recorded gradients, where it was 0.3-0.5."""


def effective_sample_size(weights: ArrayLike) -> float:
    """Kish's effective sample size, (sum w)^2 / sum w^2.

    The number of equally weighted rows whose mean would be as steady. Pass weight x norm to weigh
    rows by what they contribute.

    Args:
        weights: Any shape, >= 0; zeros (rows not kept) do not count.

    Raises:
        InvalidInputError: No weight is above 0, or one is negative or not finite.

    Example:
        >>> import dppo
        >>> dppo.effective_sample_size([1.0, 1.0, 0.0])
        2.0
    """
    weight = finite("weights", weights)
    reject("weights", weight, weight < 0, "must be >= 0")
    if not (weight > 0).any():
        raise InvalidInputError("weights are all zero: nothing was kept, there is no sample")
    weight = weight / weight.max()
    return float(weight.sum() ** 2 / (weight**2).sum())


def pruning_variance(norm: ArrayLike, pi: ArrayLike, *, design: str = "poisson") -> float:
    """Predicted relative variance that pruning adds to the gradient.

        v = kappa * sum((1/pi - 1) norm^2) / sum(norm^2)

    over the rows with norm > 0: the variance of the Horvitz-Thompson estimate under independent
    draws, relative to the sum of squared row gradients. kappa is 1 for "poisson" and 0.5 for
    "systematic" (see `DESIGN_VARIANCE`). A prediction from assumed norms, not a measurement.

    Args:
        norm: Assumed gradient norm of each row, >= 0 (norms, not sizes).
        pi: Inclusion probabilities, same shape; > 0 where norm > 0.
        design: "poisson" or "systematic".

    Returns:
        0 if every row is inert.

    Raises:
        InvalidInputError: Shapes differ, or a row with a gradient has pi = 0.

    Example:
        >>> import dppo
        >>> dppo.pruning_variance([1.0, 1.0], [0.5, 1.0])
        0.5
    """
    kappa = DESIGN_VARIANCE[one_of("design", design, tuple(DESIGN_VARIANCE))]
    norms = finite("norm", norm)
    not_empty("norm", norms)
    reject("norm", norms, norms < 0, "must be >= 0")
    probability = check_inclusion(pi)
    same_shape("pi", probability, norms.shape)
    counts = norms > 0
    reject("pi", probability, counts & (probability == 0), "must be > 0 where norm > 0")
    if not counts.any():
        return 0.0
    square: Floats = (norms[counts] / norms.max()) ** 2
    return float(kappa * ((1 / probability[counts] - 1) * square).sum() / square.sum())


def predicted_efficiency(variance: float, kept_cost: float, *, rollout_share: float) -> float:
    """Progress per unit of compute against the full batch, 1 / ((1 + v) * cost).

    Args:
        variance: Relative variance v that pruning adds.
        kept_cost: Kept share of the training cost, in [0, 1].
        rollout_share: Share of the unpruned step spent on what pruning completions cannot save.

    Example:
        >>> from dppo.estimator.diagnostics import predicted_efficiency
        >>> round(predicted_efficiency(0.16, 0.25, rollout_share=0.3), 2)
        1.81
    """
    fixed = share("rollout_share", rollout_share, zero=True)
    kept = share("kept_cost", kept_cost, zero=True)
    if not 0 <= variance < np.inf:
        raise InvalidInputError(f"variance must be finite and >= 0, got {variance!r}")
    cost = fixed + (1 - fixed) * kept
    return float("inf") if cost == 0 else 1 / ((1 + variance) * cost)


class StepTimes:
    """What the steps of a run took, to predict what pruning gains; each step has a rate of its own.

    Example:
        >>> from dppo.estimator.diagnostics import StepTimes
        >>> times = StepTimes()
        >>> times.add(fixed=1.0, train=1.0, kept=0.5)  # unpruned it would train for 2 s
        >>> round(times.efficiency(0.0, 0.5), 6)
        1.5
    """

    def __init__(self) -> None:
        self._fixed = self._unpruned = 0.0

    def add(self, *, fixed: float, train: float, kept: float) -> None:
        """A step is over; one that trained on nothing says nothing.

        Args:
            fixed: Seconds that pruning completions does not save.
            train: Seconds of training.
            kept: Share of the training cost that was kept, 1 where nothing was pruned.
        """
        if kept > 0:
            self._fixed += fixed
            self._unpruned += train / kept

    def efficiency(self, variance: float, kept_cost: float) -> float | None:
        """`predicted_efficiency` at the rollout share so far; None before any training."""
        if kept_cost == 0 or self._unpruned == 0:
            return None
        share_so_far = self._fixed / (self._fixed + self._unpruned)
        return predicted_efficiency(variance, kept_cost, rollout_share=share_so_far)
