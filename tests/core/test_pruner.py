"""The pruner: one decision out of rewards, the same on every rank and after every resume.

Suffixes: `_P` prompts, `_PG` prompts x group.
"""

import json

import numpy as np
import pytest

import dppo
from dppo.pruner import DROP_REASONS

NAN = np.nan
RULES = ("proportional", "threshold", "uniform", "inert")
DESIGNS = ("systematic", "poisson")


def make(seed=0, **options):
    return dppo.Pruner(dppo.PruneConfig(**options), seed=seed)


def rewards_of(seed, prompts=8, group=6):
    """Random rewards with a dead group, missing scores and an unscorable group."""
    rewards = np.random.default_rng(seed).integers(0, 3, size=(prompts, group)) / 2
    rewards[0] = 1.0
    rewards[1] = 0.0
    rewards[2, 3:] = NAN
    rewards[3, 1:] = NAN
    return rewards


def assert_same(first, second):
    for name in ("kept", "pi", "weight", "pi_completion", "advantages", "live", "norm"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.dropped == second.dropped


# ---------------------------------------------------------------- determinism


@pytest.mark.parametrize("design", DESIGNS)
def test_decisions_do_not_depend_on_what_was_decided_before(design):
    calls = [(step, iteration) for step in range(4) for iteration in range(2)]

    def decide(pruner, step, iteration):
        return pruner.select_completions(rewards_of(step), step=step, iteration=iteration)

    pruner = make(sampling_design=design)
    in_order = {call: decide(pruner, *call) for call in calls}
    pruner = make(sampling_design=design)
    for call in reversed(calls):
        assert_same(decide(pruner, *call), in_order[call])
    for call in calls:  # a fresh pruner for each, as after a resume
        assert_same(decide(make(sampling_design=design), *call), in_order[call])


@pytest.mark.parametrize("design", DESIGNS)
def test_seed_step_and_iteration_change_the_draw_and_not_the_probabilities(design):
    rewards = rewards_of(0, prompts=16)
    base = make(sampling_design=design).select_completions(rewards, step=0)
    others = [
        make(seed=1, sampling_design=design).select_completions(rewards, step=0),
        make(sampling_design=design).select_completions(rewards, step=1),
        make(sampling_design=design).select_completions(rewards, step=0, iteration=1),
    ]
    for other in others:
        np.testing.assert_array_equal(other.pi, base.pi)
        assert (other.kept != base.kept).any()


def test_numpy_random_state_is_neither_read_nor_changed():
    np.random.seed(1)  # noqa: NPY002 - the global state is what must not matter
    first = make().select_completions(rewards_of(0), step=0)
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert_same(make().select_completions(rewards_of(0), step=0), first)
    np.random.seed(1)  # noqa: NPY002
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


# ---------------------------------------------------------------- one decision


def test_choice_of_a_batch_worked_by_hand():
    # Group 1: rewards 1 0 0 0, advantages 3/4 -1/4 -1/4 -1/4 over the same spread; group 2 dead.
    # Equal cost, keep 1/2: sizes 3 1 1 1 of sum 6 and a budget of 2 rows give pi 1, 1/3 1/3 1/3.
    choice = make().select_completions([[1, 0, 0, 0], [1, 1, 1, 1]], step=0)
    # A few float64 operations on numbers of order 1.
    np.testing.assert_allclose(choice.pi, [[1, 1 / 3, 1 / 3, 1 / 3], [0] * 4], rtol=0, atol=1e-12)
    assert choice.live.tolist() == [[True] * 4, [False] * 4]
    assert choice.kept.sum() == 2
    assert choice.kept[0, 0]
    assert sorted(choice.weight[0].round(9)) == [0.0, 0.0, 1.0, 3.0]
    assert choice.dropped == {**dict.fromkeys(DROP_REASONS, 0), "all_right": 4, "sampled_out": 2}
    np.testing.assert_array_equal(
        choice.advantages, dppo.group_advantages([[1, 0, 0, 0], [1, 1, 1, 1]]).values_PG
    )


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("rule", RULES)
def test_choices_are_consistent(rule, design):
    pruner = make(completion_rule=rule, sampling_design=design)
    for step in range(5):
        choice = pruner.select_completions(rewards_of(step), step=step)
        np.testing.assert_array_equal(choice.pi > 0, choice.live)
        np.testing.assert_array_equal(choice.pi, choice.pi_completion)
        np.testing.assert_array_equal(choice.norm > 0, choice.live)
        assert (choice.kept <= choice.live).all()
        # Exact: the weight is one division.
        np.testing.assert_array_equal(choice.weight[choice.kept], 1 / choice.pi[choice.kept])
        assert (choice.weight[~choice.kept] == 0).all()
        assert tuple(choice.dropped) == DROP_REASONS
        assert sum(choice.dropped.values()) == (~choice.kept).sum()
        assert choice.dropped["sampled_out"] == (choice.live & ~choice.kept).sum()


def test_choices_are_read_only():
    choice = make().select_completions([[1, 0]], step=0)
    for name in ("kept", "pi", "weight", "pi_completion", "advantages", "live", "norm"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(choice, name)[0, 0] = 0


def test_inputs_are_not_changed():
    rewards = rewards_of(0)
    arguments = {
        "advantages_PG": np.random.default_rng(1).normal(size=rewards.shape),
        "lengths_PG": np.ones(rewards.shape),
        "surprisal_PG": np.ones(rewards.shape),
        "live": np.ones(rewards.shape, dtype=bool),
    }
    before = {name: value.copy() for name, value in arguments.items()}
    copy = rewards.copy()
    make().select_completions(rewards, step=0, **arguments)
    np.testing.assert_array_equal(rewards, copy)
    for name, value in arguments.items():
        np.testing.assert_array_equal(value, before[name])


def test_rules_give_the_probabilities_of_their_functions():
    rewards, lengths = rewards_of(0), np.arange(48.0).reshape(8, 6) + 1
    prompt_lengths = np.arange(8.0) * 10
    adv = dppo.group_advantages(rewards)
    cost = lengths + prompt_lengths[:, None]
    surprisal = np.random.default_rng(3).uniform(0.1, 1, size=rewards.shape)
    size = dppo.completion_sizes(adv.values_PG, surprisal=surprisal, cost=cost)
    expected = {
        "proportional": dppo.proportional_inclusion(size, keep=0.4, cost=cost),
        "threshold": dppo.threshold_inclusion(
            adv.values_PG, prune_rate=0.6, live=adv.live_PG, scored=adv.scored_PG
        ),
        "uniform": dppo.uniform_inclusion(adv.live_PG, keep=0.4),
        "inert": dppo.uniform_inclusion(adv.live_PG, keep=1.0),
    }
    for rule, pi in expected.items():
        pruner = make(completion_rule=rule, completion_keep=0.4, completion_prune_rate=0.6)
        choice = pruner.select_completions(
            rewards,
            step=0,
            lengths_PG=lengths,
            prompt_lengths_P=prompt_lengths,
            surprisal_PG=surprisal,
        )
        # The same operations; the cost is summed over a flat array instead.
        np.testing.assert_allclose(choice.pi, pi, rtol=1e-12)


def test_host_advantages_are_used_as_they_are_except_in_dead_groups():
    rewards = [[1, 0, 0], [0.1, 0.1, 0.1], [1, NAN, NAN]]
    host = np.array([[7.0, -3.0, 0.0], [1e-9, 1e-9, -2e-9], [0.5, 0.0, 0.0]])
    choice = make(completion_rule="inert").select_completions(
        np.array(rewards, dtype=np.float32), step=0, advantages_PG=host
    )
    assert choice.advantages.tolist() == [[7.0, -3.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert choice.kept.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert choice.dropped == {
        **dict.fromkeys(DROP_REASONS, 0),
        "constant": 3,
        "zero_advantage": 1,
        "unscorable": 2,
    }


def test_reasons_in_order_of_precedence():
    rewards = [[1, 1, 1], [0, 0, 0], [0.5, 0.5, 0.5], [1, NAN, NAN], [1, 0, 0.5], [1, 0, NAN]]
    masked = np.zeros((6, 3), dtype=bool)
    masked[0, 0] = masked[4, 0] = True
    choice = make(completion_rule="inert").select_completions(rewards, step=0, masked_PG=masked)
    assert choice.dropped == {
        "all_right": 2,  # one of three is masked
        "all_wrong": 3,
        "constant": 3,
        "masked": 2,
        "unscorable": 4,  # a group of one score, and one completion of the last group
        "zero_advantage": 1,  # 0.5 is the mean of 1 0 0.5
        "sampled_out": 0,
    }


def test_masked_rows_are_never_live_but_count_in_the_advantages():
    rewards = [[1.0, 0.0, 0.0, 1.0]]
    masked = [[True, False, False, False]]
    for floor in (0.0, 0.1):
        choice = make().select_completions(
            rewards, step=0, masked_PG=masked, advantage_floor=floor, live=None
        )
        assert choice.live.tolist() == [[False, True, True, True]]
        assert choice.dropped["masked"] == 1
        np.testing.assert_array_equal(choice.advantages, dppo.group_advantages(rewards).values_PG)
    told = make().select_completions(
        rewards, step=0, masked_PG=masked, live=np.ones((1, 4), dtype=bool)
    )
    assert not told.live[0, 0]


def test_dead_groups_can_be_named_by_the_host():
    rewards = [[1, 0, 0, 1], [0.5, 0, 0, 0.5]]
    choice = make(completion_rule="inert").select_completions(rewards, step=0, dead_P=[True, False])
    assert choice.live.tolist() == [[False] * 4, [True] * 4]
    assert (choice.advantages[0] == 0).all()
    assert (choice.advantages[1] != 0).all()
    # The rewards are neither all 1 nor all 0.
    assert choice.dropped["all_right"] == choice.dropped["all_wrong"] == 0
    assert choice.dropped["constant"] == 4


def test_naming_no_group_dead_leaves_the_hosts_advantages_alone():
    host = [[0.5, -0.5], [1.0, -1.0]]
    choice = make(completion_rule="inert").select_completions(
        [[1, 1], [1, 0]], step=0, advantages_PG=host, dead_P=[False, False]
    )
    assert choice.advantages.tolist() == host
    assert choice.kept.all()


def test_with_another_term_in_the_loss_every_row_is_live():
    choice = make().select_completions([[1, 1, 1], [1, 0, 0]], step=0, advantage_floor=0.1)
    assert choice.live.all()
    assert (choice.pi > 0).all()
    assert (choice.advantages[0] == 0).all()
    np.testing.assert_array_equal(choice.norm[0], [0.1] * 3)


# ---------------------------------------------------------------- optimizer steps


@pytest.mark.parametrize("design", DESIGNS)
def test_each_optimizer_step_is_a_decision_of_its_own(design):
    rewards, lengths = rewards_of(5), np.arange(48.0).reshape(8, 6) + 1
    step_of = np.random.default_rng(0).integers(0, 3, size=(8, 6))
    choice = make(sampling_design=design).select_completions(
        rewards, step=2, lengths_PG=lengths, optimizer_step_PG=step_of
    )
    for number in range(3):
        rows = (step_of == number) & choice.live
        # Its own budget; sums of at most 48 floats.
        spent = (choice.pi * lengths)[rows].sum()
        assert spent == pytest.approx(0.5 * lengths[rows].sum(), rel=1e-12)
        # Whatever the other steps hold: rows that move between the others change nothing here.
        moved = np.where(step_of == number, number, (number + 1) % 3)
        again = make(sampling_design=design).select_completions(
            rewards, step=2, lengths_PG=lengths, optimizer_step_PG=moved
        )
        np.testing.assert_array_equal(again.kept[rows], choice.kept[rows])
        np.testing.assert_array_equal(again.pi[rows], choice.pi[rows])


def test_systematic_keeps_the_budget_of_each_optimizer_step_to_within_one_row():
    rewards = np.random.default_rng(1).normal(size=(16, 8))
    step_of = np.repeat(np.arange(4), 4)[:, None] * np.ones((1, 8), dtype=int)
    for step in range(10):
        choice = make(completion_keep=0.25).select_completions(
            rewards, step=step, optimizer_step_PG=step_of
        )
        for number in range(4):
            assert choice.kept[step_of == number].sum() == 8  # a quarter of 32, equal cost


@pytest.mark.parametrize("design", DESIGNS)
def test_optimizer_steps_and_iterations_draw_different_numbers(design):
    # The same probabilities in both halves: a shared draw would keep the same rows of each.
    rewards = np.tile(np.random.default_rng(2).normal(size=(8, 4)), (2, 1))
    step_of = np.repeat([0, 1], 8)[:, None] * np.ones((1, 4), dtype=int)
    pruner = make(completion_rule="uniform", sampling_design=design)
    differ = 0
    for step in range(20):
        kept = pruner.select_completions(rewards, step=step, optimizer_step_PG=step_of).kept
        again = pruner.select_completions(
            rewards, step=step, optimizer_step_PG=step_of, iteration=1
        ).kept
        differ += (kept[:8] != kept[8:]).any() and (kept != again).any()
    assert differ == 20


def test_systematic_keeps_each_sign_of_each_group_in_proportion_to_within_one_row():
    # Rows of a stratum lie side by side on the line: a stretch of length L holds floor(L) or
    # ceil(L) of the points u, u + 1, ...
    rewards = np.random.default_rng(4).integers(0, 2, size=(6, 16)).astype(float)
    step_of = np.arange(96).reshape(6, 16) % 2
    for step in range(20):
        choice = make(completion_rule="uniform", completion_keep=0.3).select_completions(
            rewards, step=step, optimizer_step_PG=step_of
        )
        for group in range(6):
            for sign, number in [(-1, 0), (-1, 1), (1, 0), (1, 1)]:
                rows = (np.sign(choice.advantages[group]) == sign) & (step_of[group] == number)
                length = 0.3 * rows.sum()
                # 0.3 k in floats: where it is whole, rounding may put one point on either side.
                kept = choice.kept[group][rows].sum()
                assert np.floor(length - 1e-9) <= kept <= np.ceil(length + 1e-9)


# ---------------------------------------------------------------- two phases


def test_both_phases_multiply():
    window = dppo.Selection([True, False, True, False], [0.5, 0.25, 1.0, 0.75])
    rewards = [[1, 0, 0, 1], [0, 1, 0, 0]]
    choice = make().select_completions(rewards, step=0, prompts=window)
    np.testing.assert_array_equal(choice.pi, choice.pi_completion * np.array([[0.5], [1.0]]))
    np.testing.assert_array_equal(choice.weight[choice.kept], 1 / choice.pi[choice.kept])
    alone = dppo.completion_norms(dppo.group_advantages(rewards).values_PG, weight_P=[2.0, 1.0])
    np.testing.assert_array_equal(choice.norm, alone)
    expected = dppo.proportional_inclusion(alone, keep=0.5)
    np.testing.assert_allclose(choice.pi_completion, expected, rtol=1e-12)  # another sum order


def test_a_window_of_certain_prompts_changes_nothing():
    rewards = rewards_of(4)
    plain = make().select_completions(rewards, step=0)
    window = dppo.Selection(np.ones(8), np.ones(8))
    assert_same(make().select_completions(rewards, step=0, prompts=window), plain)


# ---------------------------------------------------------------- metrics


def test_metrics_of_a_decision():
    pruner = make()
    assert pruner.metrics() == {}
    lengths = np.full((2, 4), 10.0)
    choice = pruner.select_completions(
        [[1, 0, 0, 0], [1, 1, 1, 1]], step=0, lengths_PG=lengths, prompt_lengths_P=[5, 5]
    )
    metrics = pruner.metrics()
    assert metrics["completions/live"] == 0.5
    assert metrics["completions/keep"] == metrics["cost/keep"] == 0.25
    assert metrics["cost/keep_live"] == 0.5
    assert metrics["weight/max"] == choice.weight.max()
    # Norms 1.5 and 0.5 kept with pi 1 and 1/3: weight x norm is 1.5 for both, so that both kept
    # rows count the same and the share is 1.
    assert metrics["weight/ess"] == pytest.approx(1.0, abs=1e-12)
    # (1/pi - 1) n^2: 0 and three times 2 * 1, over 9 + 3; half of it for systematic: 1/4
    assert metrics["variance/inflation"] == pytest.approx(0.25, abs=1e-12)
    json.dumps(metrics, allow_nan=False)


def test_metrics_are_of_the_latest_generation_averaged_over_its_passes():
    pruner = make(completion_rule="inert")
    pruner.select_completions([[1, 1]], step=0)
    pruner.select_completions([[1, 0], [1, 1]], step=1)
    pruner.select_completions([[1, 0], [1, 0]], step=1, iteration=1)
    assert pruner.metrics()["completions/keep"] == 0.75


def test_metrics_stay_json_when_a_pass_keeps_nothing():
    pruner = make(completion_rule="inert")
    pruner.select_completions([[1, 1]], step=0)
    json.dumps(pruner.metrics(), allow_nan=False)
    pruner.select_completions([[1, 0]], step=0, iteration=1)
    assert pruner.metrics()["weight/ess"] == 1.0  # of the pass that kept something


def test_effective_sample_size_counts_the_prompt_weight_once():
    # Two groups with the same rewards; every completion is kept, prompt weights 4 and 1. What the
    # rows contribute is in the ratio 4 to 1: (4 + 4 + 1 + 1)^2 / (16 + 16 + 1 + 1) / 4.
    window = dppo.Selection([True, True], [0.25, 1.0])
    pruner = make(completion_rule="inert")
    pruner.select_completions([[1, 0], [1, 0]], step=0, prompts=window)
    assert pruner.metrics()["weight/ess"] == pytest.approx(100 / 34 / 4, abs=1e-12)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("keep", [0.5, 1, np.float64(0.3), np.float32(0.3)])
def test_state_survives_json(keep):
    pruner = make(seed=np.int64(7), completion_keep=keep, completion_rule="uniform")
    pruner.select_completions(rewards_of(0), step=0)
    state = json.loads(json.dumps(pruner.state_dict()))
    resumed = make(seed=7, completion_keep=keep, completion_rule="uniform")
    resumed.load_state_dict(state)
    assert_same(
        resumed.select_completions(rewards_of(1), step=1),
        pruner.select_completions(rewards_of(1), step=1),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed 1 -> 0"),
        ({"version": 2}, r"version 2 -> 1"),
        ({"config": {"completion_keep": 0.25}}, r"completion_keep 0\.25 -> 0\.5"),
        ({"config": {"sampling_design": "poisson"}}, r"sampling_design 'poisson' -> 'systematic'"),
        ({"config": {"unknown": 3}}, r"unknown 3 -> None"),
    ],
)
def test_state_of_another_configuration_is_refused_naming_what_changed(change, message):
    state = json.loads(json.dumps(make().state_dict()))
    config = {**state["config"], **change.get("config", {})}
    with pytest.raises(dppo.ConfigurationError, match=message):
        make().load_state_dict({**state, **change, "config": config})


def test_every_change_is_named():
    saved = make(seed=3, completion_keep=0.25, completion_rule="uniform").state_dict()
    with pytest.raises(dppo.ConfigurationError) as caught:
        make().load_state_dict(saved)
    for name in ("seed 3", "completion_keep 0.25", "completion_rule 'uniform'"):
        assert name in str(caught.value)


@pytest.mark.parametrize("state", [{}, {"version": 1, "seed": 0}, {"version": 1, "config": None}])
def test_a_damaged_state_is_refused(state):
    with pytest.raises(dppo.ConfigurationError):
        make().load_state_dict(state)
