import json
import math

import pytest

from dppo.cli.files import MetricsFile, finite, write_json
from dppo.cli.summary import make_summary, pruning_gain, summary_lines

TOTALS = {
    "completion_tokens_generated": 1000,
    "completion_tokens_trained": 250,
    "completion_tokens_skipped": {"sampled_out": 500, "all_right": 250, "masked": 0},
    "completions_generated": 100,
    "completions_trained": 25,
    "prompts_candidates": 20,
    "prompts_rolled_out": 10,
    "seconds": {"rollout": 7.0, "score": 0.0, "train": 3.0, "prune": 0.0},
    "effective_sample_size": 0.83,
}


def _summary(**changes):
    options = {
        "before": None,
        "after": None,
        "steps": 20,
        "wall_seconds": 12.0,
        "interrupted": False,
        "resumed_from": None,
        "config": {"seed": 0},
    }
    return make_summary({**TOTALS, **changes.pop("totals", {})}, **{**options, **changes})


def test_half_of_the_completions_after_generation():
    # (7 + 3) / (7 + 1.5) = 1.18; at best 10 / 7 = 1.43
    gain = pruning_gain(7, 3, kept=0.5)
    assert gain.speedup == pytest.approx(10 / 8.5)
    assert round(gain.speedup, 2) == 1.18
    assert round(gain.ceiling, 2) == 1.43


def test_half_of_the_prompts_before_generation():
    gain = pruning_gain(0, 10, kept=0.5)
    assert (gain.speedup, gain.ceiling) == (2.0, math.inf)


def test_text():
    text = "\n".join(summary_lines(_summary()))
    assert "rollout 7.0 s (70%)" in text
    assert "1/f = 1.43x" in text
    assert "1,000 completion tokens generated, 250 trained (25.0%)" in text
    assert "skipped: sampled out 500, all right 250" in text
    assert "masked" not in text
    assert "10 rolled out of 20 candidates (50.0%)" in text
    assert "ESS      0.83" in text
    assert "reward   not evaluated" in text
    assert "speed-up" not in text


def test_text_with_evaluations_and_interrupt():
    pytest.importorskip("torch")
    from dppo.cli.evaluate import Evaluation

    before = Evaluation(0.4, 0.02, 512, 0)
    text = "\n".join(summary_lines(_summary(before=before, interrupted=True)))
    assert "before 0.400 ± 0.020 (mean ± standard error, 512 held-out prompts" in text
    assert "interrupted after 20 steps" in text
    summary = _summary(before=before, after=Evaluation(0.6, 0.02, 512, 0))
    assert summary["reward_before"] == 0.4
    assert summary["reward_after"] == 0.6
    assert summary["eval_prompts"] == 512
    assert "after 0.600" in summary_lines(summary)[0]


def test_nothing_measured():
    zero = {"completion_tokens_generated": 0, "seconds": {}, "effective_sample_size": None}
    text = "\n".join(summary_lines(_summary(totals=zero)))
    assert "tokens   none generated" in text
    assert "ceiling" not in text


def test_prompts_are_not_mentioned_where_none_was_pruned():
    assert "candidates" not in "\n".join(summary_lines(_summary(totals={"prompts_candidates": 10})))


def test_metrics_have_max_steps_and_no_nan(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    logs = {"reward": 0.5, "kl": math.nan, "clip": math.inf, "epoch": 1}
    metrics = MetricsFile(path, keep_until=None)
    for step in (1, 2, 3):
        metrics.write(step=step, max_steps=6, logs=logs)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0] == {"step": 1, "max_steps": 6, "reward": 0.5, "epoch": 1}
    assert [record["step"] for record in records] == [1, 2, 3]
    MetricsFile(path, keep_until=2).write(step=3, max_steps=6, logs={"reward": 0.7})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["reward"] for record in records] == [0.5, 0.5, 0.7]
    MetricsFile(path, keep_until=None)
    assert path.read_text() == ""


def test_resumed_run_says_so():
    assert "resumed  from step 2; counted since then" in summary_lines(_summary(resumed_from=2))


def test_json_without_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": [math.nan, {"b": math.inf}], "c": {1}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, {"b": None}], "c": "{1}"}
    assert finite({"a": 1}) == {"a": 1}
