"""`dppo train` from end to end, on the smallest scale."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

from dppo.cli.main import main

TINY = [
    "train",
    "--max-steps=2",
    "--per-device-train-batch-size=8",
    "--gradient-accumulation-steps=2",
    "--num-generations=4",
    "--num-prompts=16",
    "--eval-prompts=16",
]


def test_two_steps_of_the_builtin_task(tmp_path, capsys):
    assert main([*TINY, "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in ("step 1/2", "step 2/2", "phase evaluate", "reward   before", "ceiling"):
        assert text in out
    assert "speed-up" not in out

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["eval_prompts"] == 16
    assert 0 <= summary["reward_before"] <= 1
    assert 0 <= summary["reward_after"] <= 1
    assert set(summary["seconds"]) == {"rollout", "score", "train", "prune"}
    skipped = sum(summary["completion_tokens_skipped"].values())
    trained = summary["completion_tokens_trained"]
    assert trained + skipped == summary["completion_tokens_generated"] > 0
    assert summary["config"]["completion_keep"] == 0.5
    assert summary["config"]["model"] == "builtin"
    assert not any(key.endswith("_token") for key in summary["config"])
    assert summary["versions"]["trl"].startswith("1.")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["step"] for record in records][:2] == [1, 2]
    assert all(record["max_steps"] == 2 for record in records)
    assert (tmp_path / "model.safetensors").is_file()


def test_interrupt_writes_the_summary_so_far(tmp_path, capsys, monkeypatch):
    from dppo.cli import runner

    class Stub:
        phase = "rollout"
        state = SimpleNamespace(global_step=1)

        def __init__(self, config):
            self.args = config

        def add_callback(self, callback):
            pass

        def is_world_process_zero(self):
            return True

        def train(self, resume_from_checkpoint):
            raise KeyboardInterrupt

        def totals(self):
            return {
                "completion_tokens_generated": 10,
                "completion_tokens_trained": 5,
                "prompts_candidates": 2,
                "prompts_rolled_out": 2,
                "completion_tokens_skipped": {"sampled_out": 5},
                "seconds": {"rollout": 1.0, "score": 0.0, "train": 1.0, "prune": 0.0},
                "effective_sample_size": None,
            }

    monkeypatch.setattr(runner, "_make_trainer", lambda job, config: Stub(config))
    words = [*TINY, "--eval-prompts", "0", "--output-dir", str(tmp_path)]
    assert main(words) == 130
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["reward_after"] is None
    assert "interrupted after 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--loss-type", "nonsense"], ["--completion-keep", "1.5"]])
def test_what_the_config_class_refuses_is_one_message(words, capsys):
    assert main([*TINY, *words]) == 2
    err = capsys.readouterr().err
    assert "dppo train: error:" in err
    assert "Traceback" not in err
