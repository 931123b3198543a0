"""Invariants of the inclusion rules.

Suffixes: `_PG` prompts x group, `_N` flat rows.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dppo

# Rounding: at most 30 rows, whose normalised costs and sizes are summed twice and divided once.
# 100 eps is above 30 rounded additions and far below any step of keep.
RELATIVE = 100 * np.finfo(np.float64).eps

sizes = st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.sampled_from([1.0, 2.0, 0.5, 1e-12, 1e12]))
costs = st.one_of(st.floats(0.5, 1e5), st.integers(1, 4096).map(float))
keeps = st.one_of(st.floats(1e-3, 1.0), st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]))


@st.composite
def batches(draw):
    """(size_N, cost_N, keep)."""
    count = draw(st.integers(1, 30))
    size = draw(st.lists(sizes, min_size=count, max_size=count))
    cost = draw(st.lists(costs, min_size=count, max_size=count))
    return np.array(size), np.array(cost), draw(keeps)


@given(batch=batches())
def test_proportional_spends_the_budget_on_live_rows_only(batch):
    size, cost, keep = batch
    pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    live = size > 0
    np.testing.assert_array_equal(pi > 0, live)
    assert (pi <= 1).all()
    budget = keep * cost[live].sum()
    assert (pi * cost).sum() == pytest.approx(budget, rel=RELATIVE, abs=0)


@given(batch=batches())
def test_proportional_is_monotone_in_size_and_proportional_below_one(batch):
    size, cost, keep = batch
    pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    order = np.argsort(size, kind="stable")
    assert (np.diff(pi[order]) >= 0).all()
    # Below a relative size of 1e-12 sizes are raised to it; there the ratio is no longer the same.
    below = (pi > 0) & (pi < 1) & (size > 1e-12 * size.max())
    if below.any():
        ratio = pi[below] / size[below]
        np.testing.assert_allclose(ratio, ratio[0], rtol=RELATIVE)


@given(batch=batches(), data=st.data())
def test_proportional_is_permutation_equivariant(batch, data):
    size, cost, keep = batch
    order = np.array(data.draw(st.permutations(range(size.size))))
    pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    moved = dppo.proportional_inclusion(size[order], keep=keep, cost=cost[order])
    # Sums in another order; a remainder of the budget close to 0 is relative to the budget.
    np.testing.assert_allclose(moved, pi[order], rtol=1e-9, atol=RELATIVE)


@given(batch=batches(), power=st.integers(-60, 60), factor=st.floats(1e-3, 1e3))
def test_proportional_does_not_depend_on_the_units_of_size_and_cost(batch, power, factor):
    size, cost, keep = batch
    pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    # Powers of two are exact in floating point.
    scaled = dppo.proportional_inclusion(size * 2.0**power, keep=keep, cost=cost * 2.0**power)
    np.testing.assert_array_equal(scaled, pi)
    scaled = dppo.proportional_inclusion(size * factor, keep=keep, cost=cost * factor)
    np.testing.assert_allclose(scaled, pi, rtol=1e-9, atol=RELATIVE)


@given(batch=batches())
def test_proportional_without_cost_is_that_of_equal_cost(batch):
    size, _, keep = batch
    equal = dppo.proportional_inclusion(size, keep=keep, cost=np.full(size.shape, 8.0))
    np.testing.assert_allclose(dppo.proportional_inclusion(size, keep=keep), equal, rtol=1e-12)


@given(batch=batches())
def test_proportional_keep_1_keeps_every_live_row_for_certain(batch):
    size, cost, _ = batch
    pi = dppo.proportional_inclusion(size, keep=1.0, cost=cost)
    np.testing.assert_array_equal(pi, (size > 0).astype(float))
    np.testing.assert_array_equal(dppo.proportional_inclusion(size, keep=1), pi)


def test_proportional_keeps_the_budget_when_keep_is_one_but_for_rounding():
    size = np.array([1e-5, 1e-3, 0.1, 0.1, 1.0])
    cost = np.array([1e4, 1.0, 1e6, 1e3, 1e3])
    for ulps in range(1, 9):
        keep = 1 - ulps * 2.0**-53
        pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
        assert (pi * cost).sum() == pytest.approx(keep * cost.sum(), rel=RELATIVE)


@given(batch=batches(), more=st.floats(0, 1))
def test_proportional_is_monotone_in_keep(batch, more):
    size, cost, keep = batch
    larger = keep + more * (1 - keep)
    lower = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    higher = dppo.proportional_inclusion(size, keep=larger, cost=cost)
    assert (higher >= lower * (1 - 1e-9) - RELATIVE).all()  # rounding as for a permutation


@given(
    exponents=st.lists(st.integers(-300, 300), min_size=1, max_size=12),
    keep=st.floats(1e-3, 0.999),
)
def test_no_live_row_has_probability_zero_however_small_it_is(exponents, keep):
    pi = dppo.proportional_inclusion(10.0 ** np.array(exponents), keep=keep)
    assert ((pi > 0) & (pi <= 1)).all()
    # The floor of 1e-12 on relative sizes adds nothing to the budget: c is solved after it.
    assert pi.sum() == pytest.approx(keep * pi.size, rel=RELATIVE)


@given(batch=batches(), design=st.sampled_from(["systematic", "poisson"]), step=st.integers(0, 99))
def test_proportional_probabilities_are_accepted_by_every_design(batch, design, step):
    size, cost, keep = batch
    pi = dppo.proportional_inclusion(size, keep=keep, cost=cost)
    selection = getattr(dppo, design)(pi, dppo.generator(0, step, stream="completion"))
    assert (selection.kept <= (size > 0)).all()


# ---------------------------------------------------------------- threshold and uniform

groups = st.integers(1, 6).flatmap(
    lambda group: st.lists(
        st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0]), min_size=group, max_size=group),
        min_size=1,
        max_size=5,
    )
)


@given(values=groups, rate=st.floats(0, 0.99))
def test_threshold_has_two_probabilities_and_zero_only_where_not_live(values, rate):
    values = np.array(values)
    pi = dppo.threshold_inclusion(values, prune_rate=rate)
    np.testing.assert_array_equal(pi > 0, values != 0)
    assert np.isin(pi, [0.0, 1 - rate, 1.0]).all()
    low = np.abs(values) < np.abs(values).mean(axis=1, keepdims=True) * (1 - 1e-6)
    np.testing.assert_array_equal(pi[low & (values != 0)], 1 - rate)
    np.testing.assert_array_equal(pi[~low & (values != 0)], 1.0)


@given(values=groups, rate=st.floats(0, 0.99), data=st.data())
def test_threshold_is_permutation_equivariant_and_scale_invariant(values, rate, data):
    values = np.array(values)
    pi = dppo.threshold_inclusion(values, prune_rate=rate)
    rows = np.array(data.draw(st.permutations(range(values.shape[0]))))
    columns = np.array(data.draw(st.permutations(range(values.shape[1]))))
    moved = dppo.threshold_inclusion(values[rows][:, columns], prune_rate=rate)
    np.testing.assert_array_equal(moved, pi[rows][:, columns])
    np.testing.assert_array_equal(dppo.threshold_inclusion(-8 * values, prune_rate=rate), pi)


@given(values=groups, rate=st.floats(0, 0.99))
def test_threshold_padding_that_is_not_scored_changes_nothing(values, rate):
    values = np.array(values)
    padded = np.pad(values, ((0, 0), (0, 2)))
    scored = np.pad(np.ones_like(values), ((0, 0), (0, 2)))
    pi = dppo.threshold_inclusion(padded, prune_rate=rate, scored=scored)
    np.testing.assert_array_equal(
        pi[:, : values.shape[1]], dppo.threshold_inclusion(values, prune_rate=rate)
    )
    assert (pi[:, values.shape[1] :] == 0).all()


@given(live=st.lists(st.booleans(), min_size=1, max_size=20), keep=st.floats(1e-6, 1))
def test_uniform_gives_keep_to_live_rows(live, keep):
    pi = dppo.uniform_inclusion(live, keep=keep)
    np.testing.assert_array_equal(pi, np.where(live, keep, 0.0))
