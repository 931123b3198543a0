"""Surprisal norms, completion norms and sizes, against tables worked by hand.

Tolerance 1e-12 unless said otherwise: a few float64 operations on numbers of order 1.
"""

import math

import numpy as np
import pytest

import dppo

CLOSE = {"rtol": 0, "atol": 1e-12}


def test_surprisal_norm_table():
    # p = 1/2 3/4 1:   1 - p = 1/2 1/4 0; squares 1/4 1/16 0; root of the sum sqrt(5)/4
    # p = 1/2, masked: the rest has no part in it
    logps = np.log([[0.5, 0.75, 1.0], [0.5, 0.1, 0.1], [0.1, 0.1, 0.1]])
    mask = [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    token = dppo.surprisal_norm(logps, mask, per="token")
    np.testing.assert_allclose(token, [math.sqrt(5) / 4, 0.5, 0.0], **CLOSE)
    sequence = dppo.surprisal_norm(logps, mask, per="sequence")
    np.testing.assert_allclose(sequence, [math.sqrt(5) / 12, 0.5, 0.0], **CLOSE)
    np.testing.assert_array_equal(dppo.surprisal_norm(logps, mask), sequence)


def test_surprisal_norm_brackets_the_gradient_with_respect_to_the_logits():
    # The gradient of log p_y is e_y - p; 1 - p_y <= |e_y - p| <= sqrt(2) (1 - p_y).
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(5, 0.7), size=(20, 7))
    token = rng.integers(0, 5, size=(20, 7))
    gradient = np.eye(5)[token] - p
    true = np.sqrt((gradient**2).sum(axis=(1, 2)))
    chosen = np.take_along_axis(p, token[..., None], axis=-1)[..., 0]
    norm = dppo.surprisal_norm(np.log(chosen), np.ones((20, 7)), per="token")
    assert (norm <= true * (1 + 1e-12)).all()
    assert (true <= math.sqrt(2) * norm * (1 + 1e-12)).all()


def test_surprisal_norm_shape_and_values_outside_the_mask():
    logps = np.full((2, 3, 4), -0.5)
    mask = np.ones((2, 3, 4))
    mask[..., 2:] = 0
    expected = dppo.surprisal_norm(logps, mask)
    assert expected.shape == (2, 3)
    for junk in (np.nan, np.inf, -np.inf, 5.0):
        logps[..., 2:] = junk
        np.testing.assert_array_equal(dppo.surprisal_norm(logps, mask), expected)


def test_surprisal_norm_is_accurate_for_confident_tokens_and_allows_rounding_above_zero():
    # 1 - exp(-1e-12) = 1e-12 - 5e-25: cancellation would leave four digits.
    assert dppo.surprisal_norm([[-1e-12]], [[1]])[0] == pytest.approx(1e-12, rel=1e-11)
    assert dppo.surprisal_norm([[1e-3]], [[1]]).tolist() == [0.0]


ADVANTAGES = np.array([[2.0, -1.0, 0.0], [0.5, 0.0, -4.0]])


def test_norms_without_anything_else_are_absolute_advantages():
    expected = np.abs(ADVANTAGES)
    np.testing.assert_array_equal(dppo.completion_norms(ADVANTAGES), expected)
    np.testing.assert_array_equal(dppo.completion_sizes(ADVANTAGES), expected)


def test_norm_multiplies_advantage_surprisal_prompt_weight_and_divides_by_the_denominator():
    # live surprisals 0.4 0.6 0.8 1.0: median 0.7, floor 0.14, which binds nowhere
    norm = dppo.completion_norms(
        ADVANTAGES,
        surprisal=[[0.4, 0.6, 9.0], [0.8, 9.0, 1.0]],
        weight_P=[1.0, 2.5],
        denominator=[[10.0, 10.0, 10.0], [20.0, 20.0, 20.0]],
    )
    # 2*.4/10, 1*.6/10, 0; .5*.8*2.5/20, 0, 4*1*2.5/20
    np.testing.assert_allclose(norm, [[0.08, 0.06, 0.0], [0.05, 0.0, 0.5]], **CLOSE)


def test_size_divides_by_the_root_of_the_cost():
    size = dppo.completion_sizes(ADVANTAGES, cost=[[4.0, 16.0, 1.0], [25.0, 1.0, 100.0]])
    np.testing.assert_allclose(size, [[1.0, 0.25, 0.0], [0.1, 0.0, 0.4]], **CLOSE)


def test_surprisal_has_a_floor_of_a_fifth_of_the_live_median():
    # live surprisals 1 2 3 0: median 1.5, floor 0.3; the row that is not live does not count
    norm = dppo.completion_norms(
        [[1.0, 1.0, 0.0, 1.0, 1.0]], surprisal=[[1.0, 2.0, 50.0, 3.0, 0.0]]
    )
    np.testing.assert_allclose(norm, [[1.0, 2.0, 0.0, 3.0, 0.3]], **CLOSE)


@pytest.mark.parametrize(
    ("surprisal", "norm"),
    [
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),  # nothing to tell the rows apart by
        ([0.0, 0.0, 5.0], [1.0, 1.0, 5.0]),  # median 0: that of the positive ones, 5; floor 1
    ],
)
def test_surprisal_of_zero_never_makes_a_live_row_inert(surprisal, norm):
    actual = dppo.completion_norms([[1.0, 1.0, 1.0]], surprisal=[surprisal])
    np.testing.assert_allclose(actual, [norm], **CLOSE)


def test_products_that_underflow_never_make_a_live_row_inert():
    norm = dppo.completion_norms([[1e-200, 1.0]], surprisal=[[1e-200, 1e-200]])
    assert (norm > 0).all()


def test_live_rows_by_default():
    floored = dppo.completion_norms(ADVANTAGES, advantage_floor=0.75)
    np.testing.assert_array_equal(floored, [[2.0, 1.0, 0.75], [0.75, 0.75, 4.0]])


def test_live_rows_as_told():
    live = [[0, 1, 1], [0, 1, 0]]
    norm = dppo.completion_norms(ADVANTAGES, live=live)
    np.testing.assert_array_equal(norm > 0, np.array(live, dtype=bool))
    assert norm[0, 1] == 1.0  # a live row without an advantage gets an assumed one
    assert 0 < norm[0, 2] == norm[1, 1] < 1


def test_values_of_rows_that_are_not_live_do_not_matter():
    live = [[True, True, False], [True, False, True]]
    base = {"live": live, "surprisal": np.ones((2, 3)), "cost": np.ones((2, 3))}
    expected = dppo.completion_sizes(ADVANTAGES, **base)
    for name in ("surprisal", "cost"):
        changed = np.ones((2, 3))
        changed[~np.array(live)] = 0.0
        size = dppo.completion_sizes(ADVANTAGES, **{**base, name: changed})
        np.testing.assert_array_equal(size, expected)


def test_nothing_live_is_legal():
    zero = np.zeros((2, 3))
    arguments = {"surprisal": zero, "live": zero, "weight_P": [1.0, 2.0]}
    np.testing.assert_array_equal(dppo.completion_norms(zero, **arguments), zero)
    np.testing.assert_array_equal(dppo.completion_sizes(zero, cost=zero, **arguments), zero)
    np.testing.assert_array_equal(dppo.completion_norms(zero), zero)


def test_the_proxy_is_the_optimum_it_is_derived_from():
    # With norms known exactly, size = norm / sqrt(cost) minimises variance x cost over all
    # probabilities: no other exponent of the cost does better on this grid.
    rng = np.random.default_rng(1)
    norm, cost = rng.lognormal(size=200), rng.uniform(1, 20, size=200)

    def variance(exponent):
        pi = dppo.proportional_inclusion(norm / cost**exponent, keep=0.2, cost=cost)
        return dppo.pruning_variance(norm, pi) + 1  # sum(norm^2 / pi) / sum(norm^2)

    assert min((0.0, 0.25, 0.5, 0.75, 1.0), key=variance) == 0.5
