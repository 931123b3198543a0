"""Invariants of selections, designs, orders and generators.

Suffixes: `_PG` prompts x group, `_N` flat rows.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dppo

STREAMS = ("completion", "prompt", "shuffle", "order")

probabilities = st.lists(
    st.one_of(st.just(0.0), st.just(1.0), st.sampled_from([0.1, 0.25, 0.5]), st.floats(1e-3, 1)),
    min_size=1,
    max_size=24,
)
few_probabilities = st.lists(
    st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 1)), min_size=1, max_size=7
)
seeds = st.integers(0, 2**40)


def whole_numbers_around(pi):
    """The kept counts a systematic sample may have; one number if sum(pi) is whole."""
    total = math.fsum(pi)
    # 24 probabilities rounded to float64 move their sum by 24 * 1.1e-16 at most.
    if abs(total - round(total)) < 1e-14:
        return {round(total)}
    return {math.floor(total), math.ceil(total)}


def draw(design, pi, seed):
    rng = dppo.generator(seed, 0, stream="completion")
    return dppo.systematic(pi, rng) if design == "systematic" else dppo.poisson(pi, rng)


# ---------------------------------------------------------------- Selection


@pytest.mark.parametrize("design", ["systematic", "poisson"])
@given(pi=probabilities, seed=seeds)
def test_every_selection_carries_its_probabilities_and_weights(design, pi, seed):
    selection = draw(design, pi, seed)
    pi = np.array(pi)
    assert selection.kept.dtype == np.bool_
    assert selection.pi.dtype == selection.weight.dtype == np.float64
    np.testing.assert_array_equal(selection.pi, pi)
    assert selection.kept[pi == 1].all()
    assert not selection.kept[pi == 0].any()
    # Exact: weight is one division.
    np.testing.assert_array_equal(selection.weight[selection.kept], 1 / pi[selection.kept])
    assert (selection.weight[~selection.kept] == 0).all()


@given(pi=probabilities, seed=seeds)
def test_selections_are_read_only_and_do_not_alias_their_input(pi, seed):
    given_pi = np.array(pi)
    kept = draw("poisson", given_pi, seed).kept.copy()
    selection = dppo.Selection(kept, given_pi)
    for name in ("kept", "pi", "weight"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(selection, name)[0] = 0
        with pytest.raises(AttributeError):
            setattr(selection, name, None)
    before = selection.pi.copy()
    given_pi[:] = 0.125
    kept[:] = ~kept
    np.testing.assert_array_equal(selection.pi, before)
    np.testing.assert_array_equal(selection.weight > 0, selection.kept)


@given(pi=probabilities, place=st.integers(0, 23), data=st.data())
def test_impossible_selections_are_refused(pi, place, data):
    pi = np.array(pi)
    place = place % pi.size
    kept = draw("poisson", pi, 0).kept.copy()
    pi[place] = data.draw(st.sampled_from([0.0, 1.0]))
    kept[place] = pi[place] == 0  # kept though impossible, or lost though certain
    with pytest.raises(dppo.InvalidInputError, match=r"pi must be [<>] [01] where"):
        dppo.Selection(kept, pi)


def test_selections_of_more_than_one_row_can_be_compared():
    one, same = (dppo.Selection([True, False], [0.5, 0.5]) for _ in range(2))
    assert isinstance(one == same, bool)
    assert one == one  # noqa: PLR0124 - identity must at least be equality


@given(shape=st.sampled_from([(6,), (2, 3), (1, 6), (2, 1, 3)]), seed=seeds)
def test_designs_keep_the_shape_and_read_flat_c_order(shape, seed):
    pi = np.linspace(0.1, 0.9, 6)
    for design in ("systematic", "poisson"):
        shaped, flat = draw(design, pi.reshape(shape), seed), draw(design, pi, seed)
        assert shaped.kept.shape == shaped.pi.shape == shaped.weight.shape == shape
        np.testing.assert_array_equal(shaped.kept.ravel(), flat.kept)


# ---------------------------------------------------------------- systematic


@given(pi=probabilities, seed=seeds, data=st.data())
def test_systematic_keeps_the_expected_count_to_within_one(pi, seed, data):
    order = data.draw(st.permutations(range(len(pi))))
    rng = dppo.generator(seed, 0, stream="completion")
    assert int(dppo.systematic(pi, rng, order=order).kept.sum()) in whole_numbers_around(pi)


@given(pi=probabilities, data=st.data())
def test_systematic_outcomes(pi, data):
    order = data.draw(st.permutations(range(len(pi))))
    every = list(dppo.outcomes(pi, design="systematic", order=order))
    assert len(every) <= len(pi) + 1
    assert all(p > 0 for p, _ in every)
    # Differences of at most 25 cut points in [0, 1], each exact to 1.1e-16.
    assert math.fsum(p for p, _ in every) == pytest.approx(1, abs=1e-14)
    # A strip of rounding error between two equal cut points may show a neighbouring outcome.
    counts = {int(s.kept.sum()) for p, s in every if p > 1e-13}
    assert counts <= whole_numbers_around(pi)
    mean = sum(p * s.kept for p, s in every)
    # Lengths on a line of at most 24: 24 * 2.2e-16 each, summed over few outcomes.
    np.testing.assert_allclose(mean, pi, rtol=0, atol=1e-13)


def test_a_sum_that_is_whole_but_for_rounding_counts_as_whole():
    for tenths in range(1, 60):
        pi = np.full(10 * tenths, 0.1)  # cumsum ends an ulp or more beside `tenths`
        counts = {int(s.kept.sum()) for p, s in dppo.outcomes(pi, design="systematic") if p > 1e-13}
        assert counts == {tenths}


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.1, 1 - 2.0**-52, 1 - 2.0**-53])
def test_a_whole_sum_is_kept_exactly_for_every_uniform_number(u):
    # 1 - 2^-53 is the largest number that a generator returns; 2 - (1 - 2^-53) rounds to 1.
    for tenths in (1, 2, 3, 7, 40):
        pi = np.full(10 * tenths, 0.1)
        assert dppo.systematic(pi, fixed_uniform(u)).kept.sum() == tenths


def test_a_whole_sum_is_kept_exactly_for_many_rows():
    # 0.1 added a million times gives 100000.0000013: what was lost must not keep one row more.
    pi = np.full(1_000_000, 0.1)
    for u in (0.0, 2.0**-53, 1e-7, 1 - 2.0**-53):
        assert dppo.systematic(pi, fixed_uniform(u)).kept.sum() == 100_000


def fixed_uniform(u):
    """An object with the one method of a generator that is used, returning `u`."""

    class Fixed:
        def random(self):
            return u

    return Fixed()


@given(pi=probabilities, u=st.floats(0, 1, exclude_max=True))
def test_systematic_draws_one_of_its_outcomes(pi, u):
    drawn = dppo.systematic(pi, fixed_uniform(u)).kept.tolist()
    every = [s.kept.tolist() for _, s in dppo.outcomes(pi, design="systematic")]
    # A u within rounding of a cut point may fall on either side of it; both sides are outcomes.
    assert drawn in every or min(abs(np.cumsum(pi) % 1 - u)) < 1e-14


# ---------------------------------------------------------------- poisson


@given(pi=few_probabilities)
def test_poisson_outcomes_are_every_subset_of_the_uncertain_rows(pi):
    every = list(dppo.outcomes(pi, design="poisson"))
    uncertain = sum(0 < p < 1 for p in pi)
    assert len(every) == 2**uncertain
    assert len({tuple(s.kept) for _, s in every}) == len(every)
    # 128 products of 7 factors: 128 * 7 * 1.1e-16.
    assert math.fsum(p for p, _ in every) == pytest.approx(1, abs=1e-13)
    for (i, first), (j, second) in itertools.combinations(enumerate(pi), 2):
        both = math.fsum(p for p, s in every if s.kept[i] and s.kept[j])
        assert both == pytest.approx(first * second, abs=1e-13)


@given(pi=probabilities, seed=seeds)
def test_poisson_flips_one_number_per_row_in_c_order(pi, seed):
    u = dppo.generator(seed, 0, stream="completion").random(len(pi))
    np.testing.assert_array_equal(draw("poisson", pi, seed).kept, u < np.array(pi))


def test_too_many_outcomes_are_refused_and_systematic_is_offered():
    with pytest.raises(dppo.InvalidInputError, match=r"17 uncertain .*systematic"):
        list(dppo.outcomes(np.full(17, 0.5)))
    assert len(list(dppo.outcomes(np.full(17, 0.5), design="systematic"))) <= 18
    assert len(list(dppo.outcomes([1.0] * 30 + [0.5]))) == 2  # certain rows do not count


# ---------------------------------------------------------------- order and generator

advantages = st.integers(1, 6).flatmap(
    lambda group: st.lists(
        st.lists(
            st.sampled_from([-1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0]), min_size=group, max_size=group
        ),
        min_size=1,
        max_size=6,
    )
)


@given(values=advantages, seed=seeds)
def test_stratified_order_is_a_permutation_by_group_then_sign(values, seed):
    values = np.array(values)
    order = dppo.stratified_order(values, dppo.generator(seed, 0, stream="order"))
    assert sorted(order.tolist()) == list(range(values.size))
    of_group = (order // values.shape[1]).reshape(values.shape)
    assert (of_group == of_group[:, :1]).all()  # each group in one piece
    assert (np.diff(np.sign(values.ravel()[order]).reshape(values.shape), axis=1) >= 0).all()


def test_stratified_order_is_random_in_groups_and_rows():
    values = np.ones((4, 5))
    orders = [
        dppo.stratified_order(values, dppo.generator(0, step, stream="order")).tolist()
        for step in range(40)
    ]
    assert {order[0] // 5 for order in orders} == {0, 1, 2, 3}
    assert {order[0] % 5 for order in orders} == {0, 1, 2, 3, 4}


@given(
    seed=seeds,
    step=st.integers(0, 2**40),
    stream=st.sampled_from(STREAMS),
    iteration=st.integers(0, 9),
    optimizer_step=st.integers(0, 9),
)
def test_generator_is_a_pure_function_of_all_its_arguments(
    seed, step, stream, iteration, optimizer_step
):
    arguments = {
        "seed": seed,
        "step": step,
        "stream": stream,
        "iteration": iteration,
        "optimizer_step": optimizer_step,
    }
    mine = dppo.generator(**arguments).random(4).tolist()
    dppo.generator(**arguments).random(100)  # what others draw in between changes nothing
    np.random.default_rng(0).random()
    assert dppo.generator(**arguments).random(4).tolist() == mine
    for name, value in arguments.items():
        others = STREAMS if name == "stream" else (0, 1, value + 1, 10 * value + 1)
        for other in set(others) - {value}:
            changed = dppo.generator(**{**arguments, name: other})
            assert changed.random(4).tolist() != mine


def test_generator_takes_numpy_integers_as_the_same_numbers():
    plain = dppo.generator(3, 4, stream="prompt").random()
    assert dppo.generator(np.int64(3), np.int32(4), stream="prompt").random() == plain


def test_neighbouring_generators_do_not_collide():
    grid = itertools.product(range(3), range(12), STREAMS, range(3), range(3))
    first = {
        dppo.generator(seed, step, stream=stream, iteration=i, optimizer_step=o).random()
        for seed, step, stream, i, o in grid
    }
    assert len(first) == 3 * 12 * 4 * 3 * 3
