"""Exact unbiasedness of the numpy core: every outcome is visited with its probability.

TOLERANCE is 1e-10, relative: the sums have at most 4096 float64 terms of order 1 / pi <= 1e4, whose
rounding stays below 4096 * 1e4 * 2.2e-16 = 1e-8 in the worst case and near 1e-13 in practice. The
smallest bias that a negative control below has to show is 1e-2, a hundred million times more.

Suffixes: `_P` prompts, `_PG` prompts x group, `_N` flat rows, `_D` parameters.
"""

import itertools

import numpy as np
import pytest

import dppo
import dppo.pruner
from dppo.estimator.weights import gradient_factor, loss_denominator, two_phase_inclusion

TOLERANCE = 1e-10
LEAST_BIAS = 1e-2
EPS = np.finfo(np.float64).eps
DESIGNS = ("systematic", "poisson")

NAN = np.nan
REWARDS = np.array(
    [[1, 0, 0, NAN], [1, 1, 1, 1], [0.3, 0.7, NAN, NAN], [0, 0, 1, 0]]
)  # 9 live rows: 3 + 0 + 2 + 4; the second group is dead, the first and third are ragged


# ---------------------------------------------------------------- the check


def expected(outcomes):
    """Sum of probability x value; the probabilities must add up to 1."""
    total, mass = 0.0, 0.0
    for probability, value in outcomes:
        total = total + probability * np.asarray(value)
        mass += probability
    assert abs(mass - 1) < 1e-12  # at most 4096 products of at most 16 factors: 4096 * 16 * eps
    return total


def relative_error(outcomes, target):
    """|E[estimate] - target| / |target|."""
    return float(np.linalg.norm(expected(outcomes) - target) / np.linalg.norm(target))


def check_unbiased(outcomes, target):
    """The check that all estimators below face, those that must fail included."""
    error = relative_error(outcomes, target)
    assert error < TOLERANCE, f"biased by {error:.3g}"


def assert_fails_the_check(outcomes, target):
    outcomes = list(outcomes)
    with pytest.raises(AssertionError, match="biased by"):
        check_unbiased(outcomes, target)
    assert relative_error(outcomes, target) > LEAST_BIAS


# ---------------------------------------------------------------- rules x designs


def inclusion_cases():
    """Name -> inclusion probabilities, of every rule, at most 10 of them uncertain."""
    rng = np.random.default_rng(1)
    adv = dppo.group_advantages(REWARDS)
    cost = rng.integers(40, 900, size=REWARDS.shape).astype(float)
    logps = np.log(rng.uniform(0.2, 1.0, size=(*REWARDS.shape, 6)))
    surprisal = dppo.surprisal_norm(logps, np.ones_like(logps))
    size = dppo.completion_sizes(adv.values_PG, surprisal=surprisal, cost=cost)
    spread = np.array([[1.0, 1e-2, 1e-3], [3e-3, 0.5, 0.0]])
    return {
        "proportional": dppo.proportional_inclusion(dppo.completion_sizes(adv.values_PG), keep=0.5),
        "proportional, cost": dppo.proportional_inclusion(
            dppo.completion_sizes(adv.values_PG, cost=cost), keep=0.37, cost=cost
        ),
        "proportional, cost, surprisal": dppo.proportional_inclusion(size, keep=0.5, cost=cost),
        "proportional, float32": dppo.proportional_inclusion(
            size.astype(np.float32), keep=0.3, cost=cost.astype(np.float32)
        ),
        "certainty units": dppo.proportional_inclusion(
            [[100.0, 1, 1, 1], [90.0, 2, 0, 3]], keep=0.5
        ),
        "two orders of magnitude": dppo.proportional_inclusion(spread, keep=0.4),
        "threshold": dppo.threshold_inclusion(adv.values_PG, prune_rate=0.7, scored=adv.scored_PG),
        "threshold, high rate": dppo.threshold_inclusion(adv.values_PG, prune_rate=0.99),
        "threshold, rate 0": dppo.threshold_inclusion(adv.values_PG, prune_rate=0.0),
        "uniform": dppo.uniform_inclusion(adv.live_PG, keep=0.3),
        "inert": dppo.uniform_inclusion(adv.live_PG, keep=1.0),
        "a single row": np.array([[0.25]]),
        "nothing live": np.zeros((2, 3)),
    }


CASES = inclusion_cases()


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", CASES)
def test_weight_averages_to_one_for_every_live_row(name, design):
    pi = CASES[name]
    mean = expected((p, s.weight) for p, s in dppo.outcomes(pi, design=design))
    np.testing.assert_allclose(mean, pi > 0, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", CASES)
def test_weighted_gradient_averages_to_the_full_gradient(name, design):
    pi = CASES[name]
    gradient = np.random.default_rng(2).normal(size=(*pi.shape, 3)) * (pi > 0)[..., None]
    mean = expected(
        (p, np.tensordot(s.weight, gradient, axes=pi.ndim))
        for p, s in dppo.outcomes(pi, design=design)
    )
    np.testing.assert_allclose(mean, gradient.sum(axis=(0, 1)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_systematic_is_unbiased_in_any_order_and_for_many_rows(seed):
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=(12, 8))
    pi = dppo.proportional_inclusion(np.abs(advantages) ** 2, keep=0.3)
    order = dppo.stratified_order(advantages, dppo.generator(seed, 0, stream="order"))
    mean = expected((p, s.weight) for p, s in dppo.outcomes(pi, design="systematic", order=order))
    # The line is 29 long: its rounding, 29 eps per unit, is divided by the smallest probability.
    np.testing.assert_allclose(mean, 1.0, rtol=0, atol=TOLERANCE + 29 * EPS / pi.min())


@pytest.mark.parametrize("tiny", [1e-6, 1e-9, 1e-12])
def test_tiny_probabilities_stay_unbiased(tiny):
    pi = np.array([0.3, tiny, 0.45, 1.0, 2.5 * tiny])
    poisson = expected((p, s.weight) for p, s in dppo.outcomes(pi, design="poisson"))
    np.testing.assert_allclose(poisson, 1.0, rtol=0, atol=TOLERANCE)
    systematic = expected((p, s.weight) for p, s in dppo.outcomes(pi, design="systematic"))
    # A unit's length on the line is off by eps of the line's length, here below 1; see above.
    np.testing.assert_allclose(systematic, 1.0, rtol=0, atol=TOLERANCE + 4 * EPS / tiny)


@pytest.mark.parametrize(
    "pi",
    [
        [0.5, 0.5, 1e-10],  # sums to a little more than 1: the last unit must not be cut off
        [1e-10],  # sums to a little more than 0
        [1.0, 3e-10, 1.0],
        [0.5, 0.5 - 5e-10],  # sums to a little less than 1: the last unit must not grow
        [0.3, 0.4, 0.8, 0.25, 0.25 + 1e-8],
        [0.25, 0.75, 1e-11, 2e-11],
    ],
)
def test_a_total_close_to_a_whole_number_biases_nothing(pi):
    pi = np.array(pi)
    mean = expected((p, s.weight) for p, s in dppo.outcomes(pi, design="systematic"))
    # As above: the line is at most 2 long, its end may be moved by rounding only.
    np.testing.assert_allclose(mean, 1.0, rtol=0, atol=TOLERANCE + 8 * EPS / pi.min())


def test_no_live_row_gets_probability_zero_when_the_budget_ends_on_a_certainty_unit():
    # keep is one float above the cost share of the two large rows: nothing is left for the rest
    # but rounding, and a probability of 0 would bias them away.
    size = np.array([1.0, 1e-13, 0.1, 1.0])
    cost = np.array([1e6, 1.0, 1.0, 10.0])
    pi = dppo.proportional_inclusion(size, keep=0.9999990000119998, cost=cost)
    assert (pi > 0).all()
    mean = expected((p, s.weight) for p, s in dppo.outcomes(pi, design="poisson"))
    np.testing.assert_allclose(mean, 1.0, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------- through the pruner


def every_choice(monkeypatch, call):
    """Run `call` once for every joint outcome of the draws in it: (probability, result)."""
    pending, known, state = [()], {}, {}

    def draw(design, pi, order=None):
        key = (design, pi.tobytes(), None if order is None else order.tobytes())
        if key not in known:
            known[key] = list(dppo.outcomes(pi, design=design, order=order))
        outcomes, number = known[key], state["drawn"]
        if number == len(state["path"]):  # a draw not met on this path: take the first outcome,
            pending.extend((*state["path"], other) for other in range(1, len(outcomes)))
            state["path"] = (*state["path"], 0)  # the others are visited later
        probability, selection = outcomes[state["path"][number]]
        state["drawn"] += 1
        state["probability"] *= probability
        return selection.kept

    monkeypatch.setattr(
        dppo.pruner, "systematic_kept", lambda pi, order, rng: draw("systematic", pi, order)
    )
    monkeypatch.setattr(dppo.pruner, "poisson_kept", lambda pi, rng: draw("poisson", pi))
    while pending:
        state.update(path=pending.pop(), drawn=0, probability=1.0)
        result = call()
        yield state["probability"], result


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("rule", ["proportional", "threshold", "uniform", "inert"])
def test_pruner_weights_average_to_one_on_live_rows(monkeypatch, rule, design):
    config = dppo.PruneConfig(completion_rule=rule, sampling_design=design, completion_keep=0.4)
    pruner = dppo.Pruner(config, seed=0)
    lengths = np.arange(16).reshape(4, 4) * 13 + 5

    def call():
        return pruner.select_completions(REWARDS, step=3, lengths_PG=lengths)

    live = dppo.group_advantages(REWARDS).live_PG
    mean = expected((p, c.weight) for p, c in every_choice(monkeypatch, call))
    np.testing.assert_allclose(mean, live, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("design", DESIGNS)
def test_pruner_draws_for_two_optimizer_steps_are_unbiased_and_independent(monkeypatch, design):
    rewards = [[1, 0, 0, 1], [0, 1, 0, 0]]
    step_of = np.array([[0, 1, 1, 0], [1, 0, 1, 0]])  # rows of one group train in different steps
    pruner = dppo.Pruner(dppo.PruneConfig(completion_keep=0.6, sampling_design=design), seed=0)

    def call():
        return pruner.select_completions(rewards, step=0, optimizer_step_PG=step_of)

    visited = list(every_choice(monkeypatch, call))
    mean = expected((p, c.weight) for p, c in visited)
    np.testing.assert_allclose(mean, 1.0, rtol=0, atol=TOLERANCE)
    # Independent: the product of the weights of any two rows of different steps averages to 1.
    product = expected((p, np.outer(c.weight, c.weight)) for p, c in visited)
    apart = step_of.ravel()[:, None] != step_of.ravel()[None, :]
    np.testing.assert_allclose(product[apart], 1.0, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------- two phases


WINDOW = np.array(
    [[1, 0, 0], [0, 1, 1], [0.2, 0.5, 0.9], [1, 0, 1], [0, 0.1, 1]]
)  # five candidate prompts, three of them are rolled out
WINDOW_SIZE_P = np.array([0.3, 1.0, 0.7, 2.5, 0.5])


def windows():
    pi_P = dppo.proportional_inclusion(WINDOW_SIZE_P, keep=3 / 5)
    for probability, window in dppo.outcomes(pi_P, design="systematic"):
        assert window.kept.sum() == 3
        yield probability, window


@pytest.mark.parametrize("design", DESIGNS)
def test_two_phases_re_solved_for_every_window_average_to_the_full_gradient(design):
    gradient = np.random.default_rng(5).normal(size=(*WINDOW.shape, 4))
    denominator = WINDOW.size  # M * G, whatever was rolled out

    def estimates():
        for probability, window in windows():
            pi_P = window.pi[window.kept]
            adv = dppo.group_advantages(WINDOW[window.kept])
            size = dppo.completion_sizes(adv.values_PG, weight_P=1 / pi_P)
            pi = dppo.proportional_inclusion(size, keep=0.5)
            both = two_phase_inclusion(pi_P, pi)
            for chance, drawn in dppo.outcomes(pi, design=design):
                weight = dppo.Selection(drawn.kept, both).weight
                estimate = np.tensordot(weight, gradient[window.kept], axes=2) / denominator
                yield probability * chance, estimate

    check_unbiased(estimates(), gradient.sum(axis=(0, 1)) / denominator)


def test_two_phases_without_the_prompt_weight_fail_the_check():
    gradient = np.random.default_rng(5).normal(size=(*WINDOW.shape, 4)) + 1
    estimates = (
        (p, gradient[window.kept].sum(axis=(0, 1)) * 5 / 3 / WINDOW.size) for p, window in windows()
    )
    assert_fails_the_check(estimates, gradient.sum(axis=(0, 1)) / WINDOW.size)


@pytest.mark.parametrize("design", DESIGNS)
def test_pruner_composes_both_phases(monkeypatch, design):
    gradient = np.random.default_rng(6).normal(size=(*WINDOW.shape, 2))
    pruner = dppo.Pruner(dppo.PruneConfig(sampling_design=design), seed=0)

    def estimates():
        for probability, window in windows():

            def call(window=window):
                return pruner.select_completions(WINDOW[window.kept], step=0, prompts=window)

            for chance, choice in every_choice(monkeypatch, call):
                weighted = np.tensordot(choice.weight, gradient[window.kept], axes=2)
                yield probability * chance, weighted

    check_unbiased(estimates(), gradient.sum(axis=(0, 1)))


# ---------------------------------------------------------------- five ways to lose it
# A toy batch of six completions in one group. Each gradient is A_i s_i + beta k_i; the correct
# estimate passes the check, each of the usual mistakes must fail it.

TOY_REWARD = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 0.0])
TOY_TOKENS = np.array([3.0, 9.0, 4.0, 12.0, 6.0, 2.0])
TOY_ADVANTAGE = dppo.group_advantages([TOY_REWARD]).values_PG[0]
TOY_SCORE = np.random.default_rng(7).normal(size=(6, 2)) + np.array([1.0, 0.5])
TOY_KL = 0.3 * np.random.default_rng(8).normal(size=(6, 2)) + np.array([0.3, -0.2])
TOY_POLICY = TOY_ADVANTAGE[:, None] * TOY_SCORE
TOY_PI = dppo.proportional_inclusion(np.abs(TOY_ADVANTAGE) / np.sqrt(TOY_TOKENS), keep=0.5)


def toy(estimate, design):
    return ((p, estimate(s)) for p, s in dppo.outcomes(TOY_PI, design=design))


@pytest.mark.parametrize("design", DESIGNS)
def test_toy_estimate_is_unbiased_with_every_term_and_both_denominators(design):
    full = TOY_POLICY + TOY_KL
    check_unbiased(toy(lambda s: s.weight @ full / 6, design), full.sum(0) / 6)
    tokens = TOY_TOKENS[:, None] * full
    check_unbiased(
        toy(lambda s: s.weight @ tokens / TOY_TOKENS.sum(), design),
        tokens.sum(0) / TOY_TOKENS.sum(),
    )


@pytest.mark.parametrize("design", DESIGNS)
def test_denominator_over_the_kept_rows_fails_the_check(design):
    estimates = toy(lambda s: s.weight @ TOY_POLICY / max(s.kept.sum(), 1), design)
    assert_fails_the_check(estimates, TOY_POLICY.sum(0) / 6)


@pytest.mark.parametrize("design", DESIGNS)
def test_denominator_over_the_kept_tokens_fails_the_check(design):
    tokens = TOY_TOKENS[:, None] * TOY_POLICY
    estimates = toy(lambda s: s.weight @ tokens / max(TOY_TOKENS[s.kept].sum(), 1), design)
    assert_fails_the_check(estimates, tokens.sum(0) / TOY_TOKENS.sum())


@pytest.mark.parametrize("design", DESIGNS)
def test_denominator_over_the_weighted_kept_tokens_fails_the_check(design):
    # The ratio (Hajek) estimator: consistent, not unbiased, and what a weighted mean computes.
    tokens = TOY_TOKENS[:, None] * TOY_POLICY
    estimates = toy(lambda s: s.weight @ tokens / max(s.weight @ TOY_TOKENS, 1), design)
    assert_fails_the_check(estimates, tokens.sum(0) / TOY_TOKENS.sum())


@pytest.mark.parametrize("design", DESIGNS)
def test_advantages_recomputed_on_survivors_fail_the_check(design):
    def recomputed(s):
        advantage = np.zeros(6)
        if s.kept.sum() >= 2:
            advantage[s.kept] = dppo.group_advantages([TOY_REWARD[s.kept]]).values_PG[0]
        return s.weight * advantage @ TOY_SCORE / 6

    assert_fails_the_check(toy(recomputed, design), TOY_POLICY.sum(0) / 6)


@pytest.mark.parametrize("design", DESIGNS)
def test_weight_on_the_advantage_only_fails_the_check(design):
    def half_weighted(s):
        return (s.weight @ TOY_POLICY + s.kept @ TOY_KL) / 6

    assert_fails_the_check(toy(half_weighted, design), (TOY_POLICY + TOY_KL).sum(0) / 6)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_deterministic_lowest_fraction_fails_the_check(weight):
    kept = np.zeros(6, dtype=bool)
    kept[np.argsort(-np.abs(TOY_ADVANTAGE))[:3]] = True  # probabilities 0 and 1: one outcome
    estimates = [(1.0, weight * kept @ TOY_POLICY / 6)]
    assert_fails_the_check(estimates, TOY_POLICY.sum(0) / 6)


def floor_drops(count, rate):
    """Every way of dropping floor(rate * count) rows, all equally likely, weight 1 / (1 - rate)."""
    ways = list(itertools.combinations(range(count), count - int(np.floor(rate * count))))
    for way in ways:
        kept = np.zeros(count)
        kept[list(way)] = 1
        yield 1 / len(ways), kept / (1 - rate)


@pytest.mark.parametrize(
    ("count", "rate", "factor"),
    [
        (1, 0.5, 2.0),  # floor(0.5) = 0 dropped, weight 2
        (3, 0.5, 4 / 3),  # 2 of 3 kept, weight 2
        (4, 0.7, 5 / 3),  # 2 of 4 kept, weight 10/3
        (3, 0.9, 10 / 3),  # 1 of 3 kept, weight 10
    ],
)
def test_rounded_down_drops_fail_the_check(count, rate, factor):
    gradient = np.random.default_rng(9).normal(size=(count, 2)) + 1
    estimates = [(p, w @ gradient) for p, w in floor_drops(count, rate)]
    assert_fails_the_check(estimates, gradient.sum(0))
    # Every row is off by the same factor; eps-sized sums of at most 6 terms.
    np.testing.assert_allclose(expected(estimates), factor * gradient.sum(0), rtol=1e-12)


def test_rounded_down_drops_are_right_where_nothing_is_rounded():
    gradient = np.random.default_rng(9).normal(size=(4, 2)) + 1
    check_unbiased(((p, w @ gradient) for p, w in floor_drops(4, 0.5)), gradient.sum(0))


# ---------------------------------------------------------------- two successive optimizer steps
# A small regression problem with a nonlinear gradient: eight rows, three parameters. The first
# step moves theta by what was drawn, so the second step's draw must not be the same one.

X_ND = np.random.default_rng(0).standard_normal((8, 3))
Y_N = np.random.default_rng(1).standard_normal(8)
RATE = 0.3
UNEVEN_PI = np.array([0.3, 0.6, 0.45, 0.7, 0.5, 0.35, 0.8, 0.4])


def row_gradients(theta):
    output = np.tanh(X_ND @ theta)
    return ((output - Y_N) * (1 - output**2))[:, None] * X_ND


def one_step(weight_N, rows=slice(None)):
    """Theta after the first step, from 0, on `rows`."""
    gradient = row_gradients(np.zeros(3))[rows]
    return -RATE * weight_N[rows] @ gradient / len(gradient)


def joint(outcomes, rows_1, rows_2, second):
    """(E[g(theta_1)], E[ghat_2(theta_1)]); `second` gives step 2's outcomes, given step 1's."""
    target, estimate = np.zeros(3), np.zeros(3)
    for p, first in outcomes:
        gradient = row_gradients(one_step(first.weight, rows_1))[rows_2]
        target += p * gradient.mean(axis=0)
        for q, again in second(first):
            estimate += p * q * again.weight[rows_2] @ gradient / len(gradient)
    return target, estimate


def distance(pair):
    target, estimate = pair
    return np.linalg.norm(estimate - target) / np.linalg.norm(target)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("pi", [np.full(8, 0.5), UNEVEN_PI], ids=["half", "uneven"])
def test_second_step_with_a_fresh_draw_is_unbiased_and_with_the_same_draw_is_not(pi, design):
    every = list(dppo.outcomes(pi, design=design))
    rows = slice(None)
    assert distance(joint(every, rows, rows, lambda first: every)) < TOLERANCE
    assert distance(joint(every, rows, rows, lambda first: [(1.0, first)])) > LEAST_BIAS


def test_two_halves_of_a_generation_need_a_uniform_number_each():
    first_half, second_half = slice(0, 4), slice(4, 8)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    shared = list(dppo.outcomes(UNEVEN_PI, design="systematic", order=order))
    reused = joint(shared, first_half, second_half, lambda first: [(1.0, first)])
    assert distance(reused) > LEAST_BIAS

    def padded(rows):
        for p, s in dppo.outcomes(UNEVEN_PI[rows], design="systematic"):
            kept, pi = np.zeros(8, dtype=bool), np.zeros(8)
            kept[rows], pi[rows] = s.kept, s.pi
            yield p, dppo.Selection(kept, pi)

    again = list(padded(second_half))
    fresh = joint(padded(first_half), first_half, second_half, lambda first: again)
    assert distance(fresh) < TOLERANCE


def test_at_frozen_parameters_a_reused_draw_goes_unnoticed():
    # Why the two steps above are enumerated jointly: without the first update nothing shows.
    gradient = row_gradients(np.zeros(3))
    check_unbiased(((p, s.weight @ gradient) for p, s in dppo.outcomes(UNEVEN_PI)), gradient.sum(0))


# ---------------------------------------------------------------- denominators of the hosts
# What a host computes: a mean over what it sees in the micro-batch it is given. The survivors of
# two micro-batches of three rows are re-packed into one; gradient_factor must undo the difference.

HOST_TOKENS = np.array([2.0, 6.0, 1.0, 3.0, 0.0, 5.0])
HOST_GRADIENT = np.random.default_rng(11).normal(size=(6, 3)) * (HOST_TOKENS > 0)[:, None]
HOST_PI = np.array([0.4, 0.9, 0.25, 1.0, 0.5, 0.7])
SPLIT = (np.arange(3), np.arange(3, 6))


def host_divisor(kind, rows, tokens, generation_tokens):
    if kind == "rows":
        return rows
    return max(tokens, 1) if kind == "micro-batch tokens" else generation_tokens


def full_host_gradient(kind):
    total = HOST_TOKENS.sum()
    return sum(
        HOST_GRADIENT[rows].sum(0) / host_divisor(kind, 3, HOST_TOKENS[rows].sum(), total)
        for rows in SPLIT
    )


def repacked_host_gradient(kind, selection, *, padding, correct=True):
    kept = np.flatnonzero(selection.kept)
    rows, tokens = len(kept) + padding, HOST_TOKENS[kept].sum()
    if rows == 0:
        return np.zeros(3)
    factor = selection.weight[kept]
    if correct:
        factor = gradient_factor(
            factor,
            kind,
            rows=rows,
            full_rows=3,
            tokens=int(tokens),
            full_tokens_N=np.repeat([HOST_TOKENS[r].sum() for r in SPLIT], 3)[kept],
        )
    divisor = host_divisor(kind, rows, tokens, HOST_TOKENS.sum())
    return factor @ HOST_GRADIENT[kept] / divisor


KINDS = ("rows", "generation tokens", "micro-batch tokens")


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_factor_makes_the_repacked_host_gradient_unbiased(kind, padding, design):
    estimates = (
        (p, repacked_host_gradient(kind, s, padding=padding))
        for p, s in dppo.outcomes(HOST_PI, design=design)
    )
    check_unbiased(estimates, full_host_gradient(kind))


@pytest.mark.parametrize("kind", ["rows", "micro-batch tokens"])
def test_weights_alone_do_not_undo_the_hosts_mean(kind):
    estimates = (
        (p, repacked_host_gradient(kind, s, padding=0, correct=False))
        for p, s in dppo.outcomes(HOST_PI)
    )
    assert_fails_the_check(estimates, full_host_gradient(kind))


# Four completions of 2, 6, 1 and 3 tokens with the same loss at each of their tokens.
TABLE_TOKENS = np.array([2, 6, 1, 3])
TABLE_LOSS = np.array([1.0, -1.0, 2.0, 0.5])
MAX_LENGTH = 8
TABLE = [
    # rows of a micro-batch, loss type, accumulated loss
    (4, "grpo", 0.625),  # (1 - 1 + 2 + 0.5) / 4
    (2, "grpo", 0.625),
    (1, "grpo", 0.625),
    (4, "dapo", -1 / 24),  # (2 - 6 + 2 + 1.5) / 12
    (2, "dapo", -1 / 24),
    (1, "dapo", -1 / 24),
    (4, "dr_grpo", -0.015625),  # -0.5 / (4 * 8)
    (2, "dr_grpo", -0.015625),
    (1, "dr_grpo", -0.015625),
    (4, "bnpo", -1 / 24),
    (2, "bnpo", 0.1875),  # (-4 / 8 + 3.5 / 4) / 2
    (1, "bnpo", 0.625),
]


def accumulated_loss(loss_type, micro_batches, accumulation, generation_tokens):
    """Sum over micro-batches of what the host adds up; each is (factor, loss, tokens, rows)."""
    denominator = loss_denominator(loss_type)
    total = 0.0
    for factor, loss, tokens, rows in micro_batches:
        per_row = loss if denominator.per == "sequence" else loss * tokens
        value = (factor * per_row).sum()
        if denominator.kind == "generation tokens":
            total += value / generation_tokens
            continue
        divisor = host_divisor(denominator.kind, rows, tokens.sum(), None)
        divisor = divisor * MAX_LENGTH if loss_type == "dr_grpo" else divisor
        total += value / divisor / accumulation
    return total


@pytest.mark.parametrize(("rows", "loss_type", "value"), TABLE)
def test_accumulated_loss_of_the_full_batch(rows, loss_type, value):
    parts = np.split(np.arange(4), 4 // rows)
    batches = [(np.ones(rows), TABLE_LOSS[p], TABLE_TOKENS[p], rows) for p in parts]
    # Four terms of order 1.
    assert accumulated_loss(loss_type, batches, len(parts), 12) == pytest.approx(value, abs=1e-14)


@pytest.mark.parametrize(("rows", "loss_type", "value"), TABLE)
def test_accumulated_loss_of_the_pruned_batch_averages_to_it(rows, loss_type, value):
    parts = np.split(np.arange(4), 4 // rows)
    full_tokens = np.concatenate([np.full(rows, TABLE_TOKENS[p].sum()) for p in parts])
    kind = loss_denominator(loss_type).kind

    def pruned(selection):  # all survivors in one micro-batch; the host still divides by the split
        kept = np.flatnonzero(selection.kept)
        if kept.size == 0:
            return 0.0
        factor = gradient_factor(
            selection.weight[kept],
            kind,
            rows=kept.size,
            full_rows=rows,
            tokens=int(TABLE_TOKENS[kept].sum()),
            full_tokens_N=full_tokens[kept],
        )
        batch = (factor, TABLE_LOSS[kept], TABLE_TOKENS[kept], kept.size)
        return accumulated_loss(loss_type, [batch], len(parts), 12)

    pi = [0.5, 0.8, 0.3, 0.65]
    mean = expected((p, pruned(s)) for p, s in dppo.outcomes(pi))
    assert mean == pytest.approx(value, abs=TOLERANCE)


def test_a_completion_without_loss_tokens_counts_as_a_row_and_not_as_tokens():
    loss, tokens = np.append(TABLE_LOSS, 0.0), np.append(TABLE_TOKENS, 0)
    batch = [(np.ones(5), loss, tokens, 5)]
    # Exact up to the rounding of four terms.
    assert accumulated_loss("dapo", batch, 1, 12) == pytest.approx(-1 / 24, abs=1e-14)
    assert accumulated_loss("grpo", batch, 1, 12) == pytest.approx(2.5 / 5, abs=1e-14)
    assert accumulated_loss("dr_grpo", batch, 1, 12) == pytest.approx(-0.5 / 40, abs=1e-14)
