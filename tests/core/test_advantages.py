"""Group-relative advantages and dead groups, against tables worked by hand.

Tolerance 1e-12 unless said otherwise: a handful of float64 operations on numbers of order 1, each
exact to 1.1e-16, compared with closed forms.
"""

import math

import numpy as np
import pytest

import dppo
from dppo.estimator.advantages import constant_groups

NAN = np.nan
CLOSE = {"rtol": 0, "atol": 1e-12}


def test_table_of_group_scaled_advantages():
    # rewards 1 0 0 1: mean 1/2, deviations +-1/2, sum of squares 1, sample variance 1/3
    # rewards 1 0 0 0: mean 1/4, deviations 3/4 -1/4 -1/4 -1/4, sum of squares 3/4, variance 1/4
    adv = dppo.group_advantages([[1, 0, 0, 1], [1, 0, 0, 0]], epsilon=0.0)
    half = math.sqrt(3) / 2  # (1/2) / sqrt(1/3)
    np.testing.assert_allclose(
        adv.values_PG, [[half, -half, -half, half], [1.5, -0.5, -0.5, -0.5]], **CLOSE
    )
    assert adv.live_P.tolist() == adv.scorable_P.tolist() == [True, True]
    assert adv.live_PG.all()
    assert adv.scored_PG.all()


@pytest.mark.parametrize(("epsilon", "value"), [(1e-4, 1.5 / 1.0002), (1e-6, 1.5 / 1.000002)])
def test_epsilon_is_added_to_the_standard_deviation(epsilon, value):
    # rewards 1 0 0 0: (3/4) / (1/2 + epsilon)
    adv = dppo.group_advantages([[1, 0, 0, 0]], epsilon=epsilon)
    assert adv.values_PG[0, 0] == pytest.approx(value, abs=1e-12)


def test_the_default_epsilon_is_that_of_trl():
    assert dppo.group_advantages([[1, 0]]).values_PG[0, 0] == pytest.approx(
        0.5 / (math.sqrt(0.5) + 1e-4), abs=1e-12
    )


def test_scale_none_only_centers():
    adv = dppo.group_advantages([[1, 0, 0, 0], [2, 2, 5, 3]], scale="none", epsilon=7.0)
    expected = [[0.75, -0.25, -0.25, -0.25], [-1, -1, 2, 0]]
    np.testing.assert_allclose(adv.values_PG, expected, **CLOSE)
    assert adv.live_PG.tolist() == [[True] * 4, [True, True, True, False]]  # 3 is the mean


def test_scale_batch_divides_by_the_spread_of_all_scored_rewards():
    # All rewards 1 0 3 3, dead group included: mean 7/4, deviations -3/4 -7/4 5/4 5/4,
    # squares 9/16 49/16 25/16 25/16, sum 108/16, sample variance 36/16, deviation 3/2.
    adv = dppo.group_advantages([[1, 0], [3, 3]], scale="batch", epsilon=0.0)
    np.testing.assert_allclose(adv.values_PG, [[1 / 3, -1 / 3], [0, 0]], **CLOSE)
    with_unscored = dppo.group_advantages(
        [[1, 0, NAN], [3, 3, NAN], [NAN] * 3], scale="batch", epsilon=0.0
    )
    np.testing.assert_allclose(with_unscored.values_PG[:2, :2], adv.values_PG, **CLOSE)


def test_no_score_is_never_a_reward_of_zero():
    # 1 0 and 1 0 NaN are the same group. With NaN read as 0 the mean would be 1/3.
    adv = dppo.group_advantages([[1, 0, NAN]], scale="none")
    assert adv.values_PG.tolist() == [[0.5, -0.5, 0.0]]
    assert adv.scored_PG.tolist() == [[True, True, False]]
    assert adv.live_PG.tolist() == [[True, True, False]]
    scaled = dppo.group_advantages([[1, 0, NAN]], epsilon=0.0)
    # (1/2) / sqrt(1/2), ddof 1 over the two scores
    np.testing.assert_allclose(scaled.values_PG, [[math.sqrt(0.5), -math.sqrt(0.5), 0]], **CLOSE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[1.0, NAN, NAN], [NAN, NAN, NAN]])
def test_fewer_than_two_scores_are_unscorable_and_not_dead(rewards, scale):
    adv = dppo.group_advantages([rewards, [0.0, 1.0, 0.0]], scale=scale)
    assert adv.scorable_P.tolist() == [False, True]
    assert adv.live_P.tolist() == [False, True]
    assert adv.values_PG[0].tolist() == [0.0, 0.0, 0.0]
    assert adv.scored_PG[0].tolist() == [not math.isnan(r) for r in rewards]


def test_a_dead_group_is_scorable():
    adv = dppo.group_advantages([[0.4, 0.4, NAN, 0.4]])
    assert (adv.scorable_P[0], adv.live_P[0]) == (True, False)


# A constant group stays dead whatever the value, also where the mean is not the value: the mean of
# eight float32 0.1 is off by an ulp, and dividing that dust by its own size would make a signal.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [0.1, 0.4, 1 / 3, 1e-6, 1e4 + 1 / 3, -0.7, 0.0, 1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_constant_rewards_are_dead_in_every_dtype(value, dtype, count):
    adv = dppo.group_advantages(np.full((1, count), value, dtype=dtype))
    assert not adv.live_P.any()
    assert not adv.live_PG.any()
    assert (adv.values_PG == 0).all()


def test_epsilon_zero_is_legal_beside_dead_and_unscorable_groups():
    # 0 / 0 there must neither warn nor leave a trace.
    rewards = [[1, 0, NAN], [0.1, 0.1, 0.1], [1, NAN, NAN]]
    adv = dppo.group_advantages(rewards, epsilon=0.0)
    assert adv.live_P.tolist() == [True, False, False]
    assert (adv.values_PG[1:] == 0).all()


def test_a_constant_group_inside_the_allowed_range_is_dead():
    assert not dppo.group_advantages([[0.4] * 4]).live_P.any()


def test_dust_from_adding_the_same_parts_in_another_order_is_dead():
    for dtype, parts in [(np.float64, (0.1, 0.7, 0.3)), (np.float32, (0.1, 0.2, 0.4))]:
        a, b, c = map(dtype, parts)
        rewards = np.array([[(a + b) + c, (c + b) + a, (a + c) + b]], dtype=dtype)
        assert rewards.min() < rewards.max()  # there is dust
        assert not dppo.group_advantages(rewards).live_P.any()


def test_a_small_difference_is_judged_in_the_dtype_of_the_rewards():
    rewards = np.array([[0.1, 0.1, 0.1 + 1e-9]])
    assert dppo.group_advantages(rewards).live_P.tolist() == [True]  # float64 tells them apart
    assert dppo.group_advantages(rewards.astype(np.float32)).live_P.tolist() == [False]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_tolerance_is_eight_rounding_units_of_the_largest_reward(dtype):
    eps = np.finfo(dtype).eps
    rewards = np.array([[1, 1 - 8 * eps], [1, 1 - 9 * eps], [-1, 8 * eps - 1]], dtype=dtype)
    assert constant_groups(rewards).tolist() == [True, False, True]


def test_one_ulp_around_zero_is_a_signal():
    assert dppo.group_advantages([[0.0, 1e-300]], scale="none").live_P.tolist() == [True]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int64, np.uint8])
def test_whole_and_boolean_rewards(dtype):
    adv = dppo.group_advantages(np.array([[1, 0, 0, 1], [1, 1, 1, 1]], dtype=dtype), scale="none")
    assert adv.values_PG.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    assert adv.live_P.tolist() == [True, False]


def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_other_groups():
    rewards = np.random.default_rng(0).normal(size=(6, 5))
    rewards[1, 2] = rewards[4, 0] = NAN
    adv = dppo.group_advantages(rewards)
    np.testing.assert_allclose(adv.values_PG.sum(axis=1), 0, **CLOSE)
    for q in range(6):
        alone = dppo.group_advantages(rewards[q : q + 1]).values_PG[0]
        np.testing.assert_array_equal(alone, adv.values_PG[q])


def test_input_is_not_changed():
    rewards = np.array([[1.0, NAN, 0.0]])
    dppo.group_advantages(rewards)
    np.testing.assert_array_equal(rewards, [[1.0, NAN, 0.0]])
