"""H04: which reward says that a group has signal. `signal_reward` changes the objective."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dppo.errors import ConfigurationError
from dppo.trl.signal import signal

from .conftest import Script, parameters, random_completions, trainer

LENGTH = [-0.1, -0.2, -0.3, -0.4]


def correct(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [LENGTH[i % 4] for i in range(len(completions))]


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_shaping_makes_no_signal_of_an_all_wrong_group(right: float, aggregation: str) -> None:
    rewards = np.stack([np.full(4, right), LENGTH], axis=1).astype(np.float32)
    options: dict[str, Any] = {"group": 4, "scale": "group", "aggregation": aggregation}
    weights = np.ones(2, np.float32)
    total = signal(rewards, weights, **options)
    assert not total.dead_P[0]
    assert (total.advantages_PG != 0).all()
    of_correct = signal(rewards, weights, signal_reward=0, **options)
    assert of_correct.dead_P[0]
    assert not of_correct.advantages_PG.any()
    assert not of_correct.alive_PG.any()


def test_a_group_that_the_reward_does_not_score_is_left_alone() -> None:
    """A reward for another task returns None; that makes no group constant."""
    rewards = np.stack([np.full(4, np.nan), LENGTH], axis=1).astype(np.float32)
    options: dict[str, Any] = {"group": 4, "scale": "group", "aggregation": "sum_then_normalize"}
    told = signal(rewards, np.ones(2, np.float32), signal_reward=0, **options)
    assert not told.dead_P[0]
    assert (told.advantages_PG != 0).all()


def test_equal_rewards_inside_the_range_are_dead() -> None:
    rewards = np.full((4, 1), 0.4, np.float32)
    options: dict[str, Any] = {"group": 4, "scale": "group", "aggregation": "sum_then_normalize"}
    assert signal(rewards, np.ones(1, np.float32), **options).dead_P[0]


@pytest.mark.parametrize("keep", [1.0, "shadow", 0.5])
def test_it_holds_with_pruning_off_too(tmp_path: Path, keep: float | str) -> None:
    """Every group is all wrong, so nothing moves; without the option the length reward moves it."""
    moved = {}
    for name in (None, "correct"):
        run = trainer(
            tmp_path,
            reward=[correct, length],
            rollout_func=Script(random_completions(8, seed=0)),
            completion_keep=keep,
            signal_reward=name,
            max_steps=2,
            weight_decay=0.0,
        )
        before = parameters(run.model)
        run.train()
        after = parameters(run.model)
        moved[name] = any(not torch.equal(before[n], after[n]) for n in before)
    assert moved == {None: True, "correct": False}


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"signal_reward='acc'.*correct, length"):
        trainer(tmp_path, reward=[correct, length], signal_reward="acc")
