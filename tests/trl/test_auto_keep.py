"""`completion_keep="auto"` in a run: what it is told, resumes, replays."""

import json
from pathlib import Path
from typing import Any

import pytest

from dppo.errors import ConfigurationError
from dppo.estimator.keep_rate import GRID, REST, START
from dppo.trl.auto_keep import LOGGED, replayed_rates

from .conftest import parameters, trainer, watched

AUTO: dict[str, Any] = {
    "completion_keep": "auto",
    "auto_cost": "tokens",
    "max_steps": 12,
    "num_generations": 4,
}


def rates(logs: list[dict[str, Any]]) -> list[float]:
    return [log[LOGGED] for log in logs]


def test_by_tokens_the_rate_moves_and_follows_from_the_rollouts_alone(tmp_path: Path) -> None:
    runs = [watched(trainer(tmp_path, **AUTO)) for _ in range(2)]
    for watch in runs:
        watch.check()
    found = rates(runs[0].logs)
    assert found == rates(runs[1].logs)
    assert found[:REST] == [START] * REST
    assert found[-1] != START
    assert set(found) <= set(GRID)
    ends = [parameters(watch.trainer.model) for watch in runs]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    last = runs[0].logs[-1]
    assert 0 < last["dppo/auto/fixed_share"] < 1
    assert last["dppo/auto/best"] in GRID
    # What the rate is, is what was decided with.
    for decision, rate in zip(runs[0].decisions, found, strict=True):
        live_cost = decision.choices[0].pi.sum()
        assert live_cost <= decision.choices[0].live.sum()
        assert rate < 1 or (decision.choices[0].pi[decision.choices[0].live] == 1).all()


class Clock:
    """Seconds that pass as told: rollout is dear, training cheap, or the other way round."""

    def __init__(self, run: Any, seconds: dict[str, float]) -> None:
        self.run, self.seconds = run, seconds

    def __call__(self, phase: str) -> None:
        clock = self.run.clock
        clock.phase = phase
        for name, spent in self.seconds.items():
            clock.seconds[name] += spent / 20


def test_by_time_it_goes_where_the_time_is(tmp_path: Path) -> None:
    """So few rows are nearly alike: below 0.7 the variance is beyond what is allowed."""
    ends = []
    for seconds in ({"rollout": 10.0, "train": 0.01}, {"rollout": 0.01, "train": 10.0}):
        run = trainer(tmp_path, **{**AUTO, "auto_cost": "time", "max_steps": 20})
        run.clock._switch = Clock(run, seconds)  # type: ignore[method-assign]
        ends.append(rates(watched(run).logs)[-1])
    assert ends == [1.0, 0.7]


def test_a_fixed_rate_logs_no_choice(tmp_path: Path) -> None:
    for options in ({"completion_keep": 0.5}, {**AUTO, "completion_rule": "inert"}):
        run = trainer(tmp_path, **{**options, "max_steps": 1})
        assert LOGGED not in watched(run).logs[0]


def test_annealing_comes_first(tmp_path: Path) -> None:
    run = trainer(tmp_path, **{**AUTO, "prune_warmup_steps": 3, "max_steps": 4})
    assert rates(watched(run).logs) == [1.0, 1.0, 1.0, START]


def test_a_resumed_run_goes_on_with_its_rates(tmp_path: Path) -> None:
    options = {**AUTO, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path, **options)
    whole.train()
    expected = {log["step"]: log[LOGGED] for log in whole.state.log_history if LOGGED in log}
    for step in (3, 7):
        run = trainer(tmp_path, **{**options, "save_strategy": "no"})
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        found = {log["step"]: log[LOGGED] for log in run.state.log_history if LOGGED in log}
        assert found == expected
        ends = [parameters(r.model) for r in (whole, run)]
        assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    fixed = trainer(tmp_path, **{**options, "completion_keep": 0.5})
    with pytest.raises(ConfigurationError, match="auto by tokens"):
        fixed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_replayed_run_is_the_recorded_one(tmp_path: Path) -> None:
    recorded = trainer(tmp_path / "a", **{**AUTO, "auto_cost": "time"})
    recorded.clock._switch = Clock(recorded, {"rollout": 0.01, "train": 10.0})  # type: ignore
    recorded.train()
    path = tmp_path / "trainer_state.json"
    recorded.state.save_to_json(str(path))
    replay = {**AUTO, "auto_cost": "time", "completion_keep_replay": str(path)}
    again = trainer(tmp_path / "b", **replay)
    again.train()
    expected = rates([log for log in recorded.state.log_history if "loss" in log])
    assert rates([log for log in again.state.log_history if "loss" in log]) == expected
    assert len(set(expected)) > 1
    ends = [parameters(run.model) for run in (recorded, again)]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    longer = trainer(tmp_path / "c", **{**replay, "max_steps": 14})
    with pytest.raises(ConfigurationError, match="optimizer step 12; it has 12, up to step 11"):
        longer.train()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "cannot be read"),
        ([json.dumps({"step": 1, "loss": 0.1})], "fixed completion_keep"),
        ([json.dumps({"step": 10, LOGGED: 0.44})], "mean of several rates"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigurationError, match=message):
        replayed_rates(path)


def test_the_metrics_file_of_a_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, LOGGED: 0.5}, {"step": 2, "loss": 0.0}, {"step": 3, LOGGED: 0.35}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert replayed_rates(path) == {0: 0.5, 2: 0.35}
