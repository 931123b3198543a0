"""The part of `dppo.verl` that needs neither verl nor torch: options, and what a step trains on."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dppo
from dppo.errors import ConfigurationError, UnsupportedLossError
from dppo.packing.spread import PADDING
from dppo.verl import plan
from dppo.verl.options import PruneOptions, notices
from dppo.verl.plan import Rollouts, Sizes, decide, layout, metrics_of
from dppo.verl.refusals import check_config, check_passes, has_other_terms


class Config(SimpleNamespace):
    """As OmegaConf's: attributes, `get` and `in`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


def configuration() -> Config:
    return Config(
        algorithm=Config(adv_estimator="grpo", use_kl_in_reward=False),
        data=Config(train_batch_size=8, max_response_length=16),
        trainer=Config(v1=Config(sampler=Config())),
        actor_rollout_ref=Config(
            rollout=Config(n=4),
            actor=Config(
                loss_agg_mode="token-mean",
                loss_scale_factor=None,
                ppo_mini_batch_size=4,
                strategy="fsdp2",
            ),
        ),
    )


# -- options ---------------------------------------------------------------------------------------


def test_options_are_those_of_the_pruner() -> None:
    options = PruneOptions.of({"completion_keep": 0.25, "prompt_keep": 0.6, "seed": 3})
    assert options.prune_config() == dppo.PruneConfig(completion_keep=0.25, prompt_keep=0.6)
    assert [options.rolled_out(n) for n in (8, 10, 1)] == [5, 6, 1]
    assert not options.chooses_keep
    assert PruneOptions.of(None).chooses_keep
    assert not PruneOptions.of({"completion_keep": 1.0}).prunes
    shadow = PruneOptions.of({"completion_keep": "shadow:0.25"})
    assert shadow.decides
    assert not shadow.prunes
    assert not shadow.chooses_keep
    assert shadow.prune_config().completion_keep == 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"completion_kep": 0.5}, "prune.completion_kep is no option; did you mean"),
        ({"xyz": 1}, "prune.xyz is no option; there are completion_keep"),
        ({"completion_keep": 0.0}, "completion_keep"),
        ({"completion_keep": "half"}, "must be 'auto', a number in"),
        ({"completion_keep": "shadow:1"}, "'shadow' or 'shadow:RATE' with a rate below 1"),
        ({"completion_keep": "shadow", "prompt_keep": 0.5}, "set prune.prompt_keep=1.0"),
        ({"prompt_keep": 1.5}, "prompt_keep"),
        ({"completion_rule": "best"}, "completion_rule"),
        ({"auto_cost": "money"}, "auto_cost"),
    ],
)
def test_what_is_no_option_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PruneOptions.of(given)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("algorithm.adv_estimator", "gae", "algorithm.adv_estimator=gae"),
        ("algorithm.use_kl_in_reward", True, "use_kl_loss=True"),
        ("algorithm.adv_estimator", "grpo_passk", "groups that are whole"),
        ("data.gen_batch_size", 4, "data.gen_batch_size=4 is not data.train_batch_size=8"),
        ("algorithm.filter_groups.enable", True, "filter_groups.enable"),
        ("algorithm.rollout_correction.rollout_rs", "token", "rollout_rs=token"),
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            True,
            "rollout_is_batch_normalize",
        ),
        ("critic.enable", True, "critic.enable=True"),
        ("distillation.enabled", True, "distillation.enabled=True"),
        ("trainer.critic_warmup", 3, "critic_warmup=3"),
        ("trainer.v1.sync.parameter_sync_step", 2, "parameter_sync_step=2"),
        ("trainer.v1.sampler.custom_sampler.path", "x.py", "custom_sampler.path=x.py"),
        ("trainer.v1.sampler.sync_refill_failed_groups", True, "sync_refill_failed_groups"),
        ("skip.rollout_tq.enable", True, "rollout_tq.enable"),
        ("actor_rollout_ref.rollout.n", 1, "rollout.n=1"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-sum", "loss_agg_mode=token-sum"),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm", "loss_scale_factor"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov", "loss_mode=clip_cov"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 3, "ppo_mini_batch_size=3"),
        ("actor_rollout_ref.actor.strategy", "megatron", "strategy=megatron"),
    ],
)
def test_what_cannot_be_exact_is_refused(place: str, value: Any, named: str) -> None:
    config = configuration()
    check_config(config, PruneOptions())
    *path, name = place.split(".")
    part: Any = config
    for step in path:
        if step not in part:
            setattr(part, step, Config())
        part = getattr(part, step)
    setattr(part, name, value)
    with pytest.raises((ConfigurationError, UnsupportedLossError), match=named):
        check_config(config, PruneOptions())


def test_prompts_need_a_history() -> None:
    config = configuration()
    config.trainer.total_epochs = 1
    check_config(config, PruneOptions())
    with pytest.raises(ConfigurationError, match="total_epochs visits each 1 times"):
        check_config(config, PruneOptions(prompt_keep=0.5))
    check_config(config, PruneOptions(prompt_keep=0.5, allow_single_epoch=True))
    config.trainer.total_epochs = 2
    check_config(config, PruneOptions(prompt_keep=0.5))
    with pytest.raises(
        ConfigurationError, match=r"5 steps over 512 prompts visits each 0.31 times"
    ):
        check_passes(PruneOptions(prompt_keep=0.5), 160 / 512, "5 steps over 512 prompts")


def test_sapo_is_divided_by_rows_alone() -> None:
    config = configuration()
    config.actor_rollout_ref.actor.policy_loss = Config(loss_mode="sapo")
    with pytest.raises(UnsupportedLossError, match="loss_agg_mode=seq-mean-token-mean"):
        check_config(config, PruneOptions())
    config.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-mean"
    check_config(config, PruneOptions())


def test_terms_that_act_without_an_advantage() -> None:
    config = configuration()
    assert not has_other_terms(config)
    config.actor_rollout_ref.actor.use_kl_loss = True
    assert has_other_terms(config)
    config.actor_rollout_ref.actor.use_kl_loss = False
    config.actor_rollout_ref.actor.entropy_coeff = 0.1
    assert has_other_terms(config)


def test_what_is_legal_and_worth_knowing_is_said() -> None:
    config = configuration()
    config.actor_rollout_ref.rollout.calculate_log_probs = False
    config.actor_rollout_ref.actor.ppo_epochs = 1
    said = notices(config, PruneOptions.of({"prompt_keep": 0.5}))
    assert [text.split()[0] for text in said] == [
        "loss_agg_mode=token-mean",
        "actor_rollout_ref.rollout.calculate_log_probs=False:",
        "prompts",
    ]
    assert "estimated from 4 prompts" in said[0]
    config.actor_rollout_ref.rollout.calculate_log_probs = True
    assert notices(config, PruneOptions.of({"completion_keep": 0.5})) == []


# -- a step ----------------------------------------------------------------------------------------


def rolled_out(rng: np.random.Generator, prompts: int, group: int, window: Any = None) -> Rollouts:
    scores = rng.integers(0, 2, (prompts, group)).astype(float)
    scores[0] = [1.0, 0.0] * (group // 2)  # one at least is live
    advantages = dppo.group_advantages(scores, epsilon=1e-6).values_PG
    tokens = rng.integers(1, 9, (prompts, group))
    return Rollouts(
        scores=scores,
        advantages=advantages,
        prompt_tokens=np.full((prompts, group), 5),
        response_tokens=tokens,
        loss_tokens=tokens,
        surprisal=0.1 + rng.random((prompts, group)),
        window=window,
    )


SIZES = Sizes(mini_batches=2, epochs=2, ranks=2, token_mean=True, other_terms=False)


def pruner_of(keep: float = 0.5, **options: Any) -> dppo.Pruner:
    return dppo.Pruner(dppo.PruneConfig(completion_keep=keep, **options), seed=0)


@pytest.mark.parametrize("token_mean", [True, False])
@pytest.mark.parametrize("other_terms", [True, False])
def test_everything_kept_has_the_weights_of_the_full_batch(
    token_mean: bool, other_terms: bool
) -> None:
    found = rolled_out(np.random.default_rng(0), 6, 4)
    sizes = Sizes(2, 1, 2, token_mean, other_terms)
    step = decide(pruner_of(1.0), found, sizes, step=3)
    assert step.rows == 12
    every = np.concatenate([s.rows_K for s in step.steps])
    live = np.ones(24, bool) if other_terms else found.advantages.ravel() != 0
    assert sorted(every) == np.flatnonzero(live).tolist()
    batch_N = plan._mini_batch_of_rows(0, 3, 24, 2)
    for number, of_batch in enumerate(step.steps):
        over = found.loss_tokens.ravel()[batch_N == number].sum() if token_mean else 12
        np.testing.assert_allclose(of_batch.factor_K, 1 / over)
        assert (batch_N[of_batch.rows_K] == number).all()


def test_every_epoch_and_mini_batch_has_a_draw_of_its_own() -> None:
    found = rolled_out(np.random.default_rng(1), 8, 4)
    pruner = pruner_of(0.4, sampling_design="poisson")
    draws = set()
    for number in range(40):
        step = decide(pruner, found, SIZES, step=number)
        assert len(step.steps) == 4
        first, _, again, _ = (tuple(s.rows_K) for s in step.steps)
        draws.add(first == again)
        repeated = decide(pruner_of(0.4, sampling_design="poisson"), found, SIZES, step=number)
        for one, other in zip(step.steps, repeated.steps, strict=True):
            assert np.array_equal(one.rows_K, other.rows_K)
            assert np.array_equal(one.factor_K, other.factor_K)
    assert False in draws


@pytest.mark.parametrize("token_mean", [True, False])
def test_expected_factors_are_those_of_the_full_batch(
    token_mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all outcomes of both phases; with prompts pruned, of the candidates' rows."""
    rng = np.random.default_rng(2)
    candidates, group, count = 4, 2, 2
    full = rolled_out(rng, candidates, group)
    full.scores[:] = [[1.0, 0.0]] * candidates
    advantages = dppo.group_advantages(full.scores, epsilon=1e-6).values_PG
    sizes = Sizes(2, 1, 1, token_mean, False)
    expected = np.zeros(candidates * group)
    pi = np.array([0.3, 0.5, 0.7, 0.5])
    batch_N = plan._mini_batch_of_rows(0, 0, candidates * group, 2)
    total = 0.0
    for probability, window in dppo.outcomes(pi, design="systematic"):
        here = window.kept
        assert here.sum() == count
        found = Rollouts(
            full.scores[here],
            advantages[here],
            full.prompt_tokens[here],
            full.response_tokens[here],
            full.loss_tokens[here],
            full.surprisal[here],  # type: ignore[index] - it has one
            window,
        )
        for p, kept in _completion_outcomes(found, sizes, monkeypatch):
            total += probability * p
            slots = np.arange(candidates * group).reshape(candidates, group)[here].ravel()
            for number, step in enumerate(kept.steps):
                over = _denominator(found, number, batch_N, here, token_mean)
                assert step.factor_K == pytest.approx(
                    kept.choices[0].weight.ravel()[step.rows_K] / over
                )
                expected[slots[step.rows_K]] += probability * p * step.factor_K * over
    assert total == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(expected, 1, atol=1e-10)


def _denominator(found: Rollouts, number: int, batch_N: Any, here: Any, token_mean: bool) -> float:
    """By rows the candidates'; by tokens the estimate of theirs."""
    if not token_mean:
        return batch_N.size / 2
    assert found.window is not None
    mine = (batch_N == number).reshape(here.size, -1)[here]
    tokens = found.loss_tokens / found.window.pi[here][:, None]
    return max(float(tokens[mine].sum()), 1.0)


def _completion_outcomes(found: Rollouts, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every outcome of independent flips, by forcing what the pruner draws."""
    config = dppo.PruneConfig(completion_keep=0.5, sampling_design="poisson", prompt_keep=0.5)
    seen: dict[tuple[int, ...], Any] = {}
    pis: list[Any] = []
    monkeypatch.setattr(
        "dppo.pruner.poisson_kept", lambda pi, rng: (pis.append(pi), np.ones(pi.shape, bool))[1]
    )
    decide(dppo.Pruner(config, seed=0), found, sizes, step=0)
    sizes_of = [pi.size for pi in pis]
    flat = np.concatenate(pis)
    for flags in itertools.product([False, True], repeat=flat.size):
        probability = float(np.prod(np.where(flags, flat, 1 - flat)))
        if probability == 0 or flags in seen:
            continue
        parts = iter(np.split(np.array(flags), np.cumsum(sizes_of)[:-1]))
        monkeypatch.setattr("dppo.pruner.poisson_kept", lambda pi, rng, parts=parts: next(parts))
        yield probability, decide(dppo.Pruner(config, seed=0), found, sizes, step=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2])
def test_layout_has_every_row_in_its_step_and_equal_shapes(ranks: int, multiple: int) -> None:
    rng = np.random.default_rng(ranks)
    for trial in range(20):
        found = rolled_out(rng, 6, 4)
        step = decide(pruner_of((0.05, 0.5, 1.0)[trial % 3]), found, SIZES, step=trial)
        length_N = (found.prompt_tokens + found.response_tokens).ravel()
        laid = layout(step, length_N, ranks, multiple=multiple)
        table = laid.rows.reshape(ranks, len(step.steps), -1)
        assert laid.step_rows == ranks * table.shape[2]
        assert table.shape[2] % multiple == 0
        factor = laid.factor.reshape(table.shape)
        for number, of_step in enumerate(step.steps):
            rows = table[:, number].ravel()
            real = rows != PADDING
            assert sorted(rows[real]) == sorted(of_step.rows_K)
            expected = dict(zip(of_step.rows_K.tolist(), of_step.factor_K, strict=True))
            for row, value in zip(rows, factor[:, number].ravel(), strict=True):
                assert value == (0.0 if row == PADDING else expected[row])
            load = np.where(table[:, number] == PADDING, 0, length_N[table[:, number]]).sum(axis=1)
            assert load.max() - load.min() <= length_N.max()


def test_metrics_count_everything() -> None:
    found = rolled_out(np.random.default_rng(3), 6, 4)
    step = decide(pruner_of(0.3), found, SIZES, step=0)
    values = metrics_of(step, found)
    dropped = sum(value for name, value in values.items() if name.startswith("dropped/"))
    kept = np.mean([choice.kept.sum() for choice in step.choices])
    assert dropped + kept == pytest.approx(24)
    assert values["tokens/trained"] < values["tokens/generated"] == found.response_tokens.sum()
    assert values["reward/ht"] == pytest.approx(found.scores.mean())
