"""What `dppo train` refuses before weights are loaded."""

import json
from pathlib import Path

import pytest

from dppo.cli import train
from dppo.cli.builtin import BUILTIN_CONFIG
from dppo.cli.data import hold_out, load_prompts, with_prompt_column
from dppo.cli.fields import RUN_OPTIONS
from dppo.cli.job import checkpoint_step
from dppo.cli.main import main
from dppo.cli.options import read_settings
from dppo.cli.rewards import check_rewards, load_rewards
from dppo.errors import ConfigurationError

datasets = pytest.importorskip("datasets")

YAML = Path(__file__).parents[2] / "configs" / "builtin.yaml"
REWARDS = """
def exact(completions, solution, **kwargs):
    return [float(c == s) for c, s in zip(completions, solution)]

def closed(completions, answer):
    return [0.0] * len(completions)

def free(completions, **kwargs):
    return [0.0] * len(completions)

value = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    rows = [{"question": f"{i}=", "answer": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _refused(*words):
    with pytest.raises(ConfigurationError) as caught:
        train.prepare(words)
    return str(caught.value)


QUESTIONS = ("--dataset", "rows.jsonl", "--prompt-column", "question")


def test_builtin_defaults_are_the_file():
    settings = read_settings(["--config", str(YAML)], run_options=RUN_OPTIONS)
    assert settings.config == BUILTIN_CONFIG
    assert settings.run == {}


def test_builtin_job():
    job = train.prepare(["--max-steps", "5"])
    assert job.config == {**BUILTIN_CONFIG, "max_steps": 5}
    assert job.rewards[0].__name__ == "sorting_reward"
    assert len(job.prompts.held_out) == 512
    assert not set(job.prompts.train["prompt"]) & set(job.prompts.held_out["prompt"])


def test_own_data_does_not_inherit_the_builtin_run(here):
    words = [*QUESTIONS, "--reward", "some_rewards:free", "--eval-prompts", "8"]
    job = train.prepare(words)
    assert "max_completion_length" not in job.config
    assert job.config["output_dir"] == "runs/train"
    assert job.prompts.train.column_names == ["prompt", "answer"]
    assert (len(job.prompts.train), len(job.prompts.held_out)) == (32, 8)
    job = train.prepare([*words, "--num-prompts", "20"])
    assert len(job.prompts.train) == 20
    assert "num_prompts is 33" in _refused(*words, "--num-prompts", "33")


def test_missing_prompt_column(here):
    message = _refused("--dataset", "rows.jsonl", "--reward", "some_rewards:free")
    assert "question, answer" in message
    assert "--prompt-column" in message


def test_reward_is_needed_with_own_data(here):
    assert "--reward module:function" in _refused(*QUESTIONS)


def test_reward_needs_an_absent_column(here):
    message = _refused(*QUESTIONS, "--reward", "some_rewards:exact", "--eval-prompts", "0")
    assert "'exact' needs solution" in message
    assert "prompt, answer" in message


def test_reward_without_kwargs(here):
    message = _refused(*QUESTIONS, "--reward", "some_rewards:closed", "--eval-prompts", "0")
    assert "'closed' must accept **kwargs" in message
    assert "trainer_state" in message


def test_reward_names(here):
    with pytest.raises(ConfigurationError) as caught:
        load_rewards(["nowhere_at_all:f", "some_rewards:nothing", "some_rewards", "math:pi"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "no module named 'nowhere_at_all'" in lines[0]
    assert "exact, closed, free" in lines[1]
    assert "expected module:function" in lines[2]


def test_class_with_call_and_defaults_is_a_reward():
    class Scorer:
        def __call__(self, completions, threshold=0.5, **kwargs):
            return [0.0] * len(completions)

    check_rewards([Scorer()], ["prompt"])


def test_too_few_prompts(here):
    words = (*QUESTIONS, "--reward", "some_rewards:free")
    assert "40 different prompts" in _refused(*words)
    many = ("--per-device-train-batch-size", "512", "--eval-prompts", "0")
    assert "40 prompts are fewer than one generation batch" in _refused(*words, *many)


def test_builtin_model_reads_digits_only(here):
    rows = datasets.Dataset.from_dict({"prompt": ["1+1"] * 40})
    rows.to_json(here / "sums.json")
    words = ("--dataset", "sums.json", "--reward", "some_rewards:free", "--eval-prompts", "0")
    assert "reads only digits" in _refused(*words)
    assert train.prepare([*words, "--model", "another"]).run["model"] == "another"


def test_missing_files(here):
    assert "no file gone.jsonl" in _refused("--dataset", "gone.jsonl", "--reward", "math:cos")
    assert "no directory gone" in _refused("--resume-from-checkpoint", "gone")
    assert "no checkpoint" in _refused("--resume-from-checkpoint", ".")
    (here / "trainer_state.json").write_text('{"global_step": 7}')
    job = train.prepare(["--resume-from-checkpoint", ".", "--eval-prompts", "0"])
    assert checkpoint_step(job.config["resume_from_checkpoint"]) == 7


def test_errors_are_one_message_and_exit_code_two(here, capsys):
    (here / "run.yaml").write_text("num-epochs: 3\nprune_rato: 0.5\n")
    assert main(["train", "--config", "run.yaml", "--lr", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for name in ("num_train_epochs", "completion_prune_rate", "learning_rate"):
        assert f"did you mean {name}?" in captured.err
    assert "Traceback" not in captured.err


def test_hold_out_is_disjoint_seeded_and_by_prompt():
    prompts = [f"p{i % 50}" for i in range(100)]
    rows = datasets.Dataset.from_dict({"prompt": prompts, "row": list(range(100))})
    first, again = hold_out(rows, 20, seed=1), hold_out(rows, 20, seed=1)
    other = hold_out(rows, 20, seed=2)
    assert first.held_out["row"] == again.held_out["row"]
    assert first.held_out["row"] != other.held_out["row"]
    assert len(first.held_out) == len(set(first.held_out["prompt"])) == 20
    assert len(first.train) == 60
    assert not set(first.train["prompt"]) & set(first.held_out["prompt"])
    assert hold_out(rows, 0, seed=1).held_out is None


def test_prompt_column_replaces_a_former_one():
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "question": ["b"]})
    assert with_prompt_column(rows, "question").to_list() == [{"prompt": "b"}]


def test_bad_counts():
    options = {"prompt_column": "prompt", "num_prompts": None, "eval_prompts": 512, "seed": 0}
    for name, value in (("num_prompts", 0), ("eval_prompts", -1)):
        with pytest.raises(ConfigurationError, match=f"{name} is too small"):
            load_prompts("builtin", **{**options, name: value})
