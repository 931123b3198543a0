"""Inclusion frequencies of `Pruner.select_prompts` against its probabilities.

The family-wise error rate of this file is 1e-6 for correct code under freshly drawn seeds: each of
its TESTS comparisons may reject with probability 1e-6 / TESTS (Bonferroni). Frequencies are judged
by Chernoff's bound, which is exact for every n and pi:

    P(|k / n - pi| as large as seen) <= 2 exp(-n KL(k/n, pi)).

It holds because the draws of different steps are independent and the history is the same for all
of them. The seeds are fixed, so that a test that passes once passes always. What it can see:
20,000 draws reject a probability of 0.5 that is off by 0.03, see `test_the_bound_can_fail`.

Suffixes: `_M` candidate prompts.
"""

import itertools
import math

import numpy as np
import pytest

import dppo

DRAWS = 20_000
ERROR_RATE = 1e-6
COUNT, WINDOW = 4, 8
PAIRS = list(itertools.combinations(range(WINDOW), 2))  # 28
# every candidate, every pair, every candidate at consecutive steps
TESTS = 2 * WINDOW + len(PAIRS)


def divergence(frequency, pi):
    """KL(frequency, pi) of two coins."""
    terms = [(frequency, pi), (1 - frequency, 1 - pi)]
    return sum(p * math.log(p / q) for p, q in terms if p > 0)


def surprising(count, pi, draws=DRAWS):
    """Whether Chernoff's bound rejects `count` in `draws` with probability `pi`."""
    return draws * divergence(count / draws, pi) > math.log(2 * TESTS / ERROR_RATE)


@pytest.fixture(scope="module")
def drawn():
    """Shape (DRAWS, WINDOW): what is kept at every step, and the probabilities, always the same.

    The rule decides the probabilities only, so that one with eight different ones is enough.
    """
    pruner = dppo.Pruner(dppo.PruneConfig(prompt_keep=COUNT / WINDOW), seed=21)
    rng = np.random.default_rng(3)
    rewards = rng.random((WINDOW, 8)) < np.linspace(0, 1, WINDOW)[:, None]
    pruner.observe(range(WINDOW), rewards.astype(float), step=0)
    windows = [
        pruner.select_prompts(range(WINDOW), count=COUNT, step=step) for step in range(1, DRAWS + 1)
    ]
    pi_M = windows[0].pi
    assert all(np.array_equal(window.pi, pi_M) for window in windows)
    return np.stack([window.kept for window in windows]), pi_M


def test_frequencies_of_windows(drawn):
    kept, pi_M = drawn
    assert (kept.sum(axis=1) == COUNT).all()
    assert ((pi_M > 0) & (pi_M < 1)).all()
    assert np.ptp(pi_M) > 0.1
    for unit in range(WINDOW):
        assert not surprising(kept[:, unit].sum(), pi_M[unit]), (unit, kept[:, unit].mean())


def test_the_random_order_lets_every_pair_meet(drawn):
    # In one fixed order neighbours with pi_i + pi_j <= 1 would never be kept together. In a random
    # one they meet with probability of at least 0.01 here; never meeting in 20,000 draws then has
    # probability (1 - 0.01)^20000 = 1e-87, far below the share of a single comparison.
    kept, _ = drawn
    for i, j in PAIRS:
        together = (kept[:, i] & kept[:, j]).mean()
        assert together > 0.01, (i, j)


def test_consecutive_windows_are_independent(drawn):
    # Disjoint pairs of steps, so that the products are independent of each other.
    kept, pi_M = drawn
    both = kept[0::2] & kept[1::2]
    for unit in range(WINDOW):
        count = both[:, unit].sum()
        assert not surprising(count, pi_M[unit] ** 2, DRAWS // 2), (unit, count)


def test_the_bound_can_fail():
    # A probability of 0.5 off by 0.03, or windows that share one number, are seen.
    assert surprising(DRAWS * 0.53, 0.5)
    assert surprising(DRAWS // 2 * 0.5, 0.25, DRAWS // 2)
