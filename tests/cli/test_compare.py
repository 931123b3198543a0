"""`dppo compare`: methods, turns, what the runs say, and one comparison from end to end."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("trl")

from dppo.cli.compare import prepare
from dppo.cli.compare.analysis import analyse, paired
from dppo.cli.compare.curves import Run, isotonic, steps_to, target_of
from dppo.cli.compare.methods import METHODS, read_methods
from dppo.cli.compare.rounds import Workers
from dppo.cli.compare.text import lines
from dppo.cli.main import main
from dppo.errors import ConfigurationError

TINY = [
    *("--max-steps=2", "--per-device-train-batch-size=8", "--gradient-accumulation-steps=2"),
    *("--num-generations=4", "--num-prompts=16", "--eval-prompts=16", "--eval-every=1"),
    "--seeds=1",
]


def run_of(rewards, *, every=5, seconds=1.0, final=None, **means):
    steps = every * (len(rewards) - 1)
    spent = np.arange(steps + 1) * seconds
    return Run(
        np.arange(len(rewards)) * float(every),
        np.array(rewards, float),
        {
            "seconds": spent,
            "cpu_seconds": 2 * spent,
            "tokens_generated": spent * 10,
            "tokens_trained": spent * 5,
        },
        {"step_seconds": seconds, "step_cpu_seconds": 2 * seconds, **means},
        rewards[-1] if final is None else final,
    )


def test_methods_are_read():
    found = read_methods(["dppo", "cppo@3", "q=dppo,completion_keep=0.25"], {})
    assert [m.name for m in found] == ["grpo", "dppo", "cppo", "q"]
    assert found[2].seeds == 3
    assert found[3].options["completion_keep"] == 0.25
    assert read_methods(["x=cppo,peer_rate=0.25"], {})[1].options["peer_rate"] == 0.25


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        (["dpo"], {}, "did you mean dppo"),
        (["cppo@x"], {}, "number of seeds"),
        (["a=dppo,completion_kep=0.5"], {}, "did you mean completion_keep"),
        (["dppo", "dppo"], {}, "twice"),
        (["dppo"], {"completion_keep": 0.3}, "mine=dppo,completion_keep=0.3"),
        (["x=dppo,peer_rate=0.5"], {}, "is no option=value"),
    ],
)
def test_wrong_methods(words, given, message):
    with pytest.raises(ConfigurationError, match=message):
        read_methods(words, given)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seeds=0", "seeds must be at least 1"),
        ("--eval-prompts=0", "eval_prompts must be at least 1"),
        ("--logging-steps=5", "logging_steps is not an option"),
        ("--lr=1", "did you mean learning_rate"),
    ],
)
def test_wrong_options_before_anything_runs(tmp_path, option, message, capsys):
    assert main(["compare", option, "--output-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_isotonic_is_the_nearest_non_decreasing_sequence():
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2, 2, 2]
    values = np.random.default_rng(0).normal(size=30)
    fitted = isotonic(values)
    assert (np.diff(fitted) >= 0).all()
    assert fitted.mean() == pytest.approx(values.mean())
    for place in range(30):  # no block that could be split is worse than moving it
        for step in (-1e-3, 1e-3):
            other = fitted.copy()
            other[place:] += step
            if (np.diff(other) >= 0).all():
                assert ((other - values) ** 2).sum() >= ((fitted - values) ** 2).sum()


def test_target_and_steps_by_hand():
    """From 0.2 to 0.7: the target is 0.65, half way between the evaluations at 5 and 10."""
    runs = [run_of([0.1, 0.5, 0.7]), run_of([0.3, 0.7, 0.7])]
    assert target_of(runs) == pytest.approx(0.65)
    assert steps_to(0.65, runs) == pytest.approx(7.5)
    assert steps_to(0.2, runs) == 0
    assert steps_to(0.71, runs) is None
    assert target_of([run_of([0.5, 0.4])]) is None


def test_a_row_by_hand():
    """Half the seconds a step; the target after 6 steps in place of 9."""
    phases = {"dppo/time/rollout": 0.3, "dppo/time/score": 0.0, "dppo/time/prune": 0.0}
    runs = {
        "grpo": {
            s: run_of([0, 0.5, 1], seconds=1.0, **phases, **{"dppo/time/train": 0.7})
            for s in range(3)
        },
        "packing": {0: run_of([0, 0.5, 1], seconds=0.65, **phases, **{"dppo/time/train": 0.35})},
        "dppo": {
            s: run_of(
                *([0, 0.75, 1],),
                seconds=0.5,
                final=1 - 0.01 * s,
                **phases,
                **{
                    "dppo/time/train": 0.2,
                    "dppo/cost/keep": 0.5,
                    "dppo/variance/inflation": 0.25,
                    "dppo/tokens/density": 1.2,
                },
            )
            for s in range(3)
        },
    }
    rows = analyse(runs, packed={"packing", "dppo"})
    row = rows["dppo"]
    assert row["step_speedup"] == 2
    goal = row["to_target"]
    assert goal["target"] == pytest.approx(0.9)
    assert goal["steps"] == pytest.approx(8)
    assert goal["fewer_steps"] == pytest.approx(9 / 8)
    assert goal["fewer"]["seconds"] == pytest.approx(9 / 4)
    assert goal["interval"]["low"] == pytest.approx(9 / 4)  # all seeds alike
    # Rollout 0.3 and half of the packed 0.35.
    assert row["bound_seconds"] == pytest.approx(0.475)
    assert row["over_bound"] == pytest.approx(0.5 / 0.475)
    # 9 steps of 0.65 s against 8 of 0.5 s, from one seed.
    sooner = rows["packing"]["dppo_sooner"]
    assert sooner == {"ratio": pytest.approx(9 * 0.65 / 4), "low": None, "high": None}
    assert "dppo_sooner" not in row
    share = 0.3 / 0.65
    efficiency = 1 / (1.25 * (share + (1 - share) * 0.5))
    assert row["predicted"] == pytest.approx(efficiency / 0.65)
    # Differences 0, -0.01, -0.02: t(2) = 4.303, standard error 0.01 / sqrt(3).
    difference = row["reward_difference"]
    assert difference["mean"] == pytest.approx(-0.01)
    assert difference["low"] == pytest.approx(-0.01 - 4.303 * 0.01 / 3**0.5)
    assert rows["packing"]["reward_difference"]["low"] is None
    assert rows["grpo"]["to_target"]["fewer"]["seconds"] == 1
    assert "predicted" not in rows["grpo"]
    text = "\n".join(lines(rows))
    assert "2.25" in text


def test_without_packing_alone_nothing_is_predicted_of_packed_methods():
    more = {"dppo/cost/keep": 0.5, "dppo/variance/inflation": 0.0}
    times = {"dppo/time/rollout": 0.5, "dppo/time/train": 0.5}
    runs = {"grpo": {0: run_of([0, 1], **times)}, "dppo": {0: run_of([0, 1], **more)}}
    assert "predicted" not in analyse(runs, packed={"dppo"})["dppo"]
    assert "predicted" in analyse(runs)["dppo"]


def test_a_method_that_never_arrives_and_a_baseline_that_does_not_improve():
    rows = analyse({"grpo": {0: run_of([0, 1])}, "dppo": {0: run_of([0, 0.5])}})
    assert rows["dppo"]["to_target"]["steps"] is None
    assert "never" in "\n".join(lines(rows))
    rows = analyse({"grpo": {0: run_of([1, 0])}, "dppo": {0: run_of([0, 0.5])}})
    assert rows["dppo"]["to_target"] == {"target": None, "steps": None}


def test_paired_needs_two():
    assert paired(np.array([0.1]))["low"] is None


FAKE = """
import json, sys
job = json.loads(sys.stdin.readline())
while True:
    for step in range(3):
        print(json.dumps({"event": "step", "step": step, "max_steps": 2}), flush=True)
        sys.stdin.readline()
        if job["dies"] == step and step: sys.exit(7)
    if job["raises"]:
        print(json.dumps({"event": "failed", "error": "Traceback\\nValueError: no"}), flush=True)
    else:
        print(json.dumps({"event": "done"}), flush=True)
    line = sys.stdin.readline()
    if not line: break
    job = json.loads(line)
"""


def test_turns_and_a_crash_loses_no_other(tmp_path):
    turns = []
    jobs = {
        "a": {"folder": str(tmp_path / "a"), "dies": None, "raises": False},
        "b": {"folder": str(tmp_path / "b"), "dies": 1, "raises": False},
        "c": {"folder": str(tmp_path / "c"), "dies": None, "raises": True},
    }
    with Workers(list(jobs), tmp_path, [sys.executable, "-c", FAKE]) as workers:
        failed = workers.run_round(jobs, advance=turns.append)
        assert set(failed) == {"b", "c"}
        assert "ended with 7" in failed["b"]
        assert "ValueError: no" in (tmp_path / "c" / "error.txt").read_text()
        assert turns == ["a", "b", "c", "a", "c", "a"]  # one step each
        jobs["b"]["dies"] = None  # a new process carries out the next round
        assert set(workers.run_round(jobs, advance=turns.append)) == {"c"}


def test_every_method_can_be_planned(tmp_path):
    plan = prepare([*TINY, "--methods", *METHODS, "--output-dir", str(tmp_path)])
    assert [m.name for m in plan.methods] == list(METHODS)
    assert plan.total == len(METHODS) * 3
    trainers = pytest.importorskip("dppo.cli.compare.trainers")
    for job in plan.jobs[0].values():
        shown = trainers.settings(job)
        assert job["options"].items() <= shown.items()
        assert shown["max_steps"] == 2
    assert "completion_keep" not in trainers.settings(plan.jobs[0]["grpo"])


def test_a_comparison_and_that_it_goes_on(tmp_path, capsys):
    words = ["compare", *TINY, "--methods", "grpo", "dppo", "--output-dir", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 runs, 2 of them to do" in out
    assert "grpo: TRL's GRPOTrainer, unmodified" in out
    saved = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert saved["command"].startswith("dppo compare")
    assert saved["machine"]["cores"] >= 1
    rows = saved["rows"]
    assert list(rows) == ["grpo", "dppo"]
    assert rows["grpo"]["curve"]["step"] == [0, 1, 2]
    # The same evaluation of the same model before training.
    assert rows["grpo"]["curve"]["reward"][0] == rows["dppo"]["curve"]["reward"][0]
    for row in rows.values():
        phases = row["phases"]
        assert sum(phases.values()) == pytest.approx(row["step_seconds"], rel=0.2)
        assert phases["rollout"] > 0
    records = [
        json.loads(line) for line in (tmp_path / "grpo/seed-0/metrics.jsonl").open(encoding="utf-8")
    ]
    assert records[1]["tokens_generated"] == records[1]["tokens_trained"] > 0
    assert (tmp_path / "dppo/seed-0/summary.json").is_file()

    (tmp_path / "grpo/seed-0/summary.json").unlink()  # as if it had been stopped
    assert main(words) == 0
    assert "2 runs, 1 of them to do" in capsys.readouterr().out
    assert main([*words, "--learning-rate=1e-5"]) == 2
    assert "other settings (config differ)" in capsys.readouterr().err
