r"""How much a completion is worth: norm, then size.

For the Horvitz-Thompson estimator the variance-optimal inclusion probability per unit of cost is
pi_i proportional to ||g_i|| / sqrt(cost_i) (Cauchy-Schwarz on variance x cost; the same optimum as
Neyman allocation with unequal costs, Cochran, *Sampling Techniques*, 5.5). The gradient norm
||g_i|| is not known before the backward pass; a nearly free stand-in is

    norm   n_i = w_q max(|A_i|, a_floor) max(h_i, h_floor) / D_i
    size   s_i = n_i / sqrt(cost_i)

with h the surprisal norm of the completion. Neither enters the estimate: a bad stand-in costs
variance, never bias.

Suffixes: `_P` prompts, `_PG` prompts x group, `_T` tokens.
"""

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import (
    Bools,
    Floats,
    as_bools,
    as_floats,
    finite,
    non_negative,
    not_empty,
    one_of,
    reject,
    same_shape,
)

__all__ = ["completion_norms", "completion_sizes", "surprisal_norm"]

SURPRISAL_FLOOR = 0.2
"""Smallest surprisal norm, in medians over the live rows. Measured on recorded gradients: costs no
efficiency (1.857 against 1.855) and makes the largest weights ten times smaller."""

DEFAULT_ADVANTAGE_FLOOR = 0.1
"""|A| assumed for a live row whose advantage is 0: another term of the loss (KL, entropy) acts."""


def surprisal_norm(logps_PGT: ArrayLike, mask_PGT: ArrayLike, *, per: str = "sequence") -> Floats:
    r"""Norm of the completion's log-prob gradient with respect to the logits, up to sqrt(2).

        h_i = sqrt( sum_t m_t (1 - p_t)^2 ) / (T_i for a per-sequence mean, 1 for a token sum)

    since 1 - p_y <= ||e_y - p|| <= sqrt(2) (1 - p_y) for the gradient e_y - p of log p_y.

    Args:
        logps_PGT: Shape (..., T). Log-probability of each sampled token under the sampling policy,
            <= 0, as the rollout engine returns it.
        mask_PGT: Shape (..., T). 1 where the token is part of the loss.
        per: "sequence" if the loss averages over the tokens of a completion (grpo, sapo), "token"
            if it sums them (dapo, dr_grpo, bnpo, cispo, vespo, luspo).

    Returns:
        Shape (...). 0 for a completion without tokens.

    Raises:
        InvalidInputError: A log-probability under the mask is NaN, infinite or above 0.

    Example:
        >>> import math, dppo
        >>> dppo.surprisal_norm([[math.log(0.5), math.log(0.5)]], [[1, 1]]).round(4).tolist()
        [0.3536]
    """
    one_of("per", per, ("sequence", "token"))
    logps = as_floats("logps_PGT", logps_PGT)
    mask = as_bools("mask_PGT", mask_PGT, logps.shape)
    # 0.01: what float16 rounding may leave above log 1.
    bad = mask & ~((logps > -np.inf) & (logps <= 1e-2))
    reject("logps_PGT", logps, bad, "must be finite log-probabilities <= 0 under the mask")
    surprise = -np.expm1(np.where(mask, np.minimum(logps, 0.0), 0.0))
    norm = np.sqrt((surprise**2).sum(axis=-1))
    return norm / np.maximum(mask.sum(axis=-1), 1) if per == "sequence" else norm


def completion_norms(
    advantages_PG: ArrayLike,
    *,
    surprisal: ArrayLike | None = None,
    weight_P: ArrayLike | None = None,
    advantage_floor: float = 0.0,
    live: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
) -> Floats:
    """Assumed gradient norm of each completion, n = w_q max(|A|, a_floor) max(h, h_floor) / D.

    Args:
        advantages_PG: Shape (P, G).
        surprisal: Shape (P, G). h as `surprisal_norm` returns it; None means h = 1 for all.
        weight_P: Shape (P,). Weight 1/pi_q of each prompt; None means 1.
        advantage_floor: Smallest |A|, in units of the advantage; above 0 only while another term
            of the loss is active, whose gradient does not vanish with the advantage.
        live: Shape (P, G). Rows that have a gradient. Default: advantage != 0 if `advantage_floor`
            is 0, else all rows.
        denominator: Shape (P, G). The row's own divisor in the loss where rows differ (bnpo).

    Returns:
        Shape (P, G). Exactly 0 where not live, above 0 where live.

    Raises:
        InvalidInputError: Shapes differ, a value is not finite, or a size would be negative.

    Example:
        >>> import dppo
        >>> dppo.completion_norms([[2.0, -1.0, 0.0]]).tolist()
        [[2.0, 1.0, 0.0]]
    """
    advantages = finite("advantages_PG", advantages_PG, ndim=2)
    not_empty("advantages_PG", advantages)
    floor = non_negative("advantage_floor", advantage_floor)
    shape = advantages.shape
    if live is None:
        live_PG: Bools = advantages != 0 if floor == 0 else np.ones(shape, dtype=np.bool_)
    else:
        live_PG = as_bools("live", live, shape)
    magnitude = np.maximum(np.abs(advantages), floor)
    magnitude = np.where(magnitude == 0, DEFAULT_ADVANTAGE_FLOOR, magnitude)
    norm = magnitude * _floored_surprisal(surprisal, live_PG)
    if weight_P is not None:
        weight = finite("weight_P", weight_P, ndim=1)
        same_shape("weight_P", weight, shape[:1])
        reject("weight_P", weight, weight <= 0, "must be > 0")
        norm = norm * weight[:, None]
    if denominator is not None:
        norm = norm / _positive("denominator", denominator, live_PG)
    return _above_zero(norm, live_PG)


def completion_sizes(
    advantages_PG: ArrayLike,
    *,
    surprisal: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    weight_P: ArrayLike | None = None,
    advantage_floor: float = 0.0,
    live: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
) -> Floats:
    """Size of each completion, s = n / sqrt(cost); inclusion probabilities are proportional to it.

    Args:
        advantages_PG: Shape (P, G).
        surprisal: See `completion_norms`, like the arguments not named here.
        cost: Shape (P, G). What training on the row costs, in any unit: prompt + completion
            tokens. None means that all rows cost the same.
        weight_P: Shape (P,).
        advantage_floor: In units of the advantage.
        live: Shape (P, G).
        denominator: Shape (P, G).

    Returns:
        Shape (P, G). Exactly 0 where not live, above 0 where live.

    Raises:
        InvalidInputError: As `completion_norms`; or a live row has cost <= 0.

    Example:
        >>> import dppo
        >>> dppo.completion_sizes([[2.0, -1.0]], cost=[[4.0, 1.0]]).tolist()
        [[1.0, 1.0]]
    """
    norm = completion_norms(
        advantages_PG,
        surprisal=surprisal,
        weight_P=weight_P,
        advantage_floor=advantage_floor,
        live=live,
        denominator=denominator,
    )
    if cost is None:
        return norm
    return _above_zero(norm / np.sqrt(_positive("cost", cost, norm > 0)), norm > 0)


def _above_zero(value: Floats, live: Bools) -> Floats:
    """0 exactly where not live, never by underflow."""
    return np.where(live, np.maximum(value, np.finfo(np.float64).tiny), 0.0)


def _floored_surprisal(surprisal: ArrayLike | None, live: Bools) -> Floats:
    if surprisal is None:
        return np.ones(live.shape)
    values = finite("surprisal", surprisal)
    same_shape("surprisal", values, live.shape)
    reject("surprisal", values, values < 0, "must be >= 0")
    of_live = values[live]
    if not (of_live > 0).any():
        return np.ones(live.shape)  # nothing to tell the rows apart by
    typical = np.median(of_live) or np.median(of_live[of_live > 0])
    return np.maximum(values, SURPRISAL_FLOOR * typical)


def _positive(name: str, value: ArrayLike, needed: Bools) -> Floats:
    array = finite(name, value)
    same_shape(name, array, needed.shape)
    reject(name, array, (array < 0) | (needed & (array == 0)), "must be > 0 for a live row")
    return np.where(array > 0, array, 1.0)
