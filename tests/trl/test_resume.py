"""Going on from a checkpoint: nothing of the run changes, and nothing else is gone on with.

Equal means bit-equal: a resumed run makes the same calls with the same numbers.
"""

import dataclasses
import gc
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from dppo import _state_files as state_files
from dppo.errors import ConfigurationError
from dppo.tasks import sorting_dataset
from dppo.trl import pruning_state, resume

from .conftest import parameters, tiny_model, trainer

HALF: dict[str, Any] = {
    "prompt_keep": 0.5,
    "allow_single_epoch": True,
    "max_steps": 2,
    "seed": 3,
    "save_strategy": "steps",
    "save_steps": 1,
}
"""2 of 4 candidates x 4 completions a generation; all is saved after every step."""

TWO_STEPS: dict[str, Any] = {"steps_per_generation": 4}
"""A generation (4 of 8 candidates) serves two optimizer steps."""

FOUR_STEPS: dict[str, Any] = {**TWO_STEPS, "num_iterations": 2}
"""It serves four, in two passes."""

TIMES = ("step_time", "dppo/time/", "dppo/efficiency/")


class Seen(TrainerCallback):
    """What a run does, by generation and by optimizer step."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.prompts: dict[int, list[str]] = {}
        self.decisions: dict[int, dict[str, Any]] = {}
        self.rollouts: Counter[int] = Counter()
        self.pruner: dict[int, dict[str, Any]] = {}
        generate, decide = run._generate, run._decision_on

        def generated(prompts: list[str]) -> Any:
            self.prompts[run._generation] = list(prompts)
            self.rollouts[run.state.global_step + 1] += 1
            return generate(prompts)

        def decided(basis: Any, window: Any) -> Any:
            decision = decide(basis, window)
            self.decisions[decision.generation] = {
                "kept": [c.kept for c in decision.choices],
                "pi": [c.pi for c in decision.choices],
                "window": None if window is None else window.to_dict(),
                "segments": list(decision.segments),
            }
            return decision

        run._generate, run._decision_on = generated, decided
        run.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pruner[state.global_step] = self.run.pruner.state_dict()

    @property
    def logs(self) -> dict[int, dict[str, Any]]:
        """By step, times set to 0; the host restores those before the checkpoint."""
        return {
            log["step"]: {key: 0 if key.startswith(TIMES) else log[key] for key in log}
            for log in self.run.state.log_history
            if "loss" in log
        }


def prepared(folder: Path, **options: Any) -> tuple[Any, Seen]:
    data = {"train_dataset": sorting_dataset(18, seed=0)}
    run = trainer(folder, **{**data, **HALF, **options})
    return run, Seen(run)


def trained(folder: Path, resume: Path | str | None = None, **options: Any) -> Seen:
    run, seen = prepared(folder, **options)
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    return seen


def same_parameters(one: Any, other: Any) -> bool:
    expected, found = parameters(one.run.model), parameters(other.run.model)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def refused(checkpoint: Path, folder: Path, **options: Any) -> str:
    """The message, after checking that nothing has been rolled out or trained."""
    run, seen = prepared(folder, **options)
    with pytest.raises(ConfigurationError) as caught:
        run.train(resume_from_checkpoint=str(checkpoint))
    assert not seen.rollouts
    assert not seen.pruner  # no step ended
    return str(caught.value)


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """The host collects garbage before every run, through all that was ever imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a run that was saved after each of its steps, trained once per configuration."""
    folders: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("saved")
            trained(folders[key], **options)
        return folders[key]

    return folder


# -- exactly ---------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    # Options; saved steps and how many generations the step after each rolls out.
    # 4 steps an epoch.
    "a generation a step": ({"max_steps": 7}, {1: 1, 4: 1, 6: 1}),
    # 2 generations of 4 steps an epoch.
    "several steps a generation": ({**FOUR_STEPS, "max_steps": 10}, {1: 0, 4: 1, 9: 0}),
    "packed, pruning off": (
        {**FOUR_STEPS, "completion_keep": 1.0, "packing": "auto", "max_steps": 10},
        {1: 0, 4: 1, 9: 0},
    ),
    # 3 generations of 3 batches an epoch, 2 batches a step.
    "a step across generations": (
        {"steps_per_generation": 3, "max_steps": 8},
        {1: 1, 2: 0, 6: 1},
    ),
    # 9 generations of one batch an epoch, 2 batches a step.
    "several generations a step": ({"steps_per_generation": 1, "max_steps": 7}, {1: 2, 6: 2}),
    # 2 generations of 4 steps an epoch.
    "completions only": (
        {
            **FOUR_STEPS,
            "prompt_keep": 1.0,
            "max_steps": 11,
            "train_dataset": sorting_dataset(9, seed=0),
        },
        {3: 0, 8: 1, 10: 0},
    ),
    "old and reference passes": ({**FOUR_STEPS, "beta": 0.04, "max_steps": 10}, {2: 0, 9: 0}),
    "a loader with a worker": ({"dataloader_num_workers": 1, "max_steps": 6}, {1: 1, 5: 1}),
    "a stream": (
        {"max_steps": 6, "train_dataset": sorting_dataset(18, seed=0).to_iterable_dataset()},
        {5: 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    options, steps = CASES[name]
    if "beta" in options:  # the host loads the reference by the name of the model
        tiny_model().save_pretrained(tmp_path / "model")
        options = {**options, "model": str(tmp_path / "model")}
    whole = trained(tmp_path / "whole", **options)
    known = whole.pruner[options["max_steps"]].get("prompts")
    assert (known is None) == ("prompt_keep" in options)
    assert known is None or len(known["history"]["keys"]) > 4  # there is something to restore
    for step, rollouts in steps.items():
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        resumed = trained(tmp_path / "resumed", checkpoint, **{**options, "save_strategy": "no"})
        assert same_parameters(resumed, whole)
        # What has been rolled out is not rolled out again.
        assert resumed.rollouts[step + 1] == rollouts
        assert resumed.rollouts == {s: n for s, n in whole.rollouts.items() if s > step}
        before = sum(count for s, count in whole.rollouts.items() if s <= step)
        assert resumed.prompts == {g: p for g, p in whole.prompts.items() if g >= before}
        under_way = (checkpoint / "dppo_generation_0.json").exists()
        assert min(resumed.decisions) == before - under_way
        for generation, decision in resumed.decisions.items():
            np.testing.assert_equal(decision, whole.decisions[generation])
        # Learning rates, losses, estimates, history: whatever is logged and known.
        np.testing.assert_equal(resumed.logs, whole.logs)
        assert min(resumed.pruner) == step + 1
        for number, state in resumed.pruner.items():
            np.testing.assert_equal(state, whole.pruner[number])


def test_control_without_its_buffered_generation_a_run_ends_elsewhere(
    tmp_path: Path, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(**FOUR_STEPS, prompt_keep=1.0, max_steps=3) / "checkpoint-1"
    exact = trained(tmp_path / "exact", checkpoint, **FOUR_STEPS, prompt_keep=1.0, max_steps=3)
    load = pruning_state.load
    monkeypatch.setattr(
        pruning_state, "load", lambda *given: dataclasses.replace(load(*given), goes_on=False)
    )
    control = trained(tmp_path / "other", checkpoint, **FOUR_STEPS, prompt_keep=1.0, max_steps=3)
    assert (exact.rollouts[2], control.rollouts[2]) == (0, 1)
    assert not same_parameters(control, exact)


def test_control_the_hosts_sampler_would_start_with_its_first_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only completions are pruned, a later epoch has the order it had all the same."""
    options = {
        "prompt_keep": 1.0,
        "max_steps": 6,
        "train_dataset": sorting_dataset(8, seed=0),  # 4 generations an epoch
    }
    whole = trained(tmp_path / "whole", **options)
    assert whole.prompts[1] != whole.prompts[5]
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    assert trained(tmp_path / "again", checkpoint, **options).prompts == {5: whole.prompts[5]}
    monkeypatch.setattr(resume, "_catch_up", lambda *given: None)
    assert trained(tmp_path / "control", checkpoint, **options).prompts == {5: whole.prompts[1]}


# -- switched on or off ----------------------------------------------------------------------------

ON: dict[str, Any] = {**TWO_STEPS, "completion_keep": 0.5, "prompt_keep": 0.5}
OFF: dict[str, Any] = {"completion_keep": 1.0, "prompt_keep": 1.0}
NO_STATE = "has no pruning state: the run was not pruned until here"
UNIFORM = "nothing is known of any prompt yet"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"prompt_keep": 1.0}, {}, ["of prompts: off until here, on now", UNIFORM]),
        ({}, {"prompt_keep": 1.0}, ["of prompts: on until here, off now"]),
        ({"completion_keep": 1.0}, {}, ["of completions: off until here, on now"]),
        ({}, {"completion_keep": 1.0}, ["of completions: on until here, off now"]),
        ({**OFF, "packing": "none"}, {"prompt_keep": 1.0}, [NO_STATE]),
        ({**OFF, "packing": "none"}, {}, [NO_STATE]),
        (OFF, {"prompt_keep": 1.0}, ["of completions: off until here, on now"]),
        (
            {"prompt_keep": 1.0},
            {"completion_keep": 1.0, "prompt_keep": 1.0},
            ["of completions: on until here, off now"],
        ),
        (
            {"completion_keep": "shadow", "prompt_keep": 1.0},
            {"prompt_keep": 1.0},
            ["of completions: in shadow mode until here, on now"],
        ),
    ],
)
def test_a_phase_is_switched_between_and_within_generations(  # noqa: PLR0917 - fixtures
    tmp_path: Path,
    saved: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    before: dict[str, Any],
    after: dict[str, Any],
    said: list[str],
) -> None:
    folder = saved(**{**ON, **before})
    for step in (1, 2):  # a generation serves two
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dppo"):
            run, seen = prepared(tmp_path, **{**ON, **after, "max_steps": 5, "save_strategy": "no"})
            start = parameters(run.model)
            run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        remarks = [r.getMessage() for r in caplog.records if "pruning_state" in r.name]
        assert len(remarks) == len(said)
        assert all(part in remark for part, remark in zip(said, remarks, strict=True))
        assert run.state.global_step == 5
        ended = parameters(run.model)
        assert all(torch.isfinite(p).all() for p in ended.values())
        assert any(not torch.equal(p, start[name]) for name, p in ended.items())
        assert seen.decisions
        # Generations have numbers of their own, however many were rolled out before.
        numbers = list(seen.decisions)
        assert numbers == list(range(min(numbers, default=0), max(numbers, default=-1) + 1))
        assert min(numbers, default=0) == 0 if NO_STATE in said else min(numbers, default=1) >= 1
        windows = [d["window"] is not None for d in seen.decisions.values()]
        assert all(drawn == ({**ON, **after}["prompt_keep"] != 1) for drawn in windows)


def test_a_switch_draws_anew_what_the_loader_had_drawn_ahead(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """The generation under way is given up; windows that wait behind it are of other places."""
    options = {**TWO_STEPS, "dataloader_num_workers": 1, "max_steps": 3}
    checkpoint = saved(**options) / "checkpoint-1"
    waiting = [w["generation"] for w in state_files.read(checkpoint / "dppo_state")["windows"]]
    assert waiting == [0, 1]
    seen = trained(tmp_path, checkpoint, **options, completion_keep=1.0)
    assert min(seen.decisions) > 1
    assert sorted(seen.pruner) == [2, 3]


def test_a_generation_rolled_out_anew_is_cut_where_its_steps_close(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """Of a generation's 3 batches one is over after two steps of 2; the other two are the third."""
    options = {"completion_keep": 1.0, "prompt_keep": 1.0, "steps_per_generation": 3}
    checkpoint = saved(**options) / "checkpoint-2"
    seen = trained(tmp_path, checkpoint, **{**options, "completion_keep": 0.5, "max_steps": 4})
    cuts = [[(s.first, s.last) for s in d["segments"]] for d in seen.decisions.values()]
    assert cuts == [[(0, 1), (1, 3)], [(0, 2), (2, 3)]]


# -- another run -----------------------------------------------------------------------------------

GENERATION_ROWS, STEP_ROWS = pruning_state.GENERATION_ROWS, pruning_state.STEP_ROWS

OTHER: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dataset": ({"train_dataset": sorting_dataset(18, seed=1)}, {"train_dataset"}),
    "more prompts": ({"train_dataset": sorting_dataset(19, seed=0)}, {"train_dataset"}),
    "order": (
        {"train_dataset": sorting_dataset(18, seed=0).select(range(17, -1, -1))},
        {"train_dataset"},
    ),
    "data_seed": ({"data_seed": 6}, {"order of the prompts (data_seed, or seed)"}),
    "seed": ({"seed": 4}, {"seed"}),
    "not shuffled": ({"shuffle_dataset": False}, {"shuffle_dataset"}),
    "group": ({"num_generations": 2}, {"num_generations"}),
    "micro-batch": ({"per_device_train_batch_size": 8}, {STEP_ROWS, GENERATION_ROWS}),
    "more accumulation": ({"gradient_accumulation_steps": 4}, {STEP_ROWS, GENERATION_ROWS}),
    "prompt_keep": ({"prompt_keep": 0.4}, {"prompt_keep"}),
    "prompt_rule": ({"prompt_rule": "uniform"}, {"prompt_rule"}),
    "prompt_prune_rate": ({"prompt_prune_rate": 0.4}, {"prompt_prune_rate"}),
    "prompt_id_column": (
        {"prompt_id_column": "prompt", "remove_unused_columns": False},
        {"prompt_id_column"},
    ),
    "completion_keep": ({"completion_keep": 0.4}, {"completion_keep"}),
    "sampling_design": ({"sampling_design": "poisson"}, {"sampling_design"}),
    "generation": ({"steps_per_generation": 4}, {GENERATION_ROWS}),
    "passes": ({"num_iterations": 2}, {"num_iterations"}),
    "scale_rewards": ({"scale_rewards": "none"}, {"scale_rewards"}),
    "two": ({"num_generations": 2, "prompt_keep": 0.4}, {"num_generations", "prompt_keep"}),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_changed_is_named_and_nothing_else(
    tmp_path: Path, saved: Callable[..., Path], name: str
) -> None:
    changed, named = OTHER[name]
    checkpoint = saved(data_seed=5) / "checkpoint-2"
    run, _ = prepared(tmp_path, **{"data_seed": 5, **changed})
    with pytest.raises(ConfigurationError) as caught:
        pruning_state.load(checkpoint, run)
    begin, _, rest = str(caught.value).partition(" belongs to another run: ")
    assert begin == str(checkpoint)
    changes = rest.partition(". Restore what changed")[0].split("; ")
    told = [re.fullmatch(r"(.*?) ('[^']*'|\S+) -> ('[^']*'|\S+)", change) for change in changes]
    assert {match and match[1] for match in told} == named


def test_the_same_batch_in_other_micro_batches_goes_on(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """Inside a generation: what counts are the rows of a step and of a generation."""
    options = {**FOUR_STEPS, "max_steps": 4}
    checkpoint = saved(**options) / "checkpoint-3"
    whole = trained(tmp_path / "same", checkpoint, **options)
    for rows, accumulation in ((8, 1), (2, 4)):
        other = {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": 2 * accumulation,
        }
        found = trained(tmp_path / f"{rows}", checkpoint, **{**options, **other})
        assert not found.rollouts
        for generation, decision in whole.decisions.items():
            for name in ("kept", "pi"):
                np.testing.assert_array_equal(found.decisions[generation][name], decision[name])
        expected = parameters(whole.run.model)
        for name, value in parameters(found.run.model).items():
            # Only the order of float32 sums differs; Adam makes steps of it.
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4)


def test_another_lag_is_named_by_the_options_that_it_follows_from(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    run, _ = prepared(tmp_path, data_seed=5, dataloader_num_workers=1)
    with pytest.raises(ConfigurationError, match="dataloader_num_workers"):
        pruning_state.load(saved(data_seed=5) / "checkpoint-2", run)


def test_another_run_is_refused_before_it_trains(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """Also where a generation is under way, which would need no rollout."""
    other = {"train_dataset": sorting_dataset(18, seed=1)}
    for options, step in (({}, 2), (TWO_STEPS, 1)):
        checkpoint = saved(**options) / f"checkpoint-{step}"
        message = refused(checkpoint, tmp_path, **options, **other, max_steps=4)
        assert "belongs to another run: train_dataset '18 rows, " in message


def test_training_on_is_not_a_change(tmp_path: Path, saved: Callable[..., Path]) -> None:
    checkpoint = saved(data_seed=5) / "checkpoint-2"
    longer = {"max_steps": 5, "learning_rate": 1e-3, "save_strategy": "no", "logging_steps": 2}
    seen = trained(tmp_path, checkpoint, data_seed=5, **longer)
    assert sorted(seen.pruner) == [3, 4, 5]
    assert sorted(seen.decisions) == [2, 3, 4]


def test_a_stream_in_another_order_is_refused(tmp_path: Path, saved: Callable[..., Path]) -> None:
    prompts = sorting_dataset(18, seed=0)
    options = {"shuffle_dataset": False, "max_steps": 3}
    checkpoint = saved(**options, train_dataset=prompts.to_iterable_dataset()) / "checkpoint-2"
    turned = prompts.select(range(17, -1, -1)).to_iterable_dataset()
    assert "the order in which it streams" in refused(
        checkpoint, tmp_path, **options, train_dataset=turned
    )


def test_annealing_moves_with_the_end_of_training(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """A window that was drawn is rolled out as it was, with the probabilities that it had."""
    options = {"prune_until": 0.5, "max_steps": 6, "data_seed": 5}
    for step in (2, 5):
        checkpoint = saved(**options) / f"checkpoint-{step}"
        seen = trained(tmp_path, checkpoint, **{**options, "max_steps": 12})
        candidates = {g: len(d["window"]["ids"]) for g, d in seen.decisions.items()}
        # Four of which two are drawn, until the middle of the longer run; the fifth was drawn.
        expected = {g: 4 if g < 6 else 2 for g in range(step, 12)}
        assert candidates == {**expected, step: 4 if step < 3 else 2}


# -- again and again -------------------------------------------------------------------------------


def test_whoever_looks_at_the_loader_changes_nothing(tmp_path: Path) -> None:
    options = {"max_steps": 5, "save_strategy": "no"}
    plain = trained(tmp_path, **options)
    run, seen = prepared(tmp_path, **options)
    with torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
        for _ in range(2):
            assert len(list(run.get_train_dataloader())) == 8  # 4 generations of 2 batches
    run.train()
    assert seen.prompts == plain.prompts
    assert same_parameters(seen, plain)
    np.testing.assert_equal(seen.pruner, plain.pruner)


def test_training_again_draws_anew_and_knows_the_prompts(tmp_path: Path) -> None:
    run, seen = prepared(tmp_path, max_steps=3, save_strategy="no")
    run.train()
    first = dict(seen.decisions)
    run.train()
    assert min(g for g in seen.decisions if g not in first) > max(first)
    again = [d for g, d in seen.decisions.items() if g not in first]
    assert len(again) == len(first) == 3
    candidates = [[d["window"]["ids"].tolist() for d in part] for part in (first.values(), again)]
    assert candidates[0] == candidates[1]  # both begin with the first epoch's order
    assert any((d["window"]["pi"] != 0.5).any() for d in again)
    assert all((d["window"]["pi"] == 0.5).all() for d in first.values())


class Interrupted(Exception):
    """Raised within a run."""


class Interrupt(TrainerCallback):
    """Interrupts a run once, before the step after `step`."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            raise Interrupted


@pytest.mark.parametrize("prompt_keep", [0.5, 1.0])
def test_a_trainer_that_was_interrupted_goes_on_like_a_new_one(
    tmp_path: Path, prompt_keep: float
) -> None:
    options = {**TWO_STEPS, "prompt_keep": prompt_keep, "max_steps": 6, "save_steps": 3}
    whole = trained(tmp_path / "whole", **options)
    run, seen = prepared(tmp_path / "run", **options, callbacks=[Interrupt(4)])
    with pytest.raises(Interrupted):
        run.train()
    assert (tmp_path / "run" / "checkpoint-3" / "dppo_generation_0.json").exists()
    run.train(resume_from_checkpoint=True)
    assert same_parameters(seen, whole)
    np.testing.assert_equal(seen.pruner, whole.pruner)
    np.testing.assert_equal(seen.logs, whole.logs)


class Cut(TrainerCallback):
    """Cuts an epoch short after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.step


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 2),
        (TWO_STEPS, 1),  # within a generation
        ({"prompt_keep": 1.0, "train_dataset": sorting_dataset(8, seed=0), **TWO_STEPS}, 1),
    ],
)
def test_after_an_epoch_that_was_cut_short_the_next_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], step: int
) -> None:
    """Two epochs of four steps; also a checkpoint of the second can be gone on from."""
    options = {**options, "max_steps": 8}
    whole = trained(tmp_path / "whole", **options, save_strategy="no")
    cut = trained(tmp_path / "cut", **options, callbacks=[Cut(step)])
    assert max(cut.pruner) == step + 4
    assert list(cut.decisions) == sorted(set(cut.decisions))
    pruned = [[d["window"] for d in seen.decisions.values()] for seen in (whole, cut)]
    second = len(whole.prompts) // 2
    if "prompt_keep" in options:
        assert list(cut.prompts.values())[-second:] == list(whole.prompts.values())[-second:]
    else:
        ids = [[w["ids"].tolist() for w in windows[-second:]] for windows in pruned]
        assert ids[0] == ids[1]
    with caplog.at_level(logging.WARNING, logger="dppo"):
        resumed = trained(tmp_path / "on", tmp_path / "cut" / f"checkpoint-{step + 1}", **options)
    assert "cut short" in caplog.text
    assert max(resumed.pruner) == 8
    assert not resumed.decisions.keys() & {g for g in cut.decisions if g <= max(cut.decisions) - 3}
    assert all(torch.isfinite(p).all() for p in parameters(resumed.run.model).values())
