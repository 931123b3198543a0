"""The rules of others, by hand. That they are biased: test_audit."""

import numpy as np
import pytest

from dppo.peers import SkipRates, mean_over, silent_groups


def test_a_mean_over_survivors_sums_to_the_whole():
    chosen = np.array([[True, False], [True, True]])
    tokens = np.array([[2.0, 4.0], [3.0, 1.0]])
    assert mean_over(chosen, tokens).tolist() == [[10 / 6, 0], [10 / 6, 10 / 6]]
    assert not mean_over(np.zeros((1, 2), bool), np.ones((1, 2))).any()


def test_silent_groups():
    rewards = np.array([[1, 1], [0, 1], [np.nan, 1], [0, 0]])
    assert silent_groups(rewards).tolist() == [True, False, True, True]


def test_skipping_by_runs_without_signal():
    """Two solved visits: 0.5^2; a hopeless one starts another run; signal ends it."""
    rates = SkipRates()
    for _ in range(2):
        rates.observe([1], np.ones((1, 4)), adapt=False)
    assert rates.probability(1) == pytest.approx(0.25)
    rates.observe([1], np.array([[0, 0, 0, 0.4]]), adapt=False)
    assert rates.probability(1) == 0.5
    rates.observe([1], np.array([[1, 0, np.nan, 0]]), adapt=False)
    assert rates.probability(1) == 1
    for _ in range(20):
        rates.observe([2], np.zeros((1, 4)), adapt=False)
    assert rates.probability(2) == 0.01  # never abandoned


def test_the_probabilities_move_towards_the_target():
    """Of four groups one is solved (above 1/12) and none hopeless (below 1/6)."""
    rates = SkipRates()
    rewards = np.array([[1, 1], [0, 1], [1, 0], [0, 1]])
    rates.observe([1, 2, 3, 4], rewards, adapt=True)
    assert rates.p == pytest.approx({"easy": 0.49, "hard": 0.51})
    for _ in range(200):
        rates.observe([1, 2, 3, 4], rewards, adapt=True)
    assert rates.p == pytest.approx({"easy": 0.05, "hard": 0.95})
