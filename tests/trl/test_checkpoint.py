"""Checkpoints: the draws go on where they were, another configuration is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dppo.errors import ConfigurationError
from dppo.trl import pruning_state

from .conftest import Script, Watch, parameters, random_completions, trainer, watched

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def test_the_state_is_plain_json(tmp_path: Path) -> None:
    watched(trainer(tmp_path, completion_keep=0.25, seed=3, **SAVING)).check()
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        state = json.loads((folder / "dppo_state.json").read_text())
        assert state["generation"] == step
        assert state["pruner"]["seed"] == 3
        assert state["pruner"]["config"]["completion_keep"] == 0.25
        # Nothing of ours is pickled; the .pt and .pth files are the host's.
        ours = sorted(p.name for p in folder.iterdir() if "dppo" in p.name)
        assert ours == ["dppo_state.json"]


def test_no_state_is_written_when_nothing_is_decided(tmp_path: Path) -> None:
    trainer(tmp_path, completion_keep=1.0, **SAVING).train()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not list(tmp_path.rglob("dppo_state.json"))


def test_a_resumed_run_draws_what_the_whole_run_drew(tmp_path: Path) -> None:
    """Completions are prepared, so that only the draws could differ."""
    generations = [random_completions(8, seed=seed) for seed in range(4)]
    whole = watched(trainer(tmp_path / "whole", rollout_func=Script(*generations), **SAVING))
    resumed = trainer(tmp_path / "resumed", rollout_func=Script(*generations[2:]), **SAVING)
    watch = Watch(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [d.generation for d in whole.decisions] == [0, 1, 2, 3]
    assert [d.generation for d in watch.decisions] == [2, 3]
    for one, other in zip(whole.decisions[2:], watch.decisions, strict=True):
        assert (one.choices[0].kept == other.choices[0].kept).all()
        assert (one.micro_step_N == other.micro_step_N).all()
    expected, found = parameters(whole.trainer.model), parameters(resumed.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_several_steps_of_a_generation_count_it_once(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        num_iterations=2,
        steps_per_generation=4,
        **{**SAVING, "max_steps": 6, "save_steps": 2},
    )
    watched(run).check()
    counters = [
        json.loads((tmp_path / f"checkpoint-{step}" / "dppo_state.json").read_text())["generation"]
        for step in (2, 4, 6)
    ]
    assert counters == [1, 1, 2]  # a generation serves 4 optimizer steps


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"completion_keep": 0.25}, "completion_keep 0.5 -> 0.25"),
        ({"completion_rule": "uniform"}, "completion_rule 'proportional' -> 'uniform'"),
        ({"seed": 7}, "seed 42 -> 7"),
    ],
)
def test_another_configuration_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    trainer(tmp_path, **SAVING).train()
    with pytest.raises(ConfigurationError, match="belongs to another configuration") as caught:
        trainer(tmp_path, **SAVING, **change).train(resume_from_checkpoint=True)
    assert named in str(caught.value)


def test_a_missing_state_is_remarked_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, completion_keep=1.0, **{**SAVING, "max_steps": 2}).train()
    resumed = trainer(tmp_path, **SAVING)
    watch = Watch(resumed)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        resumed.train(resume_from_checkpoint=True)
    assert "has no pruning state" in caplog.text
    assert [d.generation for d in watch.decisions] == [0, 1]
    assert resumed.state.global_step == 4


def test_an_unreadable_state_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    for content in ("", "[]", "{}", '{"generation": "x", "pruner": {}}'):
        (tmp_path / "dppo_state.json").write_text(content)
        with pytest.raises(ConfigurationError, match="cannot be read"):
            pruning_state.load(tmp_path, pruner=run.pruner)


def test_the_state_survives_a_round_trip(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    pruning_state.save(tmp_path, pruner=run.pruner, generation=17)
    assert pruning_state.load(tmp_path, pruner=run.pruner) == 17
    assert [p.name for p in tmp_path.glob("dppo_state*")] == ["dppo_state.json"]


def test_the_model_card_names_method_and_paper(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    run.train()
    card = (tmp_path / "README.md").read_text()
    assert "DPPO" in card
    assert "Dynamic Pruning Policy Optimization" in card
    assert "2603.04135" in card
    assert "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" in card
    header = card.split("---")[1]
    assert all(f"- {tag}\n" in header for tag in ("trl", "dppo"))
