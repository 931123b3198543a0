"""Bad input raises, naming the argument and its value; empty selections are legal everywhere."""

import re

import numpy as np
import pytest

import dppo

NAN, INF = np.nan, np.inf
RNG = dppo.generator(0, 0, stream="completion")


def proportional(size=((1.0, 2.0),), keep=0.5, cost=None):
    return dppo.proportional_inclusion(size, keep=keep, cost=cost)


def threshold(advantages=((1.0, -1.0),), prune_rate=0.5, **more):
    return dppo.threshold_inclusion(advantages, prune_rate=prune_rate, **more)


def generator(**changed):
    return dppo.generator(**{"seed": 0, "step": 0, "stream": "completion", **changed})


def select(rewards=((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), step=0, **more):
    return dppo.Pruner(dppo.PruneConfig(), seed=0).select_completions(rewards, step=step, **more)


def outcomes(pi, **more):
    return list(dppo.outcomes(pi, **more))


AMISS = [  # call, argument, something of its value
    # rewards
    (lambda: dppo.group_advantages([[1.0, INF]]), "rewards_PG", "inf"),
    (lambda: dppo.group_advantages([[1.0], [0.0]]), "rewards_PG", "(2, 1)"),
    (lambda: dppo.group_advantages(np.zeros((0, 4))), "rewards_PG", "(0, 4)"),
    (lambda: dppo.group_advantages(np.zeros((4, 0))), "rewards_PG", "(4, 0)"),
    (lambda: dppo.group_advantages([]), "rewards_PG", "(0,)"),
    (lambda: dppo.group_advantages([1.0, 0.0]), "rewards_PG", "(2,)"),
    (lambda: dppo.group_advantages(np.zeros((2, 2, 2))), "rewards_PG", "(2, 2, 2)"),
    (lambda: dppo.group_advantages([[1.0, 1j]]), "rewards_PG", "complex"),
    (lambda: dppo.group_advantages([["right", "wrong"]]), "rewards_PG", "<U5"),
    (lambda: dppo.group_advantages([[1.0, None]]), "rewards_PG", "object"),
    (lambda: dppo.group_advantages([[1.0, 0.0], [1.0]]), "rewards_PG", "inhomogeneous"),
    (lambda: dppo.group_advantages([[1.0, 0.0]], scale="std"), "scale", "'std'"),
    (lambda: dppo.group_advantages([[1.0, 0.0]], scale=None), "scale", "None"),
    (lambda: dppo.group_advantages([[1.0, 0.0]], epsilon=-1e-4), "epsilon", "-0.0001"),
    (lambda: dppo.group_advantages([[1.0, 0.0]], epsilon=NAN), "epsilon", "nan"),
    (lambda: dppo.group_advantages([[1.0, 0.0]], epsilon="1e-4"), "epsilon", "'1e-4'"),
    # surprisal
    (lambda: dppo.surprisal_norm([[0.5]], [[1]]), "logps_PGT", "0.5"),
    (lambda: dppo.surprisal_norm([[NAN]], [[1]]), "logps_PGT", "nan"),
    (lambda: dppo.surprisal_norm([[-INF]], [[1]]), "logps_PGT", "-inf"),
    (lambda: dppo.surprisal_norm([[-1.0]], [[1, 1]]), "mask_PGT", "(1, 2)"),
    (lambda: dppo.surprisal_norm([[-1.0]], [[0.5]]), "mask_PGT", "0.5"),
    (lambda: dppo.surprisal_norm([[-1.0]], [[1]], per="row"), "per", "'row'"),
    # norms and sizes
    (lambda: dppo.completion_norms([1.0]), "advantages_PG", "(1,)"),
    (lambda: dppo.completion_norms([[NAN, 1.0]]), "advantages_PG", "nan"),
    (lambda: dppo.completion_norms(np.zeros((0, 2))), "advantages_PG", "(0, 2)"),
    (lambda: dppo.completion_norms([[1.0]], surprisal=[[-0.5]]), "surprisal", "-0.5"),
    (lambda: dppo.completion_norms([[1.0]], surprisal=[[NAN]]), "surprisal", "nan"),
    (lambda: dppo.completion_norms([[1.0]], surprisal=[1.0]), "surprisal", "(1,)"),
    (lambda: dppo.completion_norms([[1.0]], weight_P=[0.0]), "weight_P", "0.0"),
    (lambda: dppo.completion_norms([[1.0]], weight_P=[1.0, 1.0]), "weight_P", "(2,)"),
    (lambda: dppo.completion_norms([[1.0]], advantage_floor=-1), "advantage_floor", "-1"),
    (lambda: dppo.completion_norms([[1.0]], advantage_floor=True), "advantage_floor", "True"),
    (lambda: dppo.completion_norms([[1.0]], live=[[2]]), "live", "2"),
    (lambda: dppo.completion_norms([[1.0]], live=[True]), "live", "(1,)"),
    (lambda: dppo.completion_norms([[1.0]], denominator=[[0.0]]), "denominator", "0.0"),
    (lambda: dppo.completion_sizes([[1.0]], cost=[[0.0]]), "cost", "0.0"),
    (lambda: dppo.completion_sizes([[1.0]], cost=[[-3.0]]), "cost", "-3.0"),
    (lambda: dppo.completion_sizes([[1.0]], cost=[[INF]]), "cost", "inf"),
    (lambda: dppo.completion_sizes([[1.0]], cost=[1.0]), "cost", "(1,)"),
    # inclusion
    *[
        (lambda keep=keep: proportional(keep=keep), "keep", repr(keep))
        for keep in (0, 0.0, 1.5, -0.5, NAN, INF, True, None, "0.5", 0.5j)
    ],
    (lambda: dppo.uniform_inclusion([True], keep=0), "keep", "0"),
    (lambda: dppo.uniform_inclusion([True], keep=True), "keep", "True"),
    (lambda: dppo.uniform_inclusion([0.5], keep=0.5), "live_PG", "0.5"),
    (lambda: dppo.uniform_inclusion(["a"], keep=0.5), "live_PG", "<U1"),
    (lambda: dppo.uniform_inclusion([[True], [True, False]], keep=0.5), "live_PG", "inhomogeneous"),
    (lambda: dppo.uniform_inclusion([], keep=0.5), "live_PG", "(0,)"),
    (lambda: proportional([]), "size_PG", "(0,)"),
    (lambda: proportional([1.0, -2.0]), "size_PG", "-2.0"),
    (lambda: proportional([1.0, NAN]), "size_PG", "nan"),
    (lambda: proportional([1.0, INF]), "size_PG", "inf"),
    (lambda: proportional([1j]), "size_PG", "complex"),
    (lambda: proportional([1.0, 1.0], cost=[1.0, 0.0]), "cost", "0.0"),
    (lambda: proportional([1.0, 1.0], cost=[1.0]), "cost", "(1,)"),
    (lambda: proportional([1.0], cost=[NAN]), "cost", "nan"),
    *[
        (lambda rate=rate: threshold(prune_rate=rate), "prune_rate", repr(rate))
        for rate in (1.0, -0.1, NAN, True, None)
    ],
    (lambda: threshold([1.0]), "advantages_PG", "(1,)"),
    (lambda: threshold([[NAN]]), "advantages_PG", "nan"),
    (lambda: threshold(live=[[True]]), "live", "(1, 1)"),
    (lambda: threshold(scored=[[3, 1]]), "scored", "3"),
    # designs
    *[
        (lambda pi=pi, call=call: call([0.5, pi]), "pi", str(pi))
        for pi in (-0.25, 1.5, NAN, INF)
        for call in (
            lambda pi: dppo.systematic(pi, RNG),
            lambda pi: dppo.poisson(pi, RNG),
            outcomes,
            lambda pi: dppo.Selection([False, False], pi),
            lambda pi: dppo.pruning_variance([1.0, 1.0], pi),
        )
    ],
    (lambda: dppo.systematic([], RNG), "pi", "(0,)"),
    (lambda: dppo.poisson([], RNG), "pi", "(0,)"),
    (lambda: outcomes([]), "pi", "(0,)"),
    (lambda: dppo.poisson(["a"], RNG), "pi", "<U1"),
    (lambda: dppo.systematic([0.5j], RNG), "pi", "complex"),
    (lambda: dppo.systematic([0.5, 0.5], RNG, order=[0, 0]), "order", "[0, 0]"),
    (lambda: dppo.systematic([0.5, 0.5], RNG, order=[0]), "order", "[0]"),
    (lambda: dppo.systematic([0.5, 0.5], RNG, order=[1, 2]), "order", "[1, 2]"),
    (lambda: dppo.systematic([0.5, 0.5], RNG, order=[0.0, 1.0]), "order", "[0.0, 1.0]"),
    (lambda: dppo.systematic([0.5, 0.5], RNG, order=[[0], [0, 1]]), "order", "[[0], [0, 1]]"),
    (lambda: outcomes([0.5], design="pivotal"), "design", "'pivotal'"),
    (lambda: outcomes([0.5], order=[0]), "order", "poisson"),
    (lambda: dppo.stratified_order([1.0], RNG), "advantages_PG", "(1,)"),
    (lambda: dppo.stratified_order([[NAN]], RNG), "advantages_PG", "nan"),
    (lambda: dppo.stratified_order(np.zeros((0, 2)), RNG), "advantages_PG", "(0, 2)"),
    (lambda: dppo.Selection([True], [0.5, 0.5]), "kept", "(1,)"),
    (lambda: dppo.Selection([2], [0.5]), "kept", "2"),
    (lambda: dppo.Selection([True], [0.0]), "pi", "0.0"),
    (lambda: dppo.Selection([False], [1.0]), "pi", "1.0"),
    # generator
    *[
        (lambda name=name, value=value: generator(**{name: value}), name, repr(value))
        for name in ("seed", "step", "iteration", "optimizer_step")
        for value in (-1, 1.0, 0.5, True, None, "1", NAN)
    ],
    (lambda: generator(stream="rollout"), "stream", "'rollout'"),
    (lambda: generator(stream=0), "stream", "0"),
    (lambda: dppo.Pruner(dppo.PruneConfig(), seed=-1), "seed", "-1"),
    (lambda: dppo.Pruner(dppo.PruneConfig(), seed=1.0), "seed", "1.0"),
    # diagnostics
    (lambda: dppo.effective_sample_size([-1.0, 2.0]), "weights", "-1.0"),
    (lambda: dppo.effective_sample_size([NAN]), "weights", "nan"),
    (lambda: dppo.pruning_variance([-1.0], [0.5]), "norm", "-1.0"),
    (lambda: dppo.pruning_variance([], []), "norm", "(0,)"),
    (lambda: dppo.pruning_variance([1.0], [0.5, 0.5]), "pi", "(2,)"),
    (lambda: dppo.pruning_variance([1.0], [0.5], design="srs"), "design", "'srs'"),
    # pruner
    (lambda: select([[1.0], [0.0]]), "rewards_PG", "(2, 1)"),
    (lambda: select([[1.0, INF]]), "rewards_PG", "inf"),
    (lambda: select(step=-1), "step", "-1"),
    (lambda: select(step=1.5), "step", "1.5"),
    (lambda: select(iteration=-2), "iteration", "-2"),
    (lambda: select(advantages_PG=[[1.0, 2.0]]), "advantages_PG", "(1, 2)"),
    (lambda: select(advantages_PG=np.full((2, 3), NAN)), "advantages_PG", "nan"),
    (lambda: select(lengths_PG=np.ones((2, 2))), "lengths_PG", "(2, 2)"),
    (lambda: select(lengths_PG=np.full((2, 3), -4)), "lengths_PG", "-4"),
    (lambda: select(lengths_PG=np.ones((2, 3)), prompt_lengths_P=[1]), "prompt_lengths_P", "(1,)"),
    (
        lambda: select(lengths_PG=np.ones((2, 3)), prompt_lengths_P=[1, -5]),
        "prompt_lengths_P",
        "-5",
    ),
    (lambda: select(prompt_lengths_P=[1, 1]), "prompt_lengths_P", "lengths_PG"),
    (lambda: select(live=[[True]]), "live", "(1, 1)"),
    (lambda: select(masked_PG=np.full((2, 3), 7)), "masked_PG", "7"),
    (lambda: select(dead_P=[True]), "dead_P", "(1,)"),
    (lambda: select(optimizer_step_PG=np.full((2, 3), 0.5)), "optimizer_step_PG", "0.5"),
    (lambda: select(optimizer_step_PG=np.full((2, 3), -1)), "optimizer_step_PG", "-1"),
    (lambda: select(optimizer_step_PG=[0, 1]), "optimizer_step_PG", "(2,)"),
    (lambda: select(advantage_floor=-0.1), "advantage_floor", "-0.1"),
    (lambda: select(denominator_PG=np.zeros((2, 3))), "denominator", "0.0"),
    (lambda: select(surprisal_PG=np.full((2, 3), -1)), "surprisal", "-1.0"),
    (lambda: select(prompts=dppo.Selection([True], [0.5])), "prompts", "1"),
]


@pytest.mark.parametrize(
    ("call", "argument", "value"), AMISS, ids=[f"{name}-{value}" for _, name, value in AMISS]
)
def test_bad_input_is_an_error_that_names_argument_and_value(call, argument, value):
    with pytest.raises(dppo.InvalidInputError) as caught:
        call()
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), message
    assert value in message
    assert isinstance(caught.value, dppo.DPPOError)
    assert isinstance(caught.value, ValueError)


def test_outcomes_checks_its_arguments_when_called_not_when_first_iterated():
    with pytest.raises(dppo.InvalidInputError, match="pi"):
        dppo.outcomes([2.0])


BAD_OPTIONS = [
    *[("completion_keep", value) for value in (0, 1.5, NAN, True, "half", None, -1)],
    *[("completion_prune_rate", value) for value in (1.0, -0.1, NAN, True)],
    ("completion_rule", "topk"),
    ("completion_rule", None),
    ("sampling_design", "simple"),
    *[("prompt_keep", value) for value in (0, 1.5, NAN, True)],
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
def test_bad_options_are_configuration_errors_that_name_option_and_value(name, value):
    with pytest.raises(dppo.ConfigurationError) as caught:
        dppo.PruneConfig(**{name: value})
    assert re.search(rf"\b{name}\b", str(caught.value))
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (dppo.InvalidInputError, ValueError),
        (dppo.ConfigurationError, ValueError),
        (dppo.UnsupportedLossError, ValueError),
        (dppo.UnsupportedHostError, ImportError),
        (dppo.HostDriftError, RuntimeError),
    ],
)
def test_every_error_is_also_the_standard_one(error, standard):
    assert issubclass(error, dppo.DPPOError)
    assert issubclass(error, standard)


def test_unknown_loss_types_and_denominators_are_errors_never_a_guess():
    from dppo.estimator.weights import gradient_factor, loss_denominator, two_phase_inclusion

    with pytest.raises(dppo.UnsupportedLossError, match=r"'ppo'.*known: grpo"):
        loss_denominator("ppo")
    arguments = {"rows": 1, "full_rows": 1, "tokens": 3, "full_tokens_N": [2]}
    with pytest.raises(dppo.InvalidInputError, match="row"):
        gradient_factor([1.0], "row", **arguments)
    with pytest.raises(dppo.InvalidInputError, match="full_rows"):
        gradient_factor([1.0], "rows", **{**arguments, "full_rows": 0})
    with pytest.raises(dppo.InvalidInputError, match="weight_N"):
        gradient_factor([-1.0], "rows", **arguments)
    with pytest.raises(dppo.InvalidInputError, match="pi_prompt_P"):
        two_phase_inclusion([0.0], [[0.5]])
    with pytest.raises(dppo.InvalidInputError, match="pi_completion_PG"):
        two_phase_inclusion([0.5, 0.5], [0.5, 1.0])


# ---------------------------------------------------------------- nothing to keep is legal


def test_a_selection_of_nothing_is_legal():
    for kept, pi in [([False, False], [0.5, 0.0]), ([], []), (np.zeros((2, 0)), np.zeros((2, 0)))]:
        selection = dppo.Selection(kept, pi)
        assert selection.weight.sum() == 0
        assert selection.weight.shape == np.shape(pi)


def test_all_rows_inert_is_legal_in_every_function():
    zero = np.zeros((2, 3))
    assert (proportional(zero) == 0).all()
    assert (proportional(zero, keep=1.0) == 0).all()
    assert (proportional(zero, cost=zero) == 0).all()
    assert (threshold(zero) == 0).all()
    assert (dppo.uniform_inclusion(zero, keep=0.5) == 0).all()
    for selection in (dppo.systematic(zero, RNG), dppo.poisson(zero, RNG)):
        assert not selection.kept.any()
    for design in ("systematic", "poisson"):
        [(probability, selection)] = outcomes(zero, design=design)
        assert probability == 1
        assert not selection.kept.any()
    assert dppo.pruning_variance(zero, zero) == 0
    assert sorted(dppo.stratified_order(zero, RNG)) == list(range(6))


@pytest.mark.parametrize("design", ["systematic", "poisson"])
@pytest.mark.parametrize("rule", ["proportional", "threshold", "uniform", "inert"])
@pytest.mark.parametrize("rewards", [np.ones((2, 3)), np.full((2, 3), NAN)])
def test_all_rows_inert_is_legal_in_the_pruner(rewards, rule, design):
    config = dppo.PruneConfig(completion_rule=rule, sampling_design=design)
    pruner = dppo.Pruner(config, seed=0)
    choice = pruner.select_completions(rewards, step=0, surprisal_PG=np.ones((2, 3)))
    assert not choice.kept.any()
    assert (choice.weight == 0).all()
    assert sum(choice.dropped.values()) == 6
    assert pruner.metrics()["completions/keep"] == 0


@pytest.mark.parametrize("design", ["systematic", "poisson"])
def test_a_draw_that_keeps_no_live_row_is_legal_in_the_pruner(design):
    config = dppo.PruneConfig(completion_keep=1e-6, sampling_design=design)
    pruner = dppo.Pruner(config, seed=0)
    choice = pruner.select_completions([[1.0, 0.0, 0.0]], step=0)
    assert not choice.kept.any()
    assert choice.live.all()
    assert choice.dropped["sampled_out"] == 3
