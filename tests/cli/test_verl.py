"""`dppo verl`, and what of `dppo.verl` runs without verl: rewards and saved state."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the trl extra is not installed")

import dppo
from dppo.cli.main import main
from dppo.errors import ConfigurationError
from dppo.estimator.keep_rate import KeepRate
from dppo.verl import state
from dppo.verl.rewards import compute_score


def test_data_in_verls_layout_and_a_model_that_verl_takes(tmp_path: Path, capsys) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    options = ["--num-prompts", "20", "--eval-prompts", "5", "--output-dir", str(tmp_path)]
    assert main(["verl", "data", *options]) == 0
    assert "train.parquet: 20 rows" in capsys.readouterr().out
    for split, count in (("train", 20), ("test", 5)):
        file = str(tmp_path / f"{split}.parquet")
        rows = load_dataset("parquet", data_files=file, split="train")
        assert len(rows) == count
        assert [row["extra_info"]["index"] for row in rows] == list(range(count))
        row = rows[0]
        assert row["data_source"] == "dppo/sorting"
        assert row["prompt"][0]["role"] == "user"
        digits = row["prompt"][0]["content"].rstrip("=")
        assert row["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(digits))}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("\n", add_special_tokens=False) == [0]
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 1
    chat = [{"role": "user", "content": "31="}]
    assert (
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        == (tokenizer("31=")["input_ids"])
    )


def test_a_file_needs_answers(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}?", "solution": "1"}) for i in range(4)))
    given = ["verl", "data", "--dataset", str(file), "--eval-prompts", "0"]
    given += ["--output-dir", str(tmp_path / "out")]
    assert main(given) == 2
    assert "no column 'answer'" in capsys.readouterr().err
    assert main([*given, "--answer-column", "solution"]) == 0
    assert main(["verl", "data", "--learning-rate", "1"]) == 2
    assert main(["verl"]) == 2
    assert "takes `data [options]` or `summary FOLDER`" in capsys.readouterr().err


def test_the_summary_adds_steps_up(tmp_path: Path, capsys) -> None:
    step = {
        "dppo/tokens/generated": 100.0,
        "dppo/tokens/trained": 40.0,
        "dppo/prompts/candidates": 32,
        "dppo/prompts/rolled_out": 24,
        "dppo/weight/ess": 0.9,
        "dppo/time/rollout": 2.0,
        "dppo/time/train": 1.0,
        "timing_s/step": 4.0,
    }
    logs = [{"step": 0, "data": {"val/x": 1.0}}, *({"step": n, "data": step} for n in (1, 2))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, logs)))
    (tmp_path / "validation").mkdir()
    for number, scores in ((0, [0, 1]), (10, [1, 1]), (5, [0, 0])):
        lines = "\n".join(json.dumps({"score": score}) for score in scores)
        (tmp_path / "validation" / f"{number}.jsonl").write_text(lines)
    assert main(["verl", "summary", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "before 0.500 ± 0.500, after 1.000 ± 0.000" in out
    assert "200 completion tokens generated, 80 trained (40.0%)" in out
    assert "48 rolled out of 64 candidates (75.0%)" in out
    assert "rollout 4.0 s (67%)" in out
    shadow = {"step": 3, "data": {**step, "actor/pg_loss": 0.1}}  # trained on everything
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*logs, shadow])))
    assert main(["verl", "summary", str(tmp_path)]) == 0
    assert "300 completion tokens generated, 180 trained (60.0%)" in capsys.readouterr().out
    assert main(["verl", "summary", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "metrics.jsonl").write_text(json.dumps(logs[0]))
    assert main(["verl", "summary", str(tmp_path)]) == 2
    assert "no step of trainer mode prune_sync" in capsys.readouterr().err


def test_rewards_are_those_of_the_task() -> None:
    assert compute_score("dppo/sorting", "113", "113") == 1.0
    assert compute_score("dppo/sorting", "131", "113") < 1.0
    assert compute_score("dppo/gsm8k", "so it is \\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert compute_score("dppo/gsm8k", "I do not know", "0.5") == 0.0
    with pytest.raises(ValueError, match="cannot be read"):
        compute_score("dppo/gsm8k", "1", "")


SETTINGS: dict[str, Any] = {"data": "8 rows, abc", "data.train_batch_size": 8}


def test_state_comes_back_and_another_run_is_refused(tmp_path: Path) -> None:
    config = dppo.PruneConfig(prompt_keep=0.5)
    pruner, auto = dppo.Pruner(config, seed=0), KeepRate()
    assert not state.load(tmp_path, pruner=pruner, auto=auto, settings=SETTINGS)
    ids = [state.prompt_id([{"role": "user", "content": f"{n}"}]) for n in range(8)]
    pruner.select_prompts(ids, count=4, step=1, keep=0.5)
    pruner.observe(ids[:4], [[1.0, 0.0]] * 4, step=1)
    auto.at(7)
    state.save(tmp_path, pruner=pruner, auto=auto, settings=SETTINGS)
    again, auto_again = dppo.Pruner(config, seed=0), KeepRate()
    assert state.load(tmp_path, pruner=again, auto=auto_again, settings=SETTINGS)
    assert auto_again.state_dict() == auto.state_dict()
    drawn = [p.select_prompts(ids, count=4, step=2, keep=0.5).pi.tolist() for p in (pruner, again)]
    assert drawn[0] == drawn[1]
    other = {**SETTINGS, "data.train_batch_size": 16}
    with pytest.raises(ConfigurationError, match=r"data\.train_batch_size 8 -> 16"):
        state.load(tmp_path, pruner=again, auto=None, settings=other)
    seeded = dppo.Pruner(config, seed=1)
    with pytest.raises(ConfigurationError, match="seed"):
        state.load(tmp_path, pruner=seeded, auto=None, settings=SETTINGS)


def test_a_prompt_has_one_id_in_whatever_it_comes() -> None:
    import numpy as np

    one = [{"role": "user", "content": "2+2?"}]
    boxed = np.empty(1, dtype=object)
    boxed[0] = {"content": "2+2?", "role": "user"}
    assert state.prompt_id(one) == state.prompt_id(boxed) == state.prompt_id(tuple(one))
    assert state.prompt_id(one) != state.prompt_id([{"role": "user", "content": "2+3?"}])
    assert 0 <= state.prompt_id(one) < 2**63


def test_an_image_is_known_by_its_pixels() -> None:
    from PIL import Image

    def prompt(shade: int) -> list[dict[str, Any]]:
        image = Image.new("L", (2, 2), color=shade)
        return [{"role": "user", "content": [{"type": "image", "image": image}]}]

    assert state.prompt_id(prompt(7)) == state.prompt_id(prompt(7))
    assert state.prompt_id(prompt(7)) != state.prompt_id(prompt(8))
    assert state.prompt_id([{"image": b"7"}]) != state.prompt_id([{"image": b"8"}])
    with pytest.raises(ConfigurationError, match=r"builtins\.object.* prune\.prompt_keep=1\.0"):
        state.prompt_id([{"image": object()}])
