"""Checkpoints: what is in them, which of them is taken, and what a damaged one says."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dppo import _state_files as state_files
from dppo.errors import ConfigurationError, HostDriftError
from dppo.trl import pruning_state

from .conftest import Script, Watch, parameters, random_completions, trainer, watched
from .test_resume import TWO_STEPS, prepared, refused, trained

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def test_the_state_is_json_and_plain_arrays(tmp_path: Path) -> None:
    watched(trainer(tmp_path, completion_keep=0.25, seed=3, **SAVING)).check()
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        state = json.loads((folder / "dppo_state.json").read_text())
        assert state["generation"] == step
        assert state["pruner"]["seed"] == 3
        assert state["pruner"]["config"]["completion_keep"] == 0.25
        # Nothing of ours is pickled; the .pt and .pth files are the host's.
        ours = sorted(p.name for p in folder.iterdir() if "dppo" in p.name)
        assert ours == ["dppo_state.json", "dppo_state.npz"]
        with np.load(folder / "dppo_state.npz", allow_pickle=False) as arrays:
            assert all(arrays[name].dtype != object for name in arrays)


def test_no_state_is_written_when_nothing_is_decided(tmp_path: Path) -> None:
    trainer(tmp_path, completion_keep=1.0, packing="none", **SAVING).train()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not list(tmp_path.rglob("*dppo*"))


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
    folders = [tmp_path / f"checkpoint-{step}" for step in (2, 4, 6)]
    states = [json.loads((folder / "dppo_state.json").read_text()) for folder in folders]
    assert [s["generation"] for s in states] == [1, 1, 2]  # a generation serves 4 optimizer steps
    for folder, under_way in zip(folders, (True, False, True), strict=True):
        found = sorted(p.suffix for p in folder.glob("dppo_generation_0.*"))
        assert found == ([".json", ".npz"] if under_way else [])


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
    with pytest.raises(ConfigurationError, match="belongs to another run") as caught:
        trainer(tmp_path, **SAVING, **change).train(resume_from_checkpoint=True)
    assert named in str(caught.value)


def test_a_missing_state_is_remarked_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = {"completion_keep": 1.0, "packing": "none"}
    trainer(tmp_path, **off, **{**SAVING, "max_steps": 2}).train()
    resumed = trainer(tmp_path, **SAVING)
    watch = Watch(resumed)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        resumed.train(resume_from_checkpoint=True)
    assert "has no pruning state" in caplog.text
    assert [d.generation for d in watch.decisions] == [0, 1]
    assert resumed.state.global_step == 4


def test_an_unreadable_state_is_an_error(tmp_path: Path) -> None:
    """Whether it is no state, or a state of something else."""
    run = trainer(tmp_path)
    stem = tmp_path / "dppo_state"
    for tree in ({}, {"generation": "x", "phases": {}, "pruner": {}}, {"generation": 1}):
        state_files.write(stem, tree)
        with pytest.raises(ConfigurationError, match=r"dppo_state\.json cannot be read"):
            pruning_state.load(tmp_path, run)
    for content in ("", "[]", "{}"):
        stem.with_suffix(".json").write_text(content)
        with pytest.raises(ConfigurationError, match=r"dppo_state\.json cannot be read"):
            pruning_state.load(tmp_path, run)
    assert run._generation == 0


def test_the_state_survives_a_round_trip(tmp_path: Path) -> None:
    run, other = trainer(tmp_path), trainer(tmp_path)
    run._generation = 17
    pruning_state.save(tmp_path, run)
    assert not pruning_state.load(tmp_path, other).goes_on  # no generation is under way
    assert other._generation == 17
    assert other.pruner.state_dict() == run.pruner.state_dict()
    found = sorted(p.name for p in tmp_path.glob("*dppo*"))
    assert found == ["dppo_state.json", "dppo_state.npz"]


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


# -- which checkpoint ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generation of two steps is under way in checkpoints 1 and 3, not in 2."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder, **TWO_STEPS, max_steps=3)
    return folder


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


GOING_ON: dict[str, Any] = {**TWO_STEPS, "max_steps": 4, "save_strategy": "no"}


def cut_after_a_brace(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: text.index("}") + 1])


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: path.write_bytes(bytes(300)),
        lambda path: path.write_bytes(b"\xff" * 300),
        cut_after_a_brace,
    ],
)
def test_the_latest_complete_checkpoint_is_taken(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any]
) -> None:
    damage(folder / "checkpoint-3" / "trainer_state.json")
    (folder / "checkpoint-best").mkdir()  # no number
    run, seen = prepared(folder, **GOING_ON)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        run.train(resume_from_checkpoint=True)
    assert min(seen.pruner) == 3
    passed_over = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
    assert passed_over == [f"{folder / 'checkpoint-3'} was not saved to its end and is passed over"]


def test_checkpoints_are_ordered_by_number(folder: Path) -> None:
    (folder / "checkpoint-3").rename(folder / "checkpoint-10")
    run, seen = prepared(folder, **GOING_ON)
    run.train(resume_from_checkpoint=True)
    assert list(seen.pruner) == [4]


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    for path in (empty, other / "checkpoint-1"):
        path.mkdir(parents=True)
    for given, said in (
        (True, "no checkpoint to resume from"),
        (str(tmp_path / "nowhere"), "nowhere"),
        (str(empty), "empty has no complete trainer_state.json"),
        (str(other / "checkpoint-1"), "checkpoint-1 has no complete trainer_state.json"),
    ):
        run, seen = prepared(other, **GOING_ON)
        with pytest.raises(ConfigurationError, match=said):
            run.train(resume_from_checkpoint=given)
        assert not seen.rollouts


@pytest.mark.parametrize(
    ("configured", "passed", "first"),
    [
        ("true", None, 4),
        ("checkpoint-2", None, 3),
        ("checkpoint-2", "checkpoint-3", 4),
        ("checkpoint-3", True, 4),
        ("checkpoint-3", False, 1),
        ("false", None, 1),
        (None, None, 1),
        (None, Path("checkpoint-2"), 3),
    ],
)
def test_the_configuration_says_where_to_resume_unless_train_is_told(
    folder: Path, configured: str | None, passed: Any, first: int
) -> None:
    if configured is not None and configured.startswith("checkpoint"):
        configured = str(folder / configured)
    if isinstance(passed, Path):
        passed = folder / passed
    elif isinstance(passed, str):
        passed = str(folder / passed)
    run, seen = prepared(folder, **GOING_ON, resume_from_checkpoint=configured)
    run.train(**({} if passed is None else {"resume_from_checkpoint": passed}))
    assert list(seen.pruner) == list(range(first, 5))


# -- damaged files ---------------------------------------------------------------------------------


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def another(path: Path) -> None:
    """Of another save of the same run."""
    shutil.copy(path.parents[1] / "checkpoint-3" / path.name, path)


def other_number(path: Path) -> None:
    """Still JSON."""
    text = path.read_text()
    path.write_text(text.replace('"generation": ', '"generation": 1'))
    assert path.read_text() != text


@pytest.mark.parametrize("damage", [half, another, other_number, lambda p: p.write_text("")])
@pytest.mark.parametrize("name", ["dppo_state", "dppo_generation_0"])
def test_a_damaged_json_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    damage(folder / "checkpoint-1" / f"{name}.json")
    message = refused(folder / "checkpoint-1", tmp_path, **GOING_ON)
    assert f"checkpoint-1/{name}.json cannot be read" in message


@pytest.mark.parametrize("damage", [half, another, Path.unlink, lambda p: p.write_text("")])
@pytest.mark.parametrize("name", ["dppo_state", "dppo_generation_0"])
def test_so_are_damaged_arrays(
    folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    damage(folder / "checkpoint-1" / f"{name}.npz")
    message = refused(folder / "checkpoint-1", tmp_path, **GOING_ON)
    assert f"checkpoint-1/{name}.json cannot be read" in message


def test_a_missing_generation_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoint-1" / "dppo_generation_0.json").unlink()
    message = refused(folder / "checkpoint-1", tmp_path, **GOING_ON)
    assert "checkpoint-1/dppo_generation_0.json" in message
    # Where none is under way, none is missed.
    assert list(trained(tmp_path, folder / "checkpoint-2", **GOING_ON).pruner) == [3, 4]


def test_without_its_state_a_pruned_run_goes_on_anew(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also within a generation; its number and its draws begin at 0."""
    for step in (1, 2):
        (folder / f"checkpoint-{step}" / "dppo_state.json").unlink()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dppo"):
            seen = trained(tmp_path, folder / f"checkpoint-{step}", **GOING_ON)
        assert f"checkpoint-{step} has no pruning state" in caplog.text
        assert list(seen.pruner) == list(range(step + 1, 5))
        assert min(seen.decisions) == 0


# -- the files themselves --------------------------------------------------------------------------


def tree() -> dict[str, Any]:
    return {
        "nothing": None,
        "numbers": [1, -0.1, float("inf"), True, False],
        "text": "å",
        "empty": {"list": [], "dict": {}, "array": np.empty((0, 3), np.float32)},
        "tensors": {
            "bf16": torch.tensor([[1.5, -2e-30], [float("inf"), 0]], dtype=torch.bfloat16),
            "float32": torch.tensor([0.1, float("nan")]),
            "int64": torch.tensor(2**62 + 1),
            "bool": torch.tensor([[True], [False]]),
            "turned": torch.arange(6).reshape(2, 3).T,
            "needs gradient": torch.ones(2, requires_grad=True),
            "bf16 scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        },
        "list": [[np.array([1, 2], np.uint64), None], {"a": np.array(True)}, [torch.ones(1)]],
        # Names that could be taken for something else.
        "a": {"b": np.arange(3)},
        "a/b": np.arange(4),
        "array": "a",
        "alone": {"array": "a/b"},
        "alone too": {"tensor": 1, "dtype": 2},
        "belongs_to": np.arange(2),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(
            found, expected.detach(), rtol=0, atol=0, equal_nan=True, check_stride=False
        )
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, strict=True)
    else:
        assert found == expected


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    state_files.write(tmp_path / "state", tree())
    assert_same(state_files.read(tmp_path / "state"), tree())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "state.npz"]
    json.loads((tmp_path / "state.json").read_text())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays)


def test_what_was_read_can_be_written_to(tmp_path: Path) -> None:
    """History and batch are updated in place."""
    state_files.write(tmp_path / "state", {"array": np.zeros(2), "tensor": torch.zeros(2)})
    found = state_files.read(tmp_path / "state")
    found["array"] += 1
    found["tensor"] += 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.array([None, {}], dtype=object), "ndarray"),
        (object(), "object"),
        ({1, 2}, "set"),
        (Path("x"), "Path"),
        (np.int64(3), "int64"),
    ],
)
def test_what_would_need_pickle_is_refused_by_name(tmp_path: Path, value: Any, kind: str) -> None:
    with pytest.raises(HostDriftError, match=rf"^batch/images/1 is a \w*{kind}"):
        state_files.write(tmp_path / "state", {"batch": {"images": [1, value]}})
    assert not list(tmp_path.iterdir())


def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """JSON would make a text of it."""
    with pytest.raises(HostDriftError, match="batch"):
        state_files.write(tmp_path / "state", {"batch": {1: 2}})


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = tmp_path / "state"
    state_files.write(stem, {"a": np.arange(3), "b": 1})

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"PK")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        state_files.write(stem, {"a": np.arange(4), "b": 2})
    monkeypatch.undo()
    assert_same(state_files.read(stem), {"a": np.arange(3), "b": 1})
    state_files.write(stem, {"a": np.arange(4), "b": 2})  # whatever was left half done
    assert_same(state_files.read(stem), {"a": np.arange(4), "b": 2})


def test_a_write_that_ends_between_its_files_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays are new, the text is not."""
    stem = tmp_path / "state"
    state_files.write(stem, {"a": np.arange(3), "b": 1})
    monkeypatch.setattr(np, "savez", _then_fail(np.savez))
    with pytest.raises(KeyboardInterrupt):
        state_files.write(stem, {"a": np.arange(4), "b": 2})
    with pytest.raises(ConfigurationError, match=r"state\.json cannot be read"):
        state_files.read(stem)


def _then_fail(savez: Any) -> Any:
    def saved(file: Any, **options: Any) -> None:
        savez(file, **options)
        file.flush()
        shutil.copy(file.name, file.name.removesuffix(".tmp"))
        raise KeyboardInterrupt

    return saved
