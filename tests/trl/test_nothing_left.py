"""A generation without any gradient: optimizer and schedule act as if it had been trained on."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from .conftest import (
    Script,
    host_trainer,
    parameters,
    random_completions,
    tiny_model,
    trainer,
    watched,
)

ADAMW: dict[str, Any] = {
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_steps": 2,
    "max_grad_norm": 1.0,
    # Survivors are added up in another order than the host's rows, and log-probs are float32, so
    # gradients differ by rounding (some 1e-8), which AdamW divides by |g| + epsilon: with the
    # default 1e-8 an entry whose gradient is nothing but rounding would move by up to the rate.
    # Parameters are float64: 1e-7 is less than a float32 can hold of a weight of 1.
    "adam_epsilon": 1e-3,
}

LIVE = [[3, 4, 1], [5, 4, 1], [3, 6, 7, 1], [8, 9, 1]] * 2
WRONG = [[4, 5, 1], [5, 4, 1], [6, 1], [7, 8, 9, 1]] * 2
RIGHT = [[3, 5, 1], [3, 4, 1], [3, 1], [3, 8, 9, 1]] * 2
TRUNCATED = [[4, 5, 6, 7, 8, 9], [3, 5, 6, 7, 8, 9], [3] * 6, [4] * 6] * 2


def starts_with_0(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(c.startswith("0")) for c in completions]


class Snapshots(TrainerCallback):
    """Parameters, learning rate and step count after every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any, lr_scheduler: Any, **kwargs: Any
    ) -> None:
        self.seen.append((parameters(model), lr_scheduler.get_last_lr(), state.global_step))


@pytest.mark.parametrize("rule", ["inert", "proportional"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("generations", [(LIVE, WRONG), (WRONG, LIVE), (WRONG, RIGHT)])
def test_steps_without_gradient_are_the_hosts(
    tmp_path: Path, generations: tuple[Any, ...], loss_type: str, rule: str
) -> None:
    options = {**ADAMW, "loss_type": loss_type, "reward": starts_with_0}
    # The rule "proportional" draws from live rows; at this rate it keeps them all.
    pruning = {"completion_rule": rule, "completion_keep": 0.5 if rule == "inert" else 1 - 1e-12}
    double = tiny_model().double()
    host = host_trainer(
        tmp_path, model=tiny_model().double(), rollout_func=Script(*generations), **options
    )
    ours = trainer(tmp_path, model=double, rollout_func=Script(*generations), **options, **pruning)
    after = [Snapshots(), Snapshots()]
    for run, seen in zip((host, ours), after, strict=True):
        run.add_callback(seen)
        run.train()
    assert len(after[0].seen) == len(after[1].seen) == 2
    for (expected, *schedule), (found, *our_schedule) in zip(
        after[0].seen, after[1].seen, strict=True
    ):
        assert schedule == our_schedule
        for name in expected:
            assert torch.isfinite(found[name]).all()
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7)
    assert (
        host.optimizer.state_dict()["state"].keys() == ours.optimizer.state_dict()["state"].keys()
    )


def test_momentum_and_decay_act_in_a_step_without_gradient(tmp_path: Path) -> None:
    ours = trainer(
        tmp_path,
        rollout_func=Script(LIVE, WRONG),
        reward=starts_with_0,
        **{**ADAMW, "logging_steps": 1},
    )
    watch = watched(ours)
    first, second = watch.logs
    assert second["grad_norm"] == 0
    assert second["loss"] == 0
    assert second["dppo/completions/live"] == second["dppo/completions/keep"] == 0
    assert second["dppo/dropped/all_wrong"] == 8
    assert second["dppo/tokens/trained"] == 0
    assert first["dppo/dropped/all_wrong"] == 0
    # A single micro-batch of padding, so that gradients are zero and not missing.
    assert [m is not None for m in watch.decisions[1].micro_batches] == [False, True]
    assert all(p.grad is None or not p.grad.any() for p in ours.model.parameters())


def all_right_or_all_wrong(completions: list[str], **kwargs: Any) -> list[float]:
    half = len(completions) // 2
    return [0.0] * half + [1.0] * half


def a_quarter(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.25] * len(completions)


RIGHT_AND_WRONG = (
    "all right (every reward of the group 1) 50%",
    "all wrong (every reward of the group 0) 50%",
)


@pytest.mark.parametrize(
    ("reward", "shares"),
    [
        (all_right_or_all_wrong, RIGHT_AND_WRONG),
        (a_quarter, ("the same other reward in the group 100%",)),
    ],
)
def test_ten_silent_generations_warn_once_and_say_why(
    tmp_path: Path, reward: Any, shares: tuple[str, ...]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched(trainer(tmp_path, rollout_func=Script(WRONG), reward=reward, max_steps=21))
    told = [str(w.message) for w in caught if "no gradient in" in str(w.message)]
    assert len(told) == 1
    assert "no gradient in 10 generations in a row" in told[0]
    assert all(share in told[0] for share in shares)


def test_the_warning_names_truncation(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        rollout_func=Script(TRUNCATED),
        reward=starts_with_0,
        mask_truncated_completions=True,
        max_steps=10,
    )
    with pytest.warns(UserWarning, match="truncated and masked 100%"):
        watch = watched(run)
    assert watch.logs[-1]["dppo/dropped/masked"] == 8
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_no_warning_while_there_is_a_gradient(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    # Nine silent generations, one with a gradient, nine silent ones: never ten in a row.
    script = Script(*[WRONG] * 9, LIVE, *[WRONG] * 9)
    trainer(tmp_path, rollout_func=script, reward=starts_with_0, max_steps=19).train()
    assert not [w for w in recwarn if "no gradient" in str(w.message)]


@pytest.mark.parametrize("keep", [1.0, "shadow", 0.4])
def test_a_zero_loss_with_a_gradient_is_explained_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: Any
) -> None:
    """The note is about the loss that is logged, on whatever was trained.

    Every group's advantages sum to 0 and grpo weighs rows alike, so the host's loss is 0; that of
    survivors is an estimate and is not.
    """
    caplog.set_level(logging.INFO, logger="dppo")
    run = trainer(
        tmp_path,
        rollout_func=Script(LIVE),
        reward=starts_with_0,
        loss_type="grpo",
        completion_keep=keep,
        max_steps=4,
    )
    watch = watched(run)
    told = [r.message for r in caplog.records if "loss is 0 and that is normal" in r.message]
    zero = [abs(log["loss"]) < 1e-6 and log["grad_norm"] > 0 for log in watch.logs]
    assert len(told) == any(zero)
    assert any(zero) == (keep != 0.4)


def test_a_dead_generation_is_not_told_that_zero_loss_is_normal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dppo")
    trainer(tmp_path, rollout_func=Script(WRONG), reward=starts_with_0).train()
    assert not [r for r in caplog.records if "loss is 0" in r.message]


def test_nothing_left_with_other_terms_still_trains(tmp_path: Path) -> None:
    """A KL or entropy term acts where the advantage is 0: such rows are not inert."""
    run = trainer(
        tmp_path,
        rollout_func=Script(random_completions(8, seed=0)),
        reward=lambda completions, **kwargs: [0.0] * len(completions),
        entropy_coef=0.1,
    )
    watch = watched(run)
    watch.check()
    assert all(log["dppo/completions/live"] == 1 for log in watch.logs)
    assert all(log["grad_norm"] > 0 for log in watch.logs)
    assert np.mean([log["dppo/completions/keep"] for log in watch.logs]) < 0.9


def test_training_again_after_an_interruption_starts_a_generation(tmp_path: Path) -> None:
    """Stopped between two micro-steps, a second train() must not go on in mid-window."""

    class Stop(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    run = trainer(tmp_path, completion_keep=0.5, gradient_accumulation_steps=2, max_steps=2)
    stop = Stop()
    run.add_callback(stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(stop)
    decide, windows = run._decide, []

    def spied(rollout: Any) -> Any:
        left = run.current_gradient_accumulation_steps - run._window_position
        windows.append((left, run._step % 2))
        return decide(rollout)

    run._decide = spied
    run.train()
    assert windows == [(2, 0), (2, 0)]  # whole windows, from a generation's first micro-step on
    assert run.phase == "idle"
