"""What a first user tripped over."""

import json

import pytest

from dppo.cli.callback import RunCallback
from dppo.cli.files import MetricsFile
from dppo.cli.main import main
from dppo.cli.progress import ProgressReporter


def test_a_half_written_record_is_left_out_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    MetricsFile(path, keep_until=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_metrics_file_is_opened_when_training_begins(tmp_path):
    """A refused resume must leave the records alone."""
    opened = []
    reporter = ProgressReporter(phase=lambda: "idle", enabled=False)
    callback = RunCallback(reporter, lambda: opened.append(1))
    assert not opened

    class State:
        max_steps, global_step = 2, 0

    callback.on_train_begin(None, State(), None)
    assert opened


def test_a_step_without_any_score_has_no_reward_to_show(tmp_path):
    reporter = ProgressReporter(phase=lambda: "idle", enabled=False)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", keep_until=None)
    callback = RunCallback(reporter, lambda: metrics)

    class State:
        max_steps, global_step = 2, 1

    callback.on_train_begin(None, State(), None)
    callback.on_log(None, State(), None, logs={"reward": None})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--completion-rule", "foo"], "completion_rule must be one of"),
        (["--completion-prune-rate", "1.0"], "completion_prune_rate must be in [0, 1)"),
        (["--loss-type", "foo"], "loss_type 'foo' has no known denominator"),
        (["--num-prompts", "-3"], "num_prompts is too small: -3"),
        (["--num-processes", "0"], "num_processes"),
    ],
)
def test_plan_refuses_what_training_would(words, said, capsys):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "/nowhere"], "there is no directory /nowhere"),
        (["--output-dir", "/proc/nothing"], "output_dir: /proc/nothing cannot be made"),
    ],
)
def test_paths_are_checked_before_anything_is_loaded(words, said, capsys):
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_data_set_is_one_message(tmp_path, capsys):
    path = tmp_path / "empty.csv"
    path.write_text("prompt,answer\n")
    words = ["train", "--dataset", str(path), "--reward", "dppo.tasks:sorting_reward"]
    assert main([*words, "--output-dir", str(tmp_path / "run")]) == 2
    assert "empty.csv" in capsys.readouterr().err


def test_a_reward_of_texts_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "text_rewards.py").write_text(
        "def texts(completions, **kwargs):\n    return ['good'] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["train", "--reward", "text_rewards:texts", "--eval-prompts", "4", "--max-steps", "1"]
    assert main([*words, "--output-dir", str(tmp_path / "run")]) == 2
    assert "reward function 'texts' returned 4 values, among them 'good'" in capsys.readouterr().err
