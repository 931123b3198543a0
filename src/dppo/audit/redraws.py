"""Whether a pruned gradient is unbiased, and how much it varies, from redraws of one step.

g = sum_P G_P is the full gradient of a step, prompt by prompt; ghat_r are the R pruned gradients
of independent draws at the same parameters and rows; d_r = ghat_r - g. All may be sketched by one
linear map: whatever is unbiased stays so.

* along g: a_r = <ghat_r, g> / |g|^2 has mean 1; its mean, standard error s = std(a) / sqrt(R) and
  z = (mean - 1) / s;
* in any direction: U = sum_{r != s} <d_r, d_s> / (R (R - 1)) has mean |E d|^2. Without bias its
  terms over pairs r < s are uncorrelated, each with variance E <d_r, d_s>^2 = tr(Sigma^2), Sigma
  the covariance of d, so

      Var U = 2 tr(Sigma^2) / (R (R - 1)),   estimated by   2 T / (R (R - 1)),
      T = sum_{r != s} <d_r, d_s>^2 / (R (R - 1)),   and   z = U / sqrt(2 T / (R (R - 1))).

  As T holds what U does, z is at most sqrt(R (R - 1) / 2): fewer than 7 redraws never reach 4.
  z is skewed to the right where d has few dimensions, tr(Sigma)^2 / tr(Sigma^2);
* inflation: E |d|^2 / sum_P |G_P|^2, the mean over r, with its standard error.

Suffixes: `_R` redraws, `_P` prompts, `_K` numbers of a gradient or its sketch.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import finite, same_shape
from dppo.errors import InvalidInputError

__all__ = ["SUSPICIOUS", "Redraws", "measure_redraws"]

SUSPICIOUS = 4.0
"""|z| above which something is taken to be wrong."""


@dataclass(frozen=True)
class Redraws:
    """What redraws of one step show."""

    redraws: int
    along: float
    """Mean of <ghat, g> / |g|^2; 1 without bias."""
    along_error: float
    """Its standard error."""
    along_z: float
    """Its distance from 1 in standard errors."""
    bias: float
    """Estimate of |E d|^2 / |g|^2, without bias of its own: may be negative."""
    bias_z: float
    """That in standard deviations of what it is without bias."""
    dimensions: float
    """About how many directions the redraws differ in, tr(Sigma)^2 / tr(Sigma^2); 0: in none."""
    inflation: float
    """E |d|^2 / sum_P |G_P|^2."""
    inflation_error: float
    """Its standard error."""

    @property
    def suspicious(self) -> bool:
        """Whether there seems to be a bias."""
        return max(abs(self.along_z), self.bias_z) > SUSPICIOUS

    def to_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return asdict(self)


def measure_redraws(full_PK: ArrayLike, redraws_RK: ArrayLike) -> Redraws:
    """Compare redraws of a step's pruned gradient with the full one.

    Args:
        full_PK: Shape (P, K). Gradient of each prompt; their sum is the full gradient.
        redraws_RK: Shape (R, K). Pruned gradients.

    Raises:
        InvalidInputError: Shapes differ, fewer than two redraws, or the full gradient is 0.

    Example:
        >>> from dppo.audit.redraws import measure_redraws
        >>> found = measure_redraws([[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]])
        >>> found.along, found.inflation
        (1.0, 1.0)
    """
    full, drawn = finite("full_PK", full_PK, ndim=2), finite("redraws_RK", redraws_RK, ndim=2)
    same_shape("redraws_RK", drawn, (len(drawn), full.shape[1]))
    count = len(drawn)
    if count < 2:
        raise InvalidInputError(f"redraws_RK has {count} redraws: errors take at least 2")
    g = full.sum(axis=0)
    square, between = float(g @ g), float((full**2).sum())
    if square == 0:
        raise InvalidInputError("the full gradient is 0: there is nothing to compare with")
    along_R, d_RK = drawn @ g / square, drawn - g
    along, along_error = float(along_R.mean()), float(along_R.std(ddof=1) / np.sqrt(count))
    gram = d_RK @ d_RK.T
    square_R = np.diag(gram).copy()
    np.fill_diagonal(gram, 0.0)
    pairs = count * (count - 1)
    bias, spread = float(gram.sum()) / pairs, float((gram**2).sum()) / pairs
    return Redraws(
        redraws=count,
        along=along,
        along_error=along_error,
        along_z=_ratio(along - 1, along_error),
        bias=bias / square,
        bias_z=_ratio(bias, np.sqrt(2 * spread / pairs)),
        dimensions=_ratio(float(square_R.mean()) ** 2, spread),
        inflation=float(square_R.mean()) / between,
        inflation_error=float(square_R.std(ddof=1)) / between / float(np.sqrt(count)),
    )


def _ratio(above: float, below: float) -> float:
    """0 where both are."""
    if below == 0:
        return 0.0 if above == 0 else float(np.copysign(np.inf, above))
    return float(above / below)
