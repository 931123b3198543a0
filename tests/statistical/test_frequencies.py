"""Inclusion frequencies of real draws against the probabilities.

The family-wise error rate of this file is 1e-6 for correct code under freshly drawn seeds: each of
its TESTS comparisons may reject with probability 1e-6 / TESTS (Bonferroni). Frequencies are judged
by Chernoff's bound, which is exact for every n and pi:

    P(|k / n - pi| as large as seen) <= 2 exp(-n KL(k/n, pi)).

The seeds are fixed, so that a test that passes once passes always. What it can see: 20,000 draws
reject a probability of 0.5 that is off by 0.03, see `test_the_bound_can_fail`.
"""

import itertools
import math

import numpy as np

import dppo

DRAWS = 20_000
ERROR_RATE = 1e-6
PI = np.array([0.05, 0.9, 0.5, 0.35, 0.62, 0.2, 0.75, 0.48, 1.0, 0.0])
ADVANTAGES = np.array([[1.0, -0.5, -0.5, 0.0, 2.0], [0.3, 0.3, -1.0, 0.2, 0.0]])
UNCERTAIN = np.flatnonzero((PI > 0) & (PI < 1))
PAIRS = list(itertools.combinations(UNCERTAIN, 2))  # 28
# marginals of three runs, joint counts of one, chi-square of one, pairs across steps
TESTS = 3 * UNCERTAIN.size + 2 * len(PAIRS) + UNCERTAIN.size


def draw_all(one):
    """Shape (DRAWS, 10): `one(step)` for every step."""
    return np.stack([one(step) for step in range(DRAWS)])


def divergence(frequency, pi):
    """KL(frequency, pi) of two coins."""
    terms = [(frequency, pi), (1 - frequency, 1 - pi)]
    return sum(p * math.log(p / q) for p, q in terms if p > 0)


def surprising(count, pi, draws=DRAWS):
    """Whether Chernoff's bound rejects `count` in `draws` with probability `pi`."""
    return draws * divergence(count / draws, pi) > math.log(2 * TESTS / ERROR_RATE)


def assert_frequencies(kept, pi):
    assert kept[:, pi == 1].all()
    assert not kept[:, pi == 0].any()
    for unit in UNCERTAIN:
        assert not surprising(kept[:, unit].sum(), pi[unit]), (unit, kept[:, unit].mean())


def poisson_draws():
    return draw_all(
        lambda step: dppo.poisson(PI, dppo.generator(11, step, stream="completion")).kept
    )


def chi_square_3_tail(x):
    """P(X > x) for chi-square with three degrees of freedom."""
    return math.erfc(math.sqrt(x / 2)) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2)


def test_poisson_frequencies_and_pairs():
    kept = poisson_draws()
    assert_frequencies(kept, PI)
    for i, j in PAIRS:
        assert not surprising((kept[:, i] & kept[:, j]).sum(), PI[i] * PI[j]), (i, j)
        # Both, one, the other, none: four cells with known probabilities. The smallest expected
        # count is 20,000 * 0.05 * 0.1 = 100, where Pearson's statistic is chi-square to a few per
        # cent; the threshold is far beyond what that could matter for.
        sign = (kept[:, i].astype(int), kept[:, j].astype(int))
        observed = np.zeros((2, 2))
        np.add.at(observed, sign, 1)
        chance = np.outer([1 - PI[i], PI[i]], [1 - PI[j], PI[j]]) * DRAWS
        statistic = float(((observed - chance) ** 2 / chance).sum())
        assert chi_square_3_tail(statistic) > ERROR_RATE / TESTS, (i, j, statistic)


def test_systematic_frequencies():
    kept = draw_all(
        lambda step: dppo.systematic(PI, dppo.generator(12, step, stream="completion")).kept
    )
    assert_frequencies(kept, PI)
    total = PI.sum()
    assert set(kept.sum(axis=1)) == {math.floor(total), math.ceil(total)}


def test_systematic_frequencies_in_stratified_order():
    def one(step):
        order = dppo.stratified_order(ADVANTAGES, dppo.generator(13, step, stream="order"))
        return dppo.systematic(PI, dppo.generator(13, step, stream="completion"), order=order).kept

    assert_frequencies(draw_all(one), PI)


def test_two_optimizer_steps_of_a_generation_draw_independently():
    u = draw_all(
        lambda step: [
            dppo.generator(14, step, stream="completion", optimizer_step=s).random()
            for s in range(2)
        ]
    )
    kept = u[:, :, None] < PI  # of both steps
    for unit in UNCERTAIN:
        both = (kept[:, 0, unit] & kept[:, 1, unit]).sum()
        assert not surprising(both, PI[unit] ** 2), unit


def test_the_bound_can_fail():
    # A probability of 0.5 off by 0.03, or pairs that share one number, are seen.
    assert surprising(DRAWS * 0.53, 0.5)
    assert surprising(DRAWS * min(PI[2], PI[3]), PI[2] * PI[3])
    assert chi_square_3_tail(60.0) < ERROR_RATE / TESTS
    # The 95 % point of chi-square with three degrees of freedom, 7.8147 to five digits.
    assert abs(chi_square_3_tail(7.8147) - 0.05) < 1e-5
