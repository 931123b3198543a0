"""Bias, variance, cost and efficiency of a method on recorded completions.

With gradients g_i (advantage included) and factors f_i, what is trained on is sum f_i g_i.

* bias: |E sum f_i g_i - sum g_i| / |sum g_i|, exact, from the factors' means;
* variance: E |sum (f_i - E f_i) g_i|^2 / sum_P |G_P|^2, relative to what a batch's gradient varies
  by from prompt to prompt, G_P being a prompt's; closed where draws are independent, else the mean
  of draws, with its standard error. Without gradients it is predicted (`dppo.pruning_variance`);
* efficiency: 1 / ((1 + v) cost), only of methods without bias; what pruning cannot shorten is the
  share f of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dppo._checks import Floats
from dppo.audit.methods import Method
from dppo.audit.recording import Recording
from dppo.errors import InvalidInputError
from dppo.estimator.diagnostics import (
    effective_sample_size,
    predicted_efficiency,
    pruning_variance,
)
from dppo.estimator.sizes import completion_norms

__all__ = ["ROLLOUT_SHARES", "Measured", "measure"]

ROLLOUT_SHARES = (0.3, 0.5, 0.7)
TOLERANCE = 1e-9
"""Of the bias, for rounding."""


@dataclass(frozen=True)
class Measured:
    """Of one method at one rate."""

    name: str
    rate: str
    bias: float | None
    """None: no gradients are recorded, and the factors' means are not all 1."""
    cosine: float | None
    """Of the mean with the full gradient; None without gradients."""
    variance: float
    variance_error: float | None
    """Standard error; None where exact, or predicted."""
    cost: float
    """Expected share of the training cost."""
    rollout: float
    """Rollouts against those of the full batch."""
    sample_size: float
    """Effective, of the weighted norms, as a share of the kept completions."""
    largest_weight: float
    efficiency: dict[float, float] | None
    """By rollout share; None where biased."""


def measure(
    recording: Recording,
    methods: Sequence[Method],
    *,
    draws: int = 200,
    seed: int = 0,
    design: str = "systematic",
) -> list[Measured]:
    """Measure every method.

    Args:
        recording: The completions.
        methods: From `unbiased_methods`, `biased_methods`.
        draws: Of each method, where a mean of draws is taken.
        seed: Of those.
        design: Of the unbiased methods, for predictions.

    Raises:
        InvalidInputError: Fewer than two draws, or no completion has a gradient.
    """
    if draws < 2:
        raise InvalidInputError(f"draws={draws}: a mean of draws with its error takes at least 2")
    if not (recording.advantages_PG != 0).any():
        raise InvalidInputError("every advantage is 0: there is no gradient to thin")
    return [
        _measured(recording, method, np.random.default_rng([seed, number]), draws, design)
        for number, method in enumerate(methods)
    ]


def _measured(
    recording: Recording, method: Method, rng: np.random.Generator, draws: int, design: str
) -> Measured:
    live = recording.advantages_PG != 0
    factors = np.array([method.draw(rng) for _ in range(draws)])
    kept = factors != 0
    cost = recording.cost_PG
    if method.pi_PG is not None:
        share = float((method.pi_PG * cost).sum() / cost.sum())
    else:
        share = float((kept * cost).sum(axis=(1, 2)).mean() / cost.sum())
    bias, cosine = _bias(recording, method, live)
    variance, error = _variance(recording, method, factors, design)
    norm = _norms(recording, live)
    weighted = [f[k & live] * norm[k & live] for f, k in zip(factors, kept, strict=True)]
    sizes = [effective_sample_size(np.abs(w)) / w.size for w in weighted if np.any(w)]
    exact = bias is not None and bias <= TOLERANCE
    return Measured(
        method.name,
        method.rate,
        bias,
        cosine,
        variance,
        error,
        share,
        method.rollout,
        float(np.mean(sizes)) if sizes else 0.0,
        float(np.abs(factors[:, live]).max()),
        {f: predicted_efficiency(variance, share, rollout_share=f) for f in ROLLOUT_SHARES}
        if exact
        else None,
    )


def _norms(recording: Recording, live: np.ndarray) -> Floats:
    if recording.gradients_PGK is not None:
        return np.linalg.norm(recording.gradients_PGK, axis=2)
    return completion_norms(recording.advantages_PG, surprisal=recording.surprisal_PG, live=live)


def _bias(
    recording: Recording, method: Method, live: np.ndarray
) -> tuple[float | None, float | None]:
    if recording.gradients_PGK is None:
        return (0.0 if np.allclose(method.mean_PG[live], 1) else None), None
    full = recording.gradients_PGK.sum(axis=(0, 1))
    mean = np.tensordot(method.mean_PG, recording.gradients_PGK, axes=2)
    length, other = float(np.linalg.norm(full)), float(np.linalg.norm(mean))
    cosine = float(full @ mean / (length * other)) if length * other else 0.0
    return float(np.linalg.norm(mean - full)) / length if length else 0.0, cosine


def _variance(
    recording: Recording, method: Method, factors: Floats, design: str
) -> tuple[float, float | None]:
    if recording.gradients_PGK is None:
        norm = _norms(recording, recording.advantages_PG != 0)
        if method.pi_PG is not None:
            return pruning_variance(norm, method.pi_PG, design=design), None
        spread = ((factors - method.mean_PG) ** 2).mean(axis=0)
        return float((spread * norm**2).sum() / (norm**2).sum()), None
    gradients = recording.gradients_PGK
    between = float((gradients.sum(axis=1) ** 2).sum())
    if method.independent and method.pi_PG is not None:
        live = method.pi_PG > 0
        square = (gradients**2).sum(axis=2)[live]
        return float(((1 / method.pi_PG[live] - 1) * square).sum()) / between, None
    flat = gradients.reshape(-1, gradients.shape[2])
    off = (factors - method.mean_PG).reshape(len(factors), -1) @ flat
    each = (off**2).sum(axis=1) / between
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))
