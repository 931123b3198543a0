"""A reward function raises: where, and what becomes of the other completions."""

import logging
from typing import Any

import numpy as np
import pytest

from dppo.errors import ConfigurationError, RewardError

from .conftest import config, trainer, watched


class Failing:
    """Fails on some completions of every batch; the rest alternate."""

    def __init__(self, *fail: int, error: type[BaseException] = TimeoutError) -> None:
        self.fail, self.error, self.calls, self.batch = fail, error, 0, 8
        self.seen: dict[str, int] = {}

    def _check(self, completion_ids: Any, place: int) -> None:
        if place in self.fail:
            raise self.error("no answer")

    def __call__(self, completions: list[str], completion_ids: Any, **kwargs: Any) -> list[float]:
        self.calls += 1
        if len(completions) > 1:
            self.rows = [tuple(ids) for ids in completion_ids]
            for place in range(len(completions)):
                self._check(completion_ids, place)
        else:  # one by one, in order
            self.seen["next"] = (self.seen.get("next", -1) + 1) % self.batch
            self._check(completion_ids, self.seen["next"])
        return [float(sum(map(ord, c)) % 3 == 0) for c in completions]


def test_raise_names_function_and_prompt(tmp_path):
    run = trainer(tmp_path, reward=Failing(2), max_steps=1)
    with pytest.raises(
        RewardError,
        match=r"'Failing' failed on a completion to the prompt '\d+=':"
        r" TimeoutError: no answer.*reward_failures='skip'",
    ) as caught:
        run.train()
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_skip_trains_the_others_and_counts(tmp_path, caplog):
    run = trainer(tmp_path, reward=Failing(2), reward_failures="skip", max_steps=2)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        watch = watched(run)
    for log, decision in zip(watch.logs, watch.decisions, strict=True):
        assert log["dppo/rewards/failed"] == pytest.approx(1 / 8)
        assert np.isnan(decision.rewards_PG).ravel().tolist() == [False] * 2 + [True] + [False] * 5
        assert not decision.choices[0].kept.ravel()[2]
        assert log["dppo/dropped/unscorable"] >= 1
    assert "no score from reward function 'Failing'" in caplog.text


def test_nothing_fails_and_the_metric_is_there(tmp_path):
    run = trainer(tmp_path, reward=Failing(), reward_failures="skip", max_steps=1)
    (log,) = watched(run).logs
    assert log["dppo/rewards/failed"] == 0
    run = trainer(tmp_path, reward=Failing(), max_steps=1)
    assert "dppo/rewards/failed" not in watched(run).logs[0]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_never_a_missing_score(tmp_path, policy, error):
    run = trainer(tmp_path, reward=Failing(3, error=error), reward_failures=policy, max_steps=1)
    with pytest.raises(error):
        run.train()


def test_everything_failing_stops_the_run_in_the_end(tmp_path):
    reward = Failing(*range(8))
    options = {"reward_failures": "skip", "reward_failure_limit": 3, "max_steps": 9}
    run = trainer(tmp_path, reward=reward, **options)
    with pytest.raises(RewardError, match="on every completion, 3 times in a row"):
        run.train()
    assert run.state.global_step == 2
    assert reward.calls == 3 * 9


def test_asynchronous_functions_and_one_of_two(tmp_path):
    """The other function's scores stay."""
    calls = []

    async def slow(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        if len(completions) > 1 or len(calls) % 9 == 4:  # the whole, then its third row
            raise OSError("down")
        return [1.0]

    def fine(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    run = trainer(tmp_path, reward=[slow, fine], reward_failures="skip", max_steps=1)
    watch = watched(run)
    rewards = watch.decisions[0].rewards_PG.ravel()
    assert rewards.tolist() == [1, 2, 0, 2, 1, 2, 1, 2]
    assert watch.logs[0]["dppo/rewards/failed"] == pytest.approx(1 / 16)  # mean of 1/8 and 0


def test_refusals(tmp_path):
    with pytest.raises(ConfigurationError, match="reward_failures"):
        config(tmp_path, reward_failures="ignore")
    with pytest.raises(ConfigurationError, match="reward_failure_limit=0"):
        config(tmp_path, reward_failure_limit=0)
