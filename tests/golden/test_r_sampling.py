"""Values of R's package `sampling`, the reference implementation of these designs.

Recorded with R 4.2.2 Patched (2022-11-10 r83330) and sampling 2.9 (Debian 12: r-cran-sampling), for
example

    library(sampling); options(digits = 17)
    inclusionprobabilities(c(1, 2, 3, 4, 5, 6, 7, 8), 4)
    set.seed(1); u <- runif(1); set.seed(1); UPsystematic(pik)    # uses that u
    HTestimator(y, pik)

R is not needed to run these tests. Tolerance 1e-12 for probabilities: both sides solve the same
equation in float64, in another order of summation.
"""

import numpy as np
import pytest

import dppo

CLOSE = {"rtol": 0, "atol": 1e-12}

# inclusionprobabilities(a, n): sizes a, expected count n, probabilities
INCLUSION = [
    (
        [1, 2, 3, 4, 5, 6, 7, 8],
        4,
        [
            0.11111111111111110,
            0.22222222222222221,
            0.33333333333333331,
            0.44444444444444442,
            0.55555555555555558,
            0.66666666666666663,
            0.77777777777777779,
            0.88888888888888884,
        ],
    ),
    (  # three units are certain, and a size of 0 is never taken
        [0.5, 12, 3, 0, 7, 1, 1, 2.5, 40, 0.25],
        5,
        [
            0.121212121212121215,
            1.0,
            0.727272727272727293,
            0.0,
            1.0,
            0.242424242424242431,
            0.242424242424242431,
            0.606060606060606077,
            1.0,
            0.060606060606060608,
        ],
    ),
    (
        [1e-3, 1, 1, 1, 100],
        2,
        [
            0.0003332222592469177,
            0.3332222592469177291,
            0.3332222592469177291,
            0.3332222592469177291,
            1.0,
        ],
    ),
    (  # certain units appear one after the other: 870 first, then 240, 120, 61 ... of the rest
        [120, 15, 33, 870, 4, 61, 2, 240],
        5,
        [
            1.0,
            0.277777777777777790,
            0.611111111111111160,
            1.0,
            0.074074074074074070,
            1.0,
            0.037037037037037035,
            1.0,
        ],
    ),
    ([3, 1], 1, [0.75, 0.25]),
]


@pytest.mark.parametrize(("size", "count", "pi"), INCLUSION)
def test_proportional_inclusion_is_inclusionprobabilities(size, count, pi):
    keep = count / np.count_nonzero(size)
    actual = dppo.proportional_inclusion(np.array(size, dtype=float), keep=keep)
    np.testing.assert_allclose(actual, pi, **CLOSE)


# The first number of R's generator for set.seed(1), ..., set.seed(6), and set.seed(7).
U = [
    0.26550866314209998,
    0.18488225992769003,
    0.16804152633994818,
    0.58580030500888824,
    0.20021445257589221,
    0.60626829764805734,
    0.98890929785557091,
]
SUM_3 = [0.2, 0.7, 0.8, 0.5, 0.4, 0.4]
SUM_38 = [0.3, 0.6, 0.45, 0.7, 0.5, 0.35, 0.8, 0.1]  # a sum of 3.8: three or four are kept
WITH_CERTAIN = INCLUSION[1][2]

# UPsystematic(pik) with the first number of the seed: probabilities, number, selection
SYSTEMATIC = [
    (SUM_3, U[0], [0, 1, 1, 0, 1, 0]),
    (SUM_3, U[1], [1, 0, 1, 1, 0, 0]),
    (SUM_3, U[2], [1, 0, 1, 1, 0, 0]),
    (SUM_3, U[3], [0, 1, 1, 0, 1, 0]),
    (SUM_3, U[4], [0, 1, 1, 0, 1, 0]),
    (SUM_3, U[5], [0, 1, 1, 0, 0, 1]),
    (WITH_CERTAIN, U[0], [0, 1, 1, 0, 1, 0, 1, 0, 1, 0]),
    (WITH_CERTAIN, U[1], [0, 1, 1, 0, 1, 0, 1, 0, 1, 0]),
    (WITH_CERTAIN, U[2], [0, 1, 1, 0, 1, 0, 1, 0, 1, 0]),
    (WITH_CERTAIN, U[3], [0, 1, 1, 0, 1, 0, 0, 1, 1, 0]),
    (WITH_CERTAIN, U[4], [0, 1, 1, 0, 1, 0, 1, 0, 1, 0]),
    (WITH_CERTAIN, U[5], [0, 1, 1, 0, 1, 0, 0, 1, 1, 0]),
    (WITH_CERTAIN, U[6], [0, 1, 0, 0, 1, 1, 0, 0, 1, 1]),
    (SUM_38, U[0], [1, 0, 1, 0, 1, 0, 1, 0]),
    (SUM_38, U[1], [1, 0, 1, 0, 1, 0, 1, 0]),
    (SUM_38, U[2], [1, 0, 1, 0, 1, 0, 1, 0]),
    (SUM_38, U[3], [0, 1, 0, 1, 0, 1, 1, 0]),
]


class Scripted:
    """Stands in for a generator and returns the given numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def random(self, size=None):
        return self.numbers if size is None else np.asarray(self.numbers[:size])


@pytest.mark.parametrize(("pi", "u", "kept"), SYSTEMATIC)
def test_systematic_is_upsystematic(pi, u, kept):
    assert dppo.systematic(pi, Scripted(u)).kept.astype(int).tolist() == kept


def cumulative_rule(pi, u):
    """Madow's rule on cumulated probabilities V_k: keep k iff V_(k-1) - u and V_k - u, both taken
    modulo 1, decrease, which is to say that a whole number lies between them.
    """
    cumulated = (np.concatenate(([0.0], np.cumsum(pi))) - u) % 1
    return cumulated[:-1] > cumulated[1:]


@pytest.mark.parametrize("pi", [SUM_3, SUM_38, [0.05] * 7, [0.9, 0.8, 0.95, 0.35]])
def test_systematic_is_the_cumulative_rule_on_a_grid(pi):
    # 997 is prime: no point of the grid falls on a multiple of 0.05, where rounding would decide.
    for u in (np.arange(997) + 0.5) / 997:
        assert (dppo.systematic(pi, Scripted(u)).kept == cumulative_rule(pi, u)).all()


# UPpoisson(pik) with set.seed(3), which draws these numbers in order
POISSON_U = [
    0.16804152633994818,
    0.80751639907248318,
    0.38494235137477517,
    0.32773431716486812,
    0.60210067476145923,
    0.60439405404031277,
]


def test_poisson_is_uppoisson():
    selection = dppo.poisson(SUM_3, Scripted(POISSON_U))
    assert selection.kept.astype(int).tolist() == [1, 0, 1, 1, 0, 0]


# UPsystematicpi2(SUM_3), rounded to 12 digits: the joint inclusion probabilities
JOINT = [
    [0.2, 0.0, 0.2, 0.2, 0.0, 0.0],
    [0.0, 0.7, 0.5, 0.2, 0.4, 0.3],
    [0.2, 0.5, 0.8, 0.3, 0.4, 0.2],
    [0.2, 0.2, 0.3, 0.5, 0.0, 0.3],
    [0.0, 0.4, 0.4, 0.0, 0.4, 0.0],
    [0.0, 0.3, 0.2, 0.3, 0.0, 0.4],
]


def test_systematic_outcomes_give_the_joint_probabilities_of_upsystematicpi2():
    joint = sum(p * np.outer(s.kept, s.kept) for p, s in dppo.outcomes(SUM_3, design="systematic"))
    np.testing.assert_allclose(joint, JOINT, **CLOSE)


# HTestimator(y, pik) of the sampled units: values, probabilities, selection, estimate
HORVITZ_THOMPSON = [
    ([3, -1, 4, 1, -5], [0.2, 0.5, 1, 0.4, 0.8], [1, 1, 1, 1, 1], 13.25),
    (
        [1.5, -2, 0.25, 9, 3, -1, 4, 0.5, -6, 2],
        WITH_CERTAIN,
        [0, 1, 1, 0, 1, 0, 1, 0, 1, 0],
        11.84375,
    ),
]


@pytest.mark.parametrize(("y", "pi", "kept", "estimate"), HORVITZ_THOMPSON)
def test_weights_give_htestimator(y, pi, kept, estimate):
    # Five terms of order 10.
    assert dppo.Selection(kept, pi).weight @ y == pytest.approx(estimate, abs=1e-12)


# ---------------------------------------------------------------- worked by hand


def test_proportional_inclusion_with_cost_worked_by_hand():
    # size 6 2 1 1, cost 2 1 4 1: live cost 8, keep 1/2, budget 4.
    # c from all:     c = 4 / (6*2 + 2*1 + 1*4 + 1*1) = 4/19; pi_1 = 24/19 > 1, so 1 is certain
    # c from 2 3 4:   c = (4 - 2) / (2 + 4 + 1) = 2/7;  pi = 1, 4/7, 2/7, 2/7
    # spent:          1*2 + 4/7*1 + 2/7*4 + 2/7*1 = 2 + 14/7 = 4
    pi = dppo.proportional_inclusion([6, 2, 1, 1], keep=0.5, cost=[2, 1, 4, 1])
    np.testing.assert_allclose(pi, [1, 4 / 7, 2 / 7, 2 / 7], **CLOSE)


@pytest.mark.parametrize(
    ("u", "kept"),
    [
        # pi 0.5 0.25 1 0.75 0.5 in the order 3 1 0 4 2: the certain unit 2 is not on the line,
        # which is  3: 0 - 0.75 | 1: 0.75 - 1 | 0: 1 - 1.5 | 4: 1.5 - 2;  points u and u + 1
        (0.0, [1, 0, 1, 1, 0]),  # 0 in 3, 1 in 0 (a unit holds its start)
        (0.3, [1, 0, 1, 1, 0]),  # 0.3 in 3, 1.3 in 0
        (0.6, [0, 0, 1, 1, 1]),  # 0.6 in 3, 1.6 in 4
        (0.75, [0, 1, 1, 0, 1]),  # 0.75 in 1, 1.75 in 4
        (0.9, [0, 1, 1, 0, 1]),  # 0.9 in 1, 1.9 in 4
    ],
)
def test_systematic_in_an_order_worked_by_hand(u, kept):
    pi, order = [0.5, 0.25, 1.0, 0.75, 0.5], [3, 1, 0, 4, 2]
    assert dppo.systematic(pi, Scripted(u), order=order).kept.astype(int).tolist() == kept


def test_systematic_outcomes_worked_by_hand():
    # The line above changes at u = 0.5 and 0.75: lengths 0.5 0.25 0.25.
    every = dppo.outcomes([0.5, 0.25, 1.0, 0.75, 0.5], design="systematic", order=[3, 1, 0, 4, 2])
    assert [(p, s.kept.astype(int).tolist()) for p, s in every] == [
        (0.5, [1, 0, 1, 1, 0]),
        (0.25, [0, 0, 1, 1, 1]),
        (0.25, [0, 1, 1, 0, 1]),
    ]


def test_generator_is_philox_keyed_by_blake2b():
    # The construction is part of the file format: a resumed run must draw what it would have drawn.
    from hashlib import blake2b

    digest = blake2b(b"dppo/completion/5/17/1/2", digest_size=16).digest()
    expected = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    actual = dppo.generator(5, 17, stream="completion", iteration=1, optimizer_step=2)
    np.testing.assert_array_equal(actual.random(3), expected.random(3))
