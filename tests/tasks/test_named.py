"""Data sets by name: what a row is, where it comes from, and what is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("datasets")

from dppo.cli.data import load_prompts
from dppo.errors import ConfigurationError
from dppo.tasks.chat import conversation
from dppo.tasks.gym import reasoning_gym_reward
from dppo.tasks.named import NAMED, after_hashes, last_boxed, load_named

DATA = Path(__file__).parents[3] / "shared" / "data"
COUNTS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "amc23": 40, "minerva_math": 272}
COUNTS |= {"olympiadbench": 675}
copies = pytest.mark.skipif(not DATA.is_dir(), reason="no copies of the data beside the checkout")


@copies
def test_local_copies():
    for name, count in COUNTS.items():
        rows = load_named(name, split="test", data_dir=str(DATA))
        assert len(rows) == count
        assert rows.column_names == ["prompt", "answer"]
    assert len(load_named("gsm8k", split="train", data_dir=str(DATA))) == 7473
    assert load_named("gsm8k", split="train", data_dir=str(DATA))[0]["answer"] == "72"


@copies
def test_math_keeps_rows_whose_gold_is_missing(caplog):
    """Copies lack it in a few; such a row has no score, and is not left out in silence."""
    rows = load_named("math", split="train", data_dir=str(DATA))
    assert len(rows) == 7500
    missing = sum(answer == "" for answer in rows["answer"])
    assert 0 < missing < 10
    assert f"{missing} of 7500 rows of math" in caplog.text


@copies
def test_held_out_prompts_are_of_the_test_split():
    options = {"eval_prompts": 10, "seed": 0, "num_prompts": 20, "data_dir": str(DATA)}
    prompts = load_prompts("gsm8k", **options)
    assert (len(prompts.train), len(prompts.held_out)) == (20, 10)
    test = load_named("gsm8k", split="test", data_dir=str(DATA))["prompt"]
    system, user = prompts.held_out[0]["prompt"]
    assert system["role"] == "system"
    assert "\\boxed{}" in system["content"]
    assert user["content"] in test
    plain = load_prompts("gsm8k", **options, chat=False)
    assert isinstance(plain.train[0]["prompt"], str)


def test_gold_answers():
    assert after_hashes("a #### 1 #### 2,000") == "2000"
    assert last_boxed(r"\boxed{1} and $\boxed{\frac{1}{2}}$") == r"\frac{1}{2}"
    assert last_boxed(r"$\boxed 5$") == "5"
    assert last_boxed("none") == ""


def test_files_are_read_by_name(tmp_path):
    rows = [{"question": "1+1?", "answer": "so #### 2"}, {"question": "2+2?", "answer": "#### 4"}]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = load_named("gsm8k", split="test", data_dir=str(tmp_path))
    assert found[0] == {"prompt": "1+1?", "answer": "2"}
    with pytest.raises(ConfigurationError, match=r"no gsm8k_train .* there are gsm8k_test.jsonl"):
        load_named("gsm8k", split="train", data_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="aime24 is a benchmark"):
        load_named("aime24", split="train", data_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="there is no directory"):
        load_named("gsm8k", split="test", data_dir=str(tmp_path / "none"))
    (tmp_path / "amc23.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ConfigurationError, match="needs a column problem or question"):
        load_named("amc23", split="test", data_dir=str(tmp_path))


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"q": f"{i}?", "a": str(i)} for i in range(6)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"prompt_column": "q", "answer_column": "a", "eval_prompts": 2, "seed": 0}
    prompts = load_prompts(str(path), **options)
    assert len(prompts.train) == 4
    assert set(prompts.train.column_names) == {"prompt", "answer"}
    prompts = load_prompts(str(path), **options, system_prompt="Be brief.")
    assert [m["role"] for m in prompts.train[0]["prompt"]] == ["system", "user"]
    with pytest.raises(ConfigurationError, match="leave out --no-chat"):
        load_prompts(str(path), **options, system_prompt="x", chat=False)
    with pytest.raises(ConfigurationError, match="--answer-column NAME"):
        load_prompts(str(path), **{**options, "answer_column": "b"})


def test_conversations_keep_their_system_message():
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert conversation(own, "other") == own


def test_every_set_has_a_hub_name():
    assert set(NAMED) == {*COUNTS, "math"}
    assert all("/" in known.hub for known in NAMED.values())


def test_reasoning_gym_by_a_stub(monkeypatch):
    class Made:
        def __init__(self, size, seed):
            self.entries = [{"question": f"{i + seed}?", "answer": str(i)} for i in range(size)]

        def __getitem__(self, index):
            return self.entries[index]

        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else 0.01

    stub = SimpleNamespace(create_dataset=lambda task, size, seed: Made(size, seed))
    monkeypatch.setitem(sys.modules, "reasoning_gym", stub)
    prompts = load_prompts("reasoning-gym:sums", num_prompts=6, eval_prompts=2, seed=3)
    assert (len(prompts.train), len(prompts.held_out)) == (6, 2)
    row = {name: [value] for name, value in prompts.train[0].items() if name != "prompt"}
    right = row["answer"][0]
    for text, score in ((f"<answer> {right} </answer>", 1.0), (r"\boxed{99}", 0.01), (right, 1.0)):
        assert reasoning_gym_reward([text], **row) == [score]


def test_reasoning_gym_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationError, match="pip install reasoning-gym"):
        load_prompts("reasoning-gym:other", num_prompts=1, eval_prompts=0, seed=0)
