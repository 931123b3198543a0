"""Effective sample size, predicted variance, predicted efficiency.

Tolerance 1e-12 unless said otherwise: a few float64 operations on numbers of order 1.
"""

import math

import numpy as np
import pytest

import dppo
from dppo.estimator.diagnostics import StepTimes, predicted_efficiency


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1, 1, 1, 1], 4.0),
        ([5, 5], 2.0),
        ([1, 0, 0], 1.0),
        ([1, 2, 3], 36 / 14),  # (1 + 2 + 3)^2 / (1 + 4 + 9)
        ([[1, 2], [3, 0]], 36 / 14),
        ([1e300, 1e300], 2.0),  # squares overflow unless scaled first
        ([1e-300, 1e-300], 2.0),
    ],
)
def test_effective_sample_size_table(weights, size):
    assert dppo.effective_sample_size(weights) == pytest.approx(size, abs=1e-12)


def test_effective_sample_size_of_nothing_is_refused():
    for nothing in ([0.0, 0.0], []):
        with pytest.raises(dppo.InvalidInputError, match="weights are all zero"):
            dppo.effective_sample_size(nothing)


@pytest.mark.parametrize(
    ("norm", "pi", "variance"),
    [
        ([1, 1], [1, 1], 0.0),
        ([1, 1], [0.5, 0.5], 1.0),
        ([2, 1], [0.8, 0.2], 1.0),  # (0.25 * 4 + 4 * 1) / 5
        ([2, 1, 0], [0.8, 0.2, 0.0], 1.0),
        ([2, 1, 0], [0.8, 0.2, 0.7], 1.0),
        ([0, 0], [0, 0], 0.0),
        ([2e200, 1e200], [0.8, 0.2], 1.0),
    ],
)
def test_pruning_variance_table(norm, pi, variance):
    assert dppo.pruning_variance(norm, pi) == pytest.approx(variance, abs=1e-12)
    halved = dppo.pruning_variance(norm, pi, design="systematic")
    assert halved == pytest.approx(variance / 2, abs=1e-12)


def test_pruning_variance_is_that_of_poisson_sampling():
    # Rows with orthogonal gradients: the relative variance is exactly the prediction.
    norm, pi = np.array([3.0, 1.0, 0.5, 2.0]), np.array([0.9, 0.3, 0.2, 0.5])
    gradient = np.diag(norm)
    second = sum(p * ((s.weight @ gradient - norm) ** 2).sum() for p, s in dppo.outcomes(pi))
    assert dppo.pruning_variance(norm, pi) == pytest.approx(second / (norm**2).sum(), abs=1e-12)


def test_a_row_with_a_gradient_and_no_chance_is_refused():
    with pytest.raises(dppo.InvalidInputError, match=r"pi must be > 0 where norm > 0: pi\[1\]"):
        dppo.pruning_variance([1.0, 1.0], [0.5, 0.0])


def test_predicted_efficiency_table():
    # 1 / ((1 + v) * (f + (1 - f) * kept))
    assert predicted_efficiency(0.0, 1.0, rollout_share=0.5) == 1.0
    assert predicted_efficiency(0.25, 0.5, rollout_share=0.0) == pytest.approx(1.6, abs=1e-12)
    assert predicted_efficiency(0.0, 0.5, rollout_share=1.0) == 1.0
    assert predicted_efficiency(0.0, 0.0, rollout_share=0.0) == math.inf
    for variance in (-0.1, math.nan, math.inf):
        with pytest.raises(dppo.InvalidInputError, match="variance"):
            predicted_efficiency(variance, 0.5, rollout_share=0.5)


def test_each_step_counts_at_its_own_rate():
    times = StepTimes()
    assert times.efficiency(0.0, 0.5) is None
    times.add(fixed=1.0, train=1.0, kept=0.5)
    times.add(fixed=1.0, train=0.2, kept=0.1)  # 2 s each without pruning: a rollout share of 1/3
    times.add(fixed=9.0, train=0.0, kept=0.0)  # of what it would have trained, nothing is known
    expected = predicted_efficiency(0.1, 0.1, rollout_share=1 / 3)
    assert times.efficiency(0.1, 0.1) == pytest.approx(expected, rel=1e-12)
    assert times.efficiency(0.1, 0.0) is None
