"""`dppo audit`: measured bias and variance against enumeration and hand-worked values."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import dppo
from dppo.audit import (
    Recording,
    biased_methods,
    load_recording,
    measure,
    save_recording,
    unbiased_methods,
)
from dppo.audit.measure import ROLLOUT_SHARES
from dppo.audit.methods import Method
from dppo.audit.peers import algorithm_1, cppo, pods
from dppo.cli.main import main
from dppo.errors import InvalidInputError

EVIDENCE = Path(__file__).parents[3] / "shared" / "evidence" / "completion_gradients.npz"
REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], np.float64)


def recorded(*, gradients=True, **options):
    rng = np.random.default_rng(0)
    advantages = dppo.group_advantages(REWARDS).values_PG
    given = {
        "prompt_tokens_N": [3, 2, 4],
        "surprisal_norm_NG": 0.1 + rng.random(REWARDS.shape),
        **options,
    }
    if gradients:
        given["gradient_NGK"] = rng.normal(size=(*REWARDS.shape, 5)) * advantages[..., None]
    return Recording.of(REWARDS, rng.integers(1, 9, REWARDS.shape), **given)


def test_independent_draws_are_exact():
    """Against all 2^8 outcomes of the live completions."""
    recording = recorded()
    method = next(
        m
        for m in unbiased_methods(recording, design="poisson")
        if (m.name, m.rate) == ("proportional", "0.35")
    )
    (found,) = measure(recording, [method], draws=2)
    gradients, pi = recording.gradients_PGK, method.pi_PG
    live = np.argwhere(pi > 0)
    full = gradients.sum(axis=(0, 1))
    mean, square = 0.0, 0.0
    for outcome in itertools.product([0, 1], repeat=len(live)):
        probability, total = 1.0, 0.0
        for kept, (p, g) in zip(outcome, live, strict=True):
            probability *= pi[p, g] if kept else 1 - pi[p, g]
            total = total + kept / pi[p, g] * gradients[p, g]
        mean = mean + probability * total
        square += probability * ((total - full) ** 2).sum()
    np.testing.assert_allclose(mean, full, atol=1e-10)
    between = (gradients.sum(axis=1) ** 2).sum()
    assert found.variance == pytest.approx(square / between, rel=1e-10)
    assert found.variance_error is None
    assert found.bias == pytest.approx(0, abs=1e-12)
    assert found.cosine == pytest.approx(1)
    cost = recording.cost_PG
    assert found.cost == pytest.approx(float((pi * cost).sum() / cost.sum()))
    for share, efficiency in found.efficiency.items():
        expected = 1 / ((1 + found.variance) * (share + (1 - share) * found.cost))
        assert efficiency == pytest.approx(expected)


def test_draws_agree_with_the_closed_form_within_their_error():
    recording = recorded()
    exact = unbiased_methods(recording, design="poisson")
    sampled = [Method(m.name, m.rate, m.mean_PG, m.draw, m.pi_PG) for m in exact]
    closed = measure(recording, exact, draws=2)
    by_draws = measure(recording, sampled, draws=4000)
    off = [
        abs(a.variance - b.variance) / max(b.variance_error, 1e-12)
        for a, b in zip(closed, by_draws, strict=True)
        if a.variance > 0
    ]
    # Some 50 of them, by a seed: the largest of so many normal ones is below 4.5.
    assert max(off) < 4.5
    assert np.mean(np.array(off) < 2) > 0.8


def test_bias_is_that_of_the_factors_and_seen():
    recording = recorded()
    full = recording.gradients_PGK.sum(axis=(0, 1))
    halves = np.full((3, 4), 0.5)
    (half,) = measure(recording, [Method("half", "", halves, lambda rng: halves)])
    assert half.bias == pytest.approx(0.5)
    assert half.cosine == pytest.approx(1)
    assert half.efficiency is None
    one = np.zeros((3, 4))
    one[0, 0] = 1
    (found,) = measure(recording, [Method("one", "", one, lambda rng: one)])
    gradient = recording.gradients_PGK[0, 0]
    assert found.bias == pytest.approx(np.linalg.norm(gradient - full) / np.linalg.norm(full))
    assert found.variance == 0
    for m in measure(recording, unbiased_methods(recording), draws=2):
        assert m.bias == pytest.approx(0, abs=1e-12)
        assert m.efficiency is not None


def test_every_biased_method_is_called_biased():
    earlier = np.array([[0, 0], [1, 0], [1, 1]])
    recording = recorded(earlier_reward_NG=earlier)
    found = measure(recording, biased_methods(recording), draws=20)
    assert {m.name for m in found} == {
        *("CPPO", "PODS", "DAPO filter", "GRESO", "paper, Algorithm 1"),
    }
    by_name = {(m.name, m.rate): m for m in found}
    assert all(m.efficiency is None for m in found if m.name not in {"paper, Algorithm 1"})
    # Three low completions a group: floor(0.9) = 0 are dropped and all are weighted by 1/0.7.
    assert by_name["paper, Algorithm 1", "r=0.3"].bias > 0.01
    assert by_name["DAPO filter", "all live"].rollout == pytest.approx(1.5)
    assert by_name["DAPO filter", "all live"].bias == pytest.approx(0.5)


def test_algorithm_1_by_hand():
    """Three of four low: floor(3 r) dropped, weight 1/(1-r); a mean factor of 10/3 at r = 0.9."""
    recording = recorded()
    for rate, mean in ((0.3, 1 / 0.7), (0.5, (2 / 3) / 0.5), (0.9, (1 / 3) / 0.1)):
        method = algorithm_1(recording, rate)
        low = np.array([[0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
        np.testing.assert_allclose(method.mean_PG, np.where(low, mean, 1.0))
        draws = np.array([method.draw(np.random.default_rng(s)) for s in range(3000)])
        assert set(np.round(np.unique(draws), 9)) <= {0, 1, round(1 / (1 - rate), 9)}
        np.testing.assert_allclose(draws.mean(axis=0), method.mean_PG, atol=0.15 / (1 - rate))


@pytest.mark.parametrize("design", ["systematic", "poisson"])
def test_draws_have_the_mean_that_bias_is_computed_from(design):
    """Of every method; else one that is biased could be called unbiased."""
    recording = recorded(earlier_reward_NG=[[0, 0], [1, 0], [1, 1]])
    for method in unbiased_methods(recording, design=design) + biased_methods(recording):
        rng = np.random.default_rng(0)
        draws = np.array([method.draw(rng) for _ in range(800)])
        error = draws.std(axis=0) / np.sqrt(len(draws))
        off = np.abs(draws.mean(axis=0) - method.mean_PG)
        # Some 700 entries: by a seed, none beyond 5 standard errors; a rare one may not be drawn.
        rare = (draws != 0).sum(axis=0) < 30
        assert (off <= 5 * error + 1e-9)[~rare].all(), (method.name, method.rate)
    wrong = Method("biased", "", np.ones((3, 4)), lambda rng: 2.0 * (rng.random((3, 4)) < 0.4))
    draws = np.array([wrong.draw(rng) for _ in range(800)])
    error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - wrong.mean_PG) > 5 * error).any()


def test_completions_without_a_score_are_no_choice_of_the_peers():
    rewards = np.array([[1, np.nan, 0, 0], [np.nan, np.nan, np.nan, 1], [np.nan] * 4])
    recording = Recording.of(rewards, np.ones((3, 4)), earlier_reward_NG=rewards)
    chosen = pods(recording, 0.5)
    assert np.isfinite(chosen).all()
    assert chosen[0, 1] == 0
    assert not chosen[1:].any()
    for method in biased_methods(recording):
        assert np.isfinite(method.draw(np.random.default_rng(0))).all()


def test_cppo_and_pods_by_hand():
    recording = recorded()
    factor = cppo(recording, 0.5)
    assert int((factor > 0).sum()) == 6
    assert factor.max() == 2
    assert (factor[2] == 0).all()  # its advantages are 0
    chosen = pods(recording, 0.5)
    assert [int((row != 0).sum()) for row in chosen] == [2, 2, 0]
    # One right, one wrong of [1, 0, 0, 0]: advantages +-1 for 1.73 and -0.58, times 4 / 2.
    advantage = recording.advantages_PG[0]
    ratio = 0.5 / (0.5 + 1e-4)
    assert chosen[0, 0] == pytest.approx(2 * ratio / advantage[0])
    assert chosen[0, 1:].max() == pytest.approx(2 * -ratio / advantage[1])


def test_without_gradients_variance_is_predicted_and_nothing_is_made_up():
    recording = recorded(gradients=False)
    methods = unbiased_methods(recording)
    assert "oracle" not in {m.name for m in methods}
    for method, m in zip(methods, measure(recording, methods, draws=2), strict=True):
        norm = dppo.completion_norms(
            recording.advantages_PG,
            surprisal=recording.surprisal_PG,
            live=recording.advantages_PG != 0,
        )
        predicted = dppo.pruning_variance(norm, method.pi_PG, design="systematic")
        assert m.variance == pytest.approx(predicted)
        assert m.cosine is None
    peers = measure(recording, biased_methods(recording), draws=2)
    assert all(m.bias is None and m.efficiency is None for m in peers)


def test_a_recording_is_what_was_saved(tmp_path):
    path = tmp_path / "rollouts.npz"
    recording = recorded(earlier_reward_NG=[[0, 1], [1, 1], [0, 0]])
    save_recording(path, recording)
    loaded = load_recording(path)
    for name, value in vars(recording).items():
        np.testing.assert_array_equal(getattr(loaded, name), value)
    save_recording(path, recorded(gradients=False))
    assert load_recording(path).gradients_PGK is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion_tokens_NG": np.zeros((3, 4))}, "completion_tokens_NG"),
        ({"completion_tokens_NG": -np.ones((3, 4))}, "completion_tokens_NG"),
        ({"completion_tokens_NG": np.ones((3, 3))}, "completion_tokens_NG"),
        ({"gradient_NGK": np.full((3, 4, 2), np.nan)}, "gradient_NGK"),
        ({"prompt_tokens_N": [1, 2]}, "prompt_tokens_N"),
        ({"earlier_reward_NG": [[0, 1]]}, "earlier_reward_NG"),
    ],
)
def test_what_is_no_recording(change, message):
    given = {"reward_NG": REWARDS, "completion_tokens_NG": np.ones((3, 4))}
    with pytest.raises(InvalidInputError, match=message):
        Recording.of(**{**given, **change})


def test_nothing_to_thin():
    flat = Recording.of(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(InvalidInputError, match="every advantage is 0"):
        measure(flat, unbiased_methods(flat))
    with pytest.raises(InvalidInputError, match="draws=1"):
        measure(recorded(), [], draws=1)


# -- the command -----------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    path = tmp_path / "rollouts.npz"
    save_recording(path, recorded(earlier_reward_NG=[[0, 1], [1, 1], [0, 0]]))
    arguments = ["audit", str(path), "--draws", "5", "--json", str(tmp_path / "out.json")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name in ("proportional", "oracle", "paper, corrected", "CPPO", "GRESO", "DAPO filter"):
        assert name in text
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert {m["name"] for m in numbers} >= {"uniform", "inert", "PODS"}
    assert main(arguments) == 0
    assert capsys.readouterr().out == text  # a function of file and seed
    save_recording(path, recorded(gradients=False))
    assert main(["audit", str(path), "--draws", "5"]) == 0
    assert main(["audit", str(path.parent), "--draws", "5"]) == 0  # the run it belongs to
    assert "no gradients are recorded" in capsys.readouterr().out


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    path = tmp_path / "rollouts.npz"
    save_recording(path, recorded())
    assert main(["audit", str(path), "--draws", "5", "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_command_refuses(tmp_path, capsys):
    assert main(["audit", str(tmp_path / "none.npz")]) == 2
    assert "cannot be read as .npz" in capsys.readouterr().err
    assert main(["audit"]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["audit", str(tmp_path / "empty")]) == 2
    assert "holds none" in capsys.readouterr().err
    assert main(["audit", "--help"]) == 0
    np.savez(tmp_path / "half.npz", reward_NG=REWARDS)
    assert main(["audit", str(tmp_path / "half.npz")]) == 2
    assert "lacks completion_tokens_NG" in capsys.readouterr().err


# -- recorded gradients ----------------------------------------------------------------------------


def test_on_recorded_gradients_the_default_rule_is_near_the_best_possible_one():
    if not EVIDENCE.exists():
        pytest.skip(f"{EVIDENCE.name} is not beside the checkout")
    recording = load_recording(EVIDENCE)
    methods = [
        m
        for m in unbiased_methods(recording)
        if m.name in {"proportional", "oracle", "uniform", "paper, corrected"}
    ]
    found = measure(recording, methods, draws=60)

    def best(name, share):
        return max(m.efficiency[share] for m in found if m.name == name)

    for share in ROLLOUT_SHARES:
        assert best("proportional", share) >= 0.95 * best("oracle", share)
        assert best("proportional", share) > best("paper, corrected", share)
        assert best("paper, corrected", share) > best("uniform", share)
