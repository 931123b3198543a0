"""Weights and denominators: what makes the pruned gradient an unbiased estimate.

    g_hat = sum over kept i of  w_i * d l_i / d theta / D,    w_i = 1 / pi_i

has E[g_hat] = sum_i d l_i / d theta / D = g (Horvitz & Thompson 1952), because E[kept_i] = pi_i.
It needs two things: the weight multiplies the *whole* gradient of the completion (policy term,
KL, entropy), and D is the full batch's, untouched by what was kept. Hosts divide by what they see
in the micro-batch they are given; `gradient_factor` undoes exactly that.

Suffixes: `_N` flat rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from dppo._checks import Floats, finite, natural, one_of, reject, same_shape
from dppo.errors import InvalidInputError, UnsupportedLossError
from dppo.types import check_inclusion

__all__ = [
    "Denominator",
    "check_prompt_pruning",
    "gradient_factor",
    "loss_denominator",
    "prompt_phase_factor",
    "two_phase_inclusion",
]

Kind = Literal["rows", "generation tokens", "micro-batch tokens"]
KINDS: tuple[Kind, ...] = ("rows", "generation tokens", "micro-batch tokens")


@dataclass(frozen=True)
class Denominator:
    """How a loss type averages.

    Attributes:
        kind: "rows": the mean over the rows of a micro-batch. "generation tokens": the sum over
            the loss tokens of the whole generation, a constant that the host stores.
            "micro-batch tokens": the mean over the loss tokens of a micro-batch.
        per: What one row contributes: its "sequence" mean, or the sum over its "token"s.
    """

    kind: Kind
    per: Literal["sequence", "token"]


_DENOMINATORS = {
    "grpo": Denominator("rows", "sequence"),
    "sapo": Denominator("rows", "sequence"),
    "luspo": Denominator("rows", "token"),
    "dr_grpo": Denominator("rows", "token"),
    "dapo": Denominator("generation tokens", "token"),
    "cispo": Denominator("generation tokens", "token"),
    "vespo": Denominator("generation tokens", "token"),
    "bnpo": Denominator("micro-batch tokens", "token"),
}


def loss_denominator(loss_type: str) -> Denominator:
    """How `loss_type` averages over rows and tokens.

    Raises:
        UnsupportedLossError: The loss type is unknown; a guess could be off by any factor.

    Example:
        >>> from dppo.estimator.weights import loss_denominator
        >>> loss_denominator("dapo").kind
        'generation tokens'
    """
    try:
        return _DENOMINATORS[loss_type]
    except KeyError:
        raise UnsupportedLossError(
            f"loss_type {loss_type!r} has no known denominator, so its pruned gradient cannot be "
            f"made unbiased; known: {', '.join(_DENOMINATORS)}. Switch pruning off (keep rates "
            "of 1.0) to train with it"
        ) from None


def gradient_factor(
    weight_N: ArrayLike,
    kind: Kind,
    *,
    rows: int,
    full_rows: int,
    tokens: int,
    full_tokens_N: ArrayLike,
) -> Floats:
    """What to multiply each row's gradient by, so that the host's loss gives w_i g_i / D.

        rows                 w * rows / full_rows
        generation tokens    w
        micro-batch tokens   w * tokens / full_tokens_N

    Args:
        weight_N: Shape (N,). Horvitz-Thompson weight of each row of the micro-batch that is run.
        kind: Of the loss type (`loss_denominator`). The entropy bonus is always
            "micro-batch tokens".
        rows: Rows the host sees in that micro-batch, padding rows included.
        full_rows: Rows of a micro-batch before pruning.
        tokens: Loss tokens the host sees in that micro-batch.
        full_tokens_N: Shape (N,). Loss tokens of each row's micro-batch before pruning.

    Returns:
        Shape (N,).

    Example:
        >>> from dppo.estimator.weights import gradient_factor
        >>> gradient_factor([2.0], "rows", rows=1, full_rows=4, tokens=3, full_tokens_N=[9]).item()
        0.5
    """
    one_of("kind", kind, KINDS)
    weight = finite("weight_N", weight_N, ndim=1)
    reject("weight_N", weight, weight < 0, "must be >= 0")
    if natural("full_rows", full_rows) == 0 or natural("rows", rows) == 0:
        raise InvalidInputError(f"rows={rows} and full_rows={full_rows} must be at least 1")
    natural("tokens", tokens)
    if kind == "rows":
        return weight * (rows / full_rows)
    if kind == "generation tokens":
        return weight
    full = finite("full_tokens_N", full_tokens_N, ndim=1)
    same_shape("full_tokens_N", full, weight.shape)
    # The host clamps an empty mean's denominator to 1; a row without tokens has no gradient.
    return weight * max(tokens, 1) / np.maximum(full, 1.0)


def prompt_phase_factor(
    kind: Kind, pi_prompt_P: ArrayLike, *, candidates: int, tokens_P: ArrayLike
) -> float:
    """What to multiply gradients by when the host divided by the prompts that were rolled out.

        rows                 K / M                      the host's K * G rows become M * G
        generation tokens    sum(T_q) / sum(T_q / pi_q)  the token total becomes its estimate

    The first is exact. The second divides one estimate by another: its bias is O(1 / K).

    Args:
        kind: Of the loss type.
        pi_prompt_P: Shape (K,). Inclusion probability of each prompt that was rolled out.
        candidates: Prompts of the window they were drawn from, M.
        tokens_P: Shape (K,). Loss tokens of each prompt's completions, T_q.

    Raises:
        UnsupportedLossError: The host divides by the tokens of a micro-batch: with one prompt in
            it, the weight would cancel.

    Example:
        >>> from dppo.estimator.weights import prompt_phase_factor
        >>> prompt_phase_factor("rows", [0.5, 0.5], candidates=4, tokens_P=[3, 3])
        0.5
    """
    pi = check_inclusion(pi_prompt_P, name="pi_prompt_P", ndim=1)
    reject("pi_prompt_P", pi, pi == 0, "must be > 0: the prompt was rolled out")
    if natural("candidates", candidates) < pi.size:
        raise InvalidInputError(f"candidates={candidates} is less than the {pi.size} rolled out")
    if kind == "rows":
        return pi.size / candidates
    if kind == "generation tokens":
        tokens = finite("tokens_P", tokens_P, ndim=1)
        same_shape("tokens_P", tokens, pi.shape)
        total = float((tokens / pi).sum())
        return float(tokens.sum()) / total if total > 0 else 1.0
    raise _weight_would_cancel(f"a mean over {kind}")


def check_prompt_pruning(loss_type: str, *, entropy_coef: float = 0.0) -> None:
    """Refuse a loss that prompts cannot be pruned under.

    Raises:
        UnsupportedLossError: It divides by the tokens of a micro-batch, as "bnpo" and the entropy
            bonus of every loss type do, or it is unknown.

    Example:
        >>> from dppo.estimator.weights import check_prompt_pruning
        >>> check_prompt_pruning("dr_grpo")
    """
    kind = loss_denominator(loss_type).kind
    if entropy_coef != 0:
        raise _weight_would_cancel(f"entropy_coef={entropy_coef}")
    if kind == "micro-batch tokens":
        raise _weight_would_cancel(f"loss_type={loss_type!r}")


def _weight_would_cancel(cause: str) -> UnsupportedLossError:
    return UnsupportedLossError(
        f"{cause} divides by the tokens of a micro-batch; which prompts share one depends on the "
        "draw, and with one prompt in it the weight would cancel. Use another loss_type and "
        "entropy_coef=0, or set prompt_keep=1.0"
    )


def two_phase_inclusion(pi_prompt_P: ArrayLike, pi_completion_PG: ArrayLike) -> Floats:
    """Inclusion probability over both phases, pi_q * pi_i|q (Saerndal's pi*-estimator).

    pi_i|q may depend on which prompts were drawn and on everything rolled out from them.

    Args:
        pi_prompt_P: Shape (P,). In (0, 1].
        pi_completion_PG: Shape (P, G). In [0, 1].

    Returns:
        Shape (P, G).

    Example:
        >>> from dppo.estimator.weights import two_phase_inclusion
        >>> two_phase_inclusion([0.5], [[0.5, 1.0]]).tolist()
        [[0.25, 0.5]]
    """
    prompt = check_inclusion(pi_prompt_P, name="pi_prompt_P", ndim=1)
    reject("pi_prompt_P", prompt, prompt == 0, "must be > 0: the prompt was rolled out")
    completion = check_inclusion(pi_completion_PG, name="pi_completion_PG", ndim=2)
    same_shape("pi_prompt_P", prompt, completion.shape[:1])
    return prompt[:, None] * completion
