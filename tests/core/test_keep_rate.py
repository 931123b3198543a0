"""The keep rate that is chosen while training."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import dppo
from dppo.errors import ConfigurationError, InvalidInputError
from dppo.estimator import keep_rate
from dppo.estimator.keep_rate import GRID, LEAST_GAIN, MOST_VARIANCE, REST, START, KeepRate

EVIDENCE = Path(__file__).parents[3] / "shared" / "evidence" / "completion_gradients.npz"


def fed(auto, steps, *, variance_R, fixed, train, noise=None, first=0):
    """Runs steps of one generation each; `noise` multiplies both times."""
    for step in range(first, first + steps):
        rate = auto.at(step)
        auto.remember(variance_R=variance_R, cost_R=GRID)
        times = (1.0, 1.0) if noise is None else noise()
        auto.measure(fixed=fixed * times[0], train=train * rate * times[1], kept_cost=rate)
    return [(move.step, move.rate) for move in auto._moves]


VARIANCE = 0.05 * (1 / np.array(GRID) - 1)
"""As of a uniform rule on gradients that are far from equal."""


def best_rate(fixed, train, variance_R=VARIANCE):
    efficiency = 1 / ((1 + variance_R) * (fixed + train * np.array(GRID)))
    return GRID[int(np.where(variance_R <= MOST_VARIANCE, efficiency, 0).argmax())]


@pytest.mark.parametrize("fixed", [0.1, 0.5, 2.0, 20.0])
def test_it_walks_to_the_best_rate_and_stays(fixed):
    moves = fed(KeepRate(), 100, variance_R=VARIANCE, fixed=fixed, train=1.0)
    efficiency = 1 / ((1 + VARIANCE) * (fixed + np.array(GRID)))
    reached = efficiency[GRID.index(moves[-1][1])]
    assert reached * (1 + LEAST_GAIN) >= efficiency[GRID.index(best_rate(fixed, 1.0))]
    notches = [GRID.index(rate) for _, rate in moves]
    assert notches[0] == GRID.index(START)
    assert all(abs(b - a) == 1 for a, b in itertools.pairwise(notches))
    assert len(set(np.sign(np.diff(notches)))) <= 1  # straight there
    steps = [step for step, _ in moves]
    assert all(b - a >= REST for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("fixed", [0.1, 0.43, 1.0, 2.3, 9.0])
def test_times_off_by_a_factor_of_two_make_it_waver_at_most_thrice(fixed):
    for seed in range(20):
        notches = wavering(fixed, seed)
        assert turns(notches) <= 3
        efficiency = 1 / ((1 + VARIANCE) * (fixed + np.array(GRID)))
        assert efficiency[notches[-1]] >= 0.95 * efficiency[GRID.index(best_rate(fixed, 1.0))]


def test_without_memory_threshold_and_rest_it_would_not_stay(monkeypatch):
    for name, value in {"MEMORY": 1, "LEAST_GAIN": 0.0, "REST": 1}.items():
        monkeypatch.setattr(keep_rate, name, value)
    assert min(turns(wavering(1.0, seed)) for seed in range(20)) > 20


def wavering(fixed, seed):
    """The notches of 200 steps."""
    rng = np.random.default_rng(seed)
    noise = lambda: 2 ** rng.uniform(-1, 1, 2)  # noqa: E731
    moves = fed(KeepRate(), 200, variance_R=VARIANCE, fixed=fixed, train=1.0, noise=noise)
    return np.array([GRID.index(rate) for _, rate in moves])


def turns(notches):
    return int((np.diff(np.sign(np.diff(notches))) != 0).sum())


def test_variance_is_bounded():
    steep = np.array([0, 0.01, 0.05, 0.2, 0.29, 0.4, 0.6, 1.0])
    auto = KeepRate()
    moves = fed(auto, 60, variance_R=steep, fixed=0.01, train=1.0)
    assert moves == [(0, 0.5)]  # 0.29 is above the bound for going there
    moves = fed(auto, 60, variance_R=steep * 1.6, fixed=0.01, train=1.0, first=60)
    assert moves[-1][1] == 0.7  # 0.32 at 0.5


def test_it_follows_a_run_that_changes():
    auto = KeepRate()
    fed(auto, 60, variance_R=VARIANCE, fixed=0.05, train=1.0)
    low = auto.at(60)
    moves = fed(auto, 100, variance_R=VARIANCE, fixed=20.0, train=1.0, first=60)
    assert moves[-1][1] > low


def test_the_rate_of_a_step_does_not_depend_on_how_often_it_is_asked():
    one, other = KeepRate(), KeepRate()
    for step in range(60):
        assert [one.at(step) for _ in range(3)] == [other.at(step)] * 3
        for auto in (one, other):
            auto.remember(variance_R=VARIANCE, cost_R=GRID)
            auto.measure(fixed=0.1, train=one.at(step), kept_cost=one.at(step))


def test_nothing_is_chosen_before_anything_is_measured_or_from_a_step_without_survivors():
    auto = KeepRate()
    assert auto.efficiency_R() is None
    for step in range(20):
        assert auto.at(step) == START
        auto.remember(variance_R=VARIANCE, cost_R=GRID)
        auto.measure(fixed=1.0, train=0.1, kept_cost=0.0)
    assert auto.rollout_share is None


def test_state_goes_on():
    whole, first = KeepRate(), KeepRate()
    expected = fed(whole, 40, variance_R=VARIANCE, fixed=0.1, train=1.0)
    fed(first, 17, variance_R=VARIANCE, fixed=0.1, train=1.0)
    second = KeepRate()
    second.load_state_dict(first.state_dict())
    assert fed(second, 23, variance_R=VARIANCE, fixed=0.1, train=1.0, first=17) == expected
    with pytest.raises(ConfigurationError, match="saved rates"):
        second.load_state_dict({**first.state_dict(), "grid": [1.0, 0.5]})


@pytest.mark.parametrize("values", [[0.1] * 7, [[0.1] * 8], [np.nan] * 8])
def test_what_is_remembered_has_one_value_for_each_rate(values):
    with pytest.raises(InvalidInputError, match="variance_R"):
        KeepRate().remember(variance_R=values, cost_R=GRID)


def test_prospects_are_what_the_rates_then_do():
    rng = np.random.default_rng(0)
    rewards, lengths = rng.integers(0, 2, (12, 6)), rng.integers(5, 90, (12, 6))
    steps = rng.integers(0, 2, (12, 6))
    options = {"lengths_PG": lengths, "optimizer_step_PG": steps}
    told = dppo.Pruner(dppo.PruneConfig(completion_keep=0.9), seed=0)
    with pytest.raises(InvalidInputError, match="no completions"):
        told.prospects(GRID)
    told.select_completions(rewards, step=0, **options)
    variance_R, cost_R = told.prospects(GRID)
    for rate, variance, cost in zip(GRID, variance_R, cost_R, strict=True):
        done = dppo.Pruner(dppo.PruneConfig(completion_keep=rate), seed=0)
        choice = done.select_completions(rewards, step=0, **options)
        assert done.metrics()["variance/inflation"] == pytest.approx(variance)
        assert (choice.pi * lengths).sum() / lengths.sum() == pytest.approx(cost)
    assert told.metrics()["cost/keep"] > 0.5  # its own generation is what it was


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_on_recorded_gradients_it_reaches_the_best_fixed_rate(share):
    """At least 0.9 of its efficiency, by tokens; variance by the exact norms of the gradients."""
    if not EVIDENCE.exists():
        pytest.skip(f"{EVIDENCE.name} is not beside the checkout")
    recorded = np.load(EVIDENCE)
    completion = recorded["completion_tokens_NG"].astype(float)
    lengths = completion + recorded["prompt_tokens_N"][:, None]
    norm = recorded["gradient_norm_NG"].astype(float)
    pruner, auto = dppo.Pruner(dppo.PruneConfig(), seed=0), KeepRate()
    rng = np.random.default_rng(0)
    for step in range(60):
        rate, window = auto.at(step), rng.choice(len(norm), 32, replace=False)
        pruner.select_completions(
            recorded["reward_NG"][window],
            step=step,
            advantages_PG=recorded["advantage_NG"][window].astype(float),
            surprisal_PG=recorded["surprisal_norm_NG"][window].astype(float),
            lengths_PG=lengths[window],
            keep=rate,
        )
        variance_R, cost_R = pruner.prospects(GRID)
        auto.remember(variance_R=variance_R, cost_R=cost_R)
        # A rollout that takes the share of what training on everything takes.
        auto.measure(fixed=share, train=1 - share, kept_cost=1.0)

    def efficiency(keep):
        size = dppo.completion_sizes(
            recorded["advantage_NG"].astype(float),
            surprisal=recorded["surprisal_norm_NG"].astype(float),
            cost=lengths,
        )
        pi = dppo.proportional_inclusion(size, keep=keep, cost=lengths)
        added = dppo.pruning_variance(norm, pi, design="systematic")
        cost = float((pi * lengths).sum() / lengths.sum())
        return 1 / ((1 + added) * (share + (1 - share) * cost))

    best = max(efficiency(keep) for keep in np.arange(0.05, 1.001, 0.05))
    assert efficiency(auto.at(60)) >= 0.9 * best


# -- the rate and the estimate ---------------------------------------------------------------------


def toy():
    rng = np.random.default_rng(3)
    size, gradients = rng.random(6) + 0.1, rng.normal(size=(6, 3))
    return gradients, [dppo.proportional_inclusion(size, keep=rate) for rate in GRID]


def test_a_rate_that_follows_from_the_rollouts_leaves_no_bias():
    """Every outcome at every rate of the grid: whatever chose it, its mean is the full gradient."""
    gradients, pi_R = toy()
    for pi in pi_R:
        mean = sum(p * outcome.weight @ gradients for p, outcome in dppo.outcomes(pi))
        np.testing.assert_allclose(mean, gradients.sum(axis=0), atol=1e-10)


def test_control_a_rate_that_follows_from_the_draw_is_biased():
    """Drawn again at a higher rate where fewer than two were kept."""
    gradients, pi_R = toy()
    low, high = pi_R[GRID.index(0.25)], pi_R[GRID.index(0.7)]
    mean = np.zeros(3)
    for p, first in dppo.outcomes(low):
        if first.kept.sum() >= 2:
            mean += p * first.weight @ gradients
        else:
            mean += p * sum(q * second.weight @ gradients for q, second in dppo.outcomes(high))
    assert np.abs(mean - gradients.sum(axis=0)).max() > 1e-2
