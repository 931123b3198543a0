"""Exact unbiasedness of both phases through the pruner: every window, every draw of completions.

A window of five candidates is chosen after some history, three are rolled out, and the pruner
solves the probabilities of their completions anew for each of the windows. Every outcome of both
phases is visited with its probability.

TOLERANCE is 1e-10, relative: at most 6 windows x 16 draws of float64 terms of order 1 / pi <= 100,
whose rounding stays below 1e4 * 2.2e-16 = 2e-12. The smallest bias that a negative control below
has to show is 1e-2, a hundred million times more.

Suffixes: `_M` candidate prompts. `GRADIENT`: candidates x group x parameters.
"""

import numpy as np
import pytest

import dppo
import dppo._prompt_phase
import dppo.pruner

TOLERANCE = 1e-10
LEAST_BIAS = 1e-2
COUNT, WINDOW, GROUP = 3, 5, 4
STEP = 3
PROMPT_RULES = ("proportional", "threshold", "uniform")
COMPLETION_RULES = ("proportional", "threshold")

IDS = [3, 11, 4, 29, 8]
HISTORY = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
REWARDS = np.array(
    [[1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
)  # of this visit; every group is live, so every row counts
GRADIENT = np.random.default_rng(5).normal(size=(WINDOW, GROUP, 3)) + 0.7
GRADIENT[1] *= 4  # 11 is unlikely, see HISTORY, and counts most
FULL = GRADIENT.sum(axis=(0, 1)) / (WINDOW * GROUP)


# ---------------------------------------------------------------- the check


def expected(outcomes):
    """Sum of probability x value; the probabilities must add up to 1."""
    total, mass = 0.0, 0.0
    for probability, value in outcomes:
        total = total + probability * np.asarray(value)
        mass += probability
    assert abs(mass - 1) < 1e-12  # about 100 products of two, each rounded by eps
    return total


def relative_error(outcomes, target):
    return float(np.linalg.norm(expected(outcomes) - target) / np.linalg.norm(target))


def check_unbiased(outcomes, target):
    """The check that all estimators below face, those that must fail included."""
    error = relative_error(outcomes, target)
    assert error < TOLERANCE, f"biased by {error:.3g}"


def assert_fails_the_check(outcomes, target=FULL):
    outcomes = list(outcomes)
    with pytest.raises(AssertionError, match="biased by"):
        check_unbiased(outcomes, target)
    assert relative_error(outcomes, target) > LEAST_BIAS


# ---------------------------------------------------------------- every outcome of both phases


def make(prompt_rule="proportional", completion_rule="proportional"):
    config = dppo.PruneConfig(
        prompt_keep=COUNT / WINDOW,
        prompt_rule=prompt_rule,
        completion_rule=completion_rule,
        completion_keep=0.5,
    )
    pruner = dppo.Pruner(config, seed=4)
    pruner.observe(IDS, HISTORY, lengths_PG=np.arange(20).reshape(5, 4) + 10, step=0)
    pruner.observe(IDS[:2], HISTORY[:2], step=1)
    return pruner


def every_outcome(monkeypatch, module, name, call):
    """Run `call`, in which one systematic draw is made, once for each of its outcomes."""
    results, number = [], 0
    real = getattr(module, name)
    while True:
        seen = []

        def draw(pi, *arguments, number=number, seen=seen, **named):
            order = named.get("order")
            if order is None:
                order = next(a for a in arguments if isinstance(a, np.ndarray))
            seen.extend(dppo.outcomes(pi, design="systematic", order=order))
            selection = seen[number][1]
            return selection if name == "systematic" else selection.kept

        monkeypatch.setattr(module, name, draw)
        result = call()
        monkeypatch.setattr(module, name, real)
        results.append((seen[number][0], result))
        number += 1
        if number == len(seen):
            return results


def every_window(monkeypatch, pruner):
    def call():
        return pruner.select_prompts(IDS, count=COUNT, step=STEP)

    return every_outcome(monkeypatch, dppo._prompt_phase, "systematic", call)


def every_choice(monkeypatch, pruner, window):
    def call():
        return pruner.select_completions(REWARDS[window.kept], step=STEP, prompts=window)

    return every_outcome(monkeypatch, dppo.pruner, "systematic_kept", call)


def estimates(monkeypatch, pruner, estimate):
    """(Probability, estimate(window, choice)) over both phases."""
    for chance, window in every_window(monkeypatch, pruner):
        for probability, choice in every_choice(monkeypatch, pruner, window):
            yield chance * probability, estimate(window, choice)


def correct(window, choice):
    """Weights of both phases, denominator of all candidates."""
    return np.tensordot(choice.weight, GRADIENT[window.kept], axes=2) / (WINDOW * GROUP)


@pytest.mark.parametrize("completion_rule", COMPLETION_RULES)
@pytest.mark.parametrize("prompt_rule", PROMPT_RULES)
def test_both_phases_average_to_the_gradient_of_all_candidates(
    monkeypatch, prompt_rule, completion_rule
):
    pruner = make(prompt_rule, completion_rule)
    outcomes = list(estimates(monkeypatch, pruner, correct))
    assert len(outcomes) > 10
    check_unbiased(outcomes, FULL)


@pytest.mark.parametrize("prompt_rule", PROMPT_RULES)
def test_windows_keep_three_and_weigh_each_candidate_by_one_on_average(monkeypatch, prompt_rule):
    pruner = make(prompt_rule)
    windows = every_window(monkeypatch, pruner)
    assert len(windows) > 2
    assert all(window.kept.sum() == COUNT for _, window in windows)
    pi_M = windows[0][1].pi
    assert (np.ptp(pi_M) > 0.1) == (prompt_rule != "uniform")
    np.testing.assert_allclose(
        expected((p, w.weight) for p, w in windows), np.ones(WINDOW), rtol=0, atol=TOLERANCE
    )


def test_completion_probabilities_are_solved_anew_for_every_window(monkeypatch):
    # The same prompt has other probabilities in another company: what the check must survive.
    pruner = make()
    of_first = {
        pruner.select_completions(REWARDS[w.kept], step=STEP, prompts=w).pi_completion[0].tobytes()
        for _, w in every_window(monkeypatch, pruner)
        if w.kept[0]
    }
    assert len(of_first) > 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prompt_rule", PROMPT_RULES)
def test_any_order_of_the_window_is_unbiased(prompt_rule, seed):
    pi = make(prompt_rule).select_prompts(IDS, count=COUNT, step=STEP).pi
    order = np.random.default_rng(seed).permutation(WINDOW)
    windows = list(dppo.outcomes(pi, design="systematic", order=order))
    assert all(window.kept.sum() == COUNT for _, window in windows)
    mean = expected((p, np.tensordot(w.weight, GRADIENT.sum(axis=1), axes=1)) for p, w in windows)
    check_unbiased([(1.0, mean / (WINDOW * GROUP))], FULL)


def test_the_draw_of_the_pruner_is_one_of_the_outcomes(monkeypatch):
    pruner = make()
    outcomes = {window.kept.tobytes() for _, window in every_window(monkeypatch, pruner)}
    assert pruner.select_prompts(IDS, count=COUNT, step=STEP).kept.tobytes() in outcomes


# ---------------------------------------------------------------- ways to lose it


@pytest.mark.parametrize("prompt_rule", PROMPT_RULES)
def test_denominator_of_the_prompts_rolled_out_fails_the_check(monkeypatch, prompt_rule):
    def estimate(window, choice):
        return correct(window, choice) * WINDOW / COUNT  # the host's mean over its K x G rows

    assert_fails_the_check(estimates(monkeypatch, make(prompt_rule), estimate))


@pytest.mark.parametrize("prompt_rule", PROMPT_RULES)
def test_rescaling_to_the_candidates_twice_fails_the_check(monkeypatch, prompt_rule):
    def estimate(window, choice):
        return correct(window, choice) * COUNT / WINDOW

    assert_fails_the_check(estimates(monkeypatch, make(prompt_rule), estimate))


@pytest.mark.parametrize(
    ("prompt_rule", "divisor"),
    # Not uniform with K: there all pi are K / M, and the mean over the prompts rolled out is right.
    [
        (rule, d)
        for rule in PROMPT_RULES
        for d in (WINDOW, COUNT)
        if (rule, d) != ("uniform", COUNT)
    ],
)
def test_dropping_the_prompt_weight_fails_the_check(monkeypatch, prompt_rule, divisor):
    def estimate(window, choice):
        weight = choice.kept / np.where(choice.kept, choice.pi_completion, 1)
        return np.tensordot(weight, GRADIENT[window.kept], axes=2) / (divisor * GROUP)

    assert_fails_the_check(estimates(monkeypatch, make(prompt_rule), estimate))


@pytest.mark.parametrize("completion_rule", COMPLETION_RULES)
def test_wrong_completion_probabilities_fail_the_check(monkeypatch, completion_rule):
    pruner = make(completion_rule=completion_rule)

    def prompt_weight_only(window, choice):
        weight = choice.kept / window.pi[window.kept][:, None]
        return np.tensordot(weight, GRADIENT[window.kept], axes=2) / (WINDOW * GROUP)

    assert_fails_the_check(estimates(monkeypatch, pruner, prompt_weight_only))


def test_completion_probabilities_of_another_window_fail_the_check(monkeypatch):
    # Solved once for all five candidates and not for the three that were rolled out.
    pruner = make()
    everything = dppo.Selection(np.ones(WINDOW, bool), np.ones(WINDOW))
    once = pruner.select_completions(REWARDS, step=STEP, prompts=everything).pi_completion

    def estimate(window, choice):
        weight = choice.kept / once[window.kept] / window.pi[window.kept][:, None]
        return np.tensordot(weight, GRADIENT[window.kept], axes=2) / (WINDOW * GROUP)

    assert_fails_the_check(estimates(monkeypatch, pruner, estimate))


def test_skipping_prompts_without_signal_in_the_past_for_certain_fails_the_check(monkeypatch):
    # 11 and 29 had constant rewards: to take the other three for certain is the obvious rule.
    constant = HISTORY.min(axis=1) == HISTORY.max(axis=1)
    kept = ~constant
    assert kept.sum() == COUNT
    pruner = make()
    certain = dppo.Selection(kept, kept.astype(float))
    for scale in (1, WINDOW / COUNT):
        outcomes = [
            (p, correct(certain, choice) * scale)
            for p, choice in every_choice(monkeypatch, pruner, certain)
        ]
        assert_fails_the_check(outcomes)
        # It is unbiased for the candidates that it leaves, which is why nobody notices.
        if scale == 1:
            check_unbiased(outcomes, GRADIENT[kept].sum(axis=(0, 1)) / (WINDOW * GROUP))
