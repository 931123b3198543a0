"""Prompts before rollout: windows, their order and seeds, streams, supply and refusals."""

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import SequentialSampler

from dppo.errors import (
    ConfigurationError,
    HostDriftError,
    InvalidInputError,
    UnsupportedLossError,
)
from dppo.pruner import Pruner
from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer
from dppo.trl.clock import PhaseClock
from dppo.trl.prompt_ids import content_id, dataset_ids
from dppo.trl.supply import check_supply
from dppo.trl.windows import Windows, WindowSampler, WindowStream

from .conftest import (
    OPTIONS,
    Script,
    Watch,
    alternating_reward,
    config,
    host_trainer,
    parameters,
    tiny_model,
    trainer,
    watched,
)

HALF: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "prompt_keep": 0.5,
    "loss_type": "dr_grpo",
}
"""K=2 of M=4 prompts x 2 completions a generation, one generation an optimizer step."""

TWO_STEPS: dict[str, Any] = {**HALF, "per_device_train_batch_size": 1, "steps_per_generation": 4}
"""The same, but a generation is trained on in two optimizer steps."""


def dataset(count: int, **columns: list[Any]) -> Dataset:
    data = sorting_dataset(count, seed=0)
    for name, values in columns.items():
        data = data.add_column(name, values)
    return data


def stream(count: int, **columns: list[Any]) -> IterableDataset:
    return dataset(count, **columns).to_iterable_dataset()


def recording(calls: list[dict[str, Any]]) -> Any:
    """A reward function that notes what it is given; no two rewards of a call are equal."""

    def told(**given: Any) -> list[float]:
        calls.append(given)
        return [float(i) for i in range(len(given["completions"]))]

    return told


def drawn(watch: Watch) -> list[tuple[int, list[int], list[bool], list[float]]]:
    """Generation, candidates, which of them are rolled out, probabilities."""
    windows = [d.window for d in watch.decisions]
    return [
        (w.generation, w.ids_M.tolist(), w.selection.kept.tolist(), w.selection.pi.tolist())
        for w in windows
    ]


def known(watch: Watch) -> list[float]:
    """Share of each window's candidates that were rolled out in time to be remembered."""
    windows = [d.window for d in watch.decisions]
    lag = watch.trainer.pruner.config.observation_lag
    shares = []
    for window in windows:
        earlier = [w.ids for w in windows if w.generation < window.generation - lag]
        shares.append(float(np.isin(window.ids_M, earlier).mean()))
    return shares


def same_parameters(one: Any, other: Any) -> bool:
    expected, found = parameters(one.trainer.model), parameters(other.trainer.model)
    return all(torch.equal(found[name], expected[name]) for name in expected)


# -- sampler ---------------------------------------------------------------------------------------


def windows_of(args: DPPOConfig) -> Windows:
    return Windows(Pruner(args.prune_config(), seed=args.seed), args, PhaseClock())


def sampler(args: DPPOConfig, data: Dataset) -> tuple[Windows, WindowSampler]:
    windows = windows_of(args)
    return windows, WindowSampler(windows, data)


def epoch(windows: Windows, rows: WindowSampler, number: int) -> tuple[list[Any], list[int]]:
    """The windows of an epoch and the rows that it yields."""
    first = number * 1000
    windows.begin_epoch(number, first=first, skipped=0, keep_at=lambda index: None)
    yielded = list(rows)
    return windows.state(first), yielded


def candidates(args: DPPOConfig, data: Dataset, number: int) -> list[int]:
    """Rows of the data set, in the order in which they are candidates in an epoch."""
    found, _ = epoch(*sampler(args, data), number)
    place = {key: row for row, key in enumerate(dataset_ids(data, None).tolist())}
    return [place[key] for window in found for key in window["ids"].tolist()]


@pytest.mark.parametrize(
    ("prompts", "options", "expected"),
    [
        (12, {}, (4, 2, 0)),
        (14, {"num_iterations": 2}, (4, 2, 2)),
        (
            23,
            {"num_generations": 4, "per_device_train_batch_size": 4, "prompt_keep": 0.4},
            (5, 2, 3),
        ),
        (
            40,
            {
                "per_device_train_batch_size": 4,
                "steps_per_generation": 4,
                "num_iterations": 3,
                "prompt_keep": 0.6,
            },
            (13, 8, 1),
        ),
    ],
)
def test_in_an_epoch_every_prompt_is_a_candidate_once_and_rolled_out_at_most_once(
    tmp_path: Path, prompts: int, options: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    args, data = config(tmp_path, **{**HALF, **options}), dataset(prompts)
    size, count, unused = expected
    assert (args.candidates_per_generation, args.prompts_per_generation) == (size, count)
    ids, generations = dataset_ids(data, None), prompts // size
    windows, rows = sampler(args, data)
    repeats = args.generation_steps * args.num_iterations
    left_out = set()
    for number in range(4):
        found, yielded = epoch(windows, rows, number)
        assert len(rows) == len(yielded)
        assert [w["generation"] for w in found] == list(range(number * 1000, windows.clear() + 1))
        asked = np.concatenate([w["ids"] for w in found])
        assert set(asked.tolist()) <= set(ids.tolist())
        assert len(asked) == len(set(asked.tolist())) == generations * size == prompts - unused
        left_out |= set(ids.tolist()) - set(asked.tolist())
        # Generations, micro-steps, prompts, completions: all of a prompt and of a generation alike.
        laid_out = ids[yielded].reshape(generations, repeats, count, args.group_size)
        assert (laid_out == laid_out[:, :1, :, :1]).all()
        chosen = np.stack([w["ids"][w["kept"]] for w in found])
        assert (laid_out[:, 0, :, 0] == chosen).all()
        assert len(set(chosen.ravel().tolist())) == generations * count
    # What an epoch leaves unused is not always the same.
    assert len(left_out) > unused or unused == 0


def test_the_order_depends_on_the_epoch_and_the_data_seed_alone(tmp_path: Path) -> None:
    data = dataset(24)
    orders = [candidates(config(tmp_path, seed=1, **HALF), data, number) for number in range(3)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    same = config(tmp_path, seed=5, data_seed=1, **{**HALF, "prompt_keep": 0.25})
    assert [candidates(same, data, number) for number in range(3)] == orders
    other = config(tmp_path, seed=1, data_seed=5, **HALF)
    assert candidates(other, data, 0) != orders[0]
    plain = config(tmp_path, shuffle_dataset=False, **HALF)
    assert [candidates(plain, data, number) for number in (0, 1)] == [list(range(24))] * 2


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"shuffle_dataset": False}])
def test_without_prompt_pruning_the_sampler_is_the_hosts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ours = trainer(tmp_path, train_dataset=dataset(11), **options)._get_train_sampler()
    host = host_trainer(tmp_path, train_dataset=dataset(11), **options)._get_train_sampler()
    for _ in range(3):
        expected = list(host)
        assert list(ours) == expected
        assert len(ours) == len(expected) > 0


def test_a_data_seed_changes_nothing_but_the_order(tmp_path: Path) -> None:
    one = trainer(tmp_path, train_dataset=dataset(12))._get_train_sampler()
    other = trainer(tmp_path, train_dataset=dataset(12), data_seed=7)._get_train_sampler()
    again = trainer(tmp_path, train_dataset=dataset(12), data_seed=7, seed=1)._get_train_sampler()
    for _ in range(2):
        expected, found = list(one), list(other)
        assert found != expected
        assert Counter(found) == Counter(expected)
        assert list(again) == found
        # 2 prompts x 4 completions in every micro-step of a generation.
        laid_out = np.array(found).reshape(6, 2, 2, 4)
        assert (laid_out == laid_out[:, :1, :, :1]).all()


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"completion_keep": 1.0}, {"completion_rule": "inert"}])
def test_what_is_rolled_out_is_what_was_drawn_and_each_completion_is_trained_once(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    calls: list[dict[str, Any]] = []
    run = trainer(
        tmp_path,
        reward=recording(calls),
        train_dataset=dataset(12),
        **{**HALF, "num_generations": 4, "steps_per_generation": 4},
        num_train_epochs=3,
        max_steps=-1,
        **options,
    )
    watch = watched(run)
    assert len(calls) == len(watch.decisions) == 9
    assert run.state.global_step == 18
    for generation, (call, decision) in enumerate(zip(calls, watch.decisions, strict=True)):
        window = decision.window
        assert window.generation == decision.generation == generation
        prompts = call["prompts"]
        assert prompts == [prompts[i // 4 * 4] for i in range(8)]
        assert [content_id(prompt) for prompt in prompts[::4]] == window.ids.tolist()
        micro_batches = [m for m in decision.micro_batches if m is not None]
        rows = np.concatenate([m.rows_R for m in micro_batches])
        assert sorted(rows.tolist()) == list(range(8))
        weight = np.concatenate([m.weight_R for m in micro_batches])
        np.testing.assert_allclose(weight, np.repeat(1 / window.pi, 4)[rows])
    assert watch.gradient_rows == [2] * 36
    for start in (0, 3, 6):
        ids = np.concatenate([d.window.ids_M for d in watch.decisions[start : start + 3]])
        assert sorted(ids.tolist()) == sorted(dataset_ids(run.train_dataset, None).tolist())


@pytest.mark.parametrize("make", [dataset, stream])
def test_nothing_leaks_into_the_reward_functions(tmp_path: Path, make: Any) -> None:
    data = make(12, name=[f"n{i}" for i in range(12)], rate=[i / 12 for i in range(12)])
    columns = {"prompt_id_column": "name", "prompt_prior_column": "rate"}
    calls: list[dict[str, Any]] = []
    pruned = {**HALF, **columns}
    watch = watched(trainer(tmp_path, reward=recording(calls), train_dataset=data, **pruned))
    kept = {name: value for name, value in HALF.items() if name != "prompt_keep"}
    of_host: list[dict[str, Any]] = []
    host_trainer(tmp_path, reward=recording(of_host), train_dataset=data, **kept).train()
    assert {tuple(sorted(call)) for call in calls} == {tuple(sorted(of_host[0]))}
    assert {"answer", "name", "rate"} <= of_host[0].keys()
    by_name = {row["name"]: row for row in data}
    for call, decision in zip(calls, watch.decisions, strict=True):
        assert [content_id(name) for name in call["name"][::2]] == decision.window.ids.tolist()
        for i, name in enumerate(call["name"]):
            found = {"prompt": call["prompts"][i], "answer": call["answer"][i]}
            assert {**found, "name": name, "rate": call["rate"][i]} == by_name[name]


class Backwards(WindowSampler):
    """Draws as it should, but hands out the prompts in another order."""

    def __iter__(self) -> Iterator[int]:
        rows = super().__iter__()
        while generation := list(islice(rows, len(self) // 3)):
            yield from generation[::-1]


@pytest.mark.parametrize("kind", [SequentialSampler, Backwards])
def test_rows_that_were_not_drawn_are_refused(tmp_path: Path, kind: Any) -> None:
    run = trainer(tmp_path, train_dataset=dataset(12), max_steps=6, **HALF)
    ours = kind is Backwards
    run._get_train_sampler = lambda data: kind(run._windows, data) if ours else kind(data)
    with pytest.raises(HostDriftError, match="not the prompts that were drawn for it"):
        run.train()


def test_the_seeds_of_a_run(tmp_path: Path) -> None:
    def seeded(**seeds: int) -> Watch:
        options = {**HALF, "train_dataset": dataset(12), "max_steps": 6}
        return watched(trainer(tmp_path, **options, **seeds))

    def asked(watch: Watch) -> list[list[int]]:
        return [ids for _, ids, _, _ in drawn(watch)]

    one, again = seeded(seed=3, data_seed=4), seeded(seed=3, data_seed=4)
    assert drawn(one) == drawn(again)
    assert same_parameters(one, again)
    for expected, found in zip(one.decisions, again.decisions, strict=True):
        assert (found.choices[0].kept == expected.choices[0].kept).all()
    other_order = seeded(seed=3, data_seed=5)
    assert asked(other_order)[0] != asked(one)[0]
    assert not same_parameters(one, other_order)
    other_draws = seeded(seed=5, data_seed=4)
    assert asked(other_draws) == asked(one)
    assert drawn(other_draws) != drawn(one)
    assert [kept for _, _, kept, _ in drawn(other_draws)] != [kept for _, _, kept, _ in drawn(one)]


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_stream_trains(tmp_path: Path, keep: float) -> None:
    calls: list[dict[str, Any]] = []
    options = {**HALF, "prompt_keep": keep, "max_steps": 2}
    run = trainer(tmp_path, reward=recording(calls), train_dataset=stream(8), **options)
    watched(run).check()
    assert len(calls) == 2
    for call in calls:
        prompts = call["prompts"]
        assert prompts == [prompts[0]] * 2 + [prompts[2]] * 2
        assert prompts[0] != prompts[2]


def test_a_stream_begins_again(tmp_path: Path) -> None:
    """Two windows a pass: in each pass every prompt is a candidate once, in another order."""
    calls: list[dict[str, Any]] = []
    options = {**HALF, "reward": recording(calls), "max_steps": 8}
    watch = watched(trainer(tmp_path, train_dataset=stream(8), **options))
    watch.check()
    ids = sorted(dataset_ids(dataset(8), None).tolist())
    asked = [window for _, window, _, _ in drawn(watch)]
    passes = [asked[i] + asked[i + 1] for i in range(0, 8, 2)]
    assert all(sorted(of_pass) == ids for of_pass in passes)
    assert len({tuple(of_pass) for of_pass in passes}) == 4
    for call, decision in zip(calls, watch.decisions, strict=True):
        assert [content_id(p) for p in call["prompts"][::2]] == decision.window.ids.tolist()
    assert [log["dppo/prompts/visited"] for log in watch.logs] == known(watch)
    assert known(watch)[:2] == [0, 0]
    assert max(known(watch)) > 0


def test_a_stream_has_names_and_beliefs(tmp_path: Path) -> None:
    names, rates = [100 + i for i in range(8)], [0.0, 0.5] * 4
    data = dataset(8, name=names, rate=rates)
    options = {**HALF, "prompt_id_column": "name", "prompt_prior_column": "rate", "max_steps": 2}
    streamed = watched(trainer(tmp_path, train_dataset=data.to_iterable_dataset(), **options))
    for _, ids, _, pi in drawn(streamed):
        hopeless = [name % 2 == 0 for name in ids]
        assert set(ids) <= set(names)
        if any(hopeless) and not all(hopeless):
            assert max(p for p, no in zip(pi, hopeless, strict=True) if no) < min(
                p for p, no in zip(pi, hopeless, strict=True) if not no
            )
    assert any(len(set(pi)) == 2 for *_, pi in drawn(streamed))


def test_the_seeds_of_a_stream(tmp_path: Path) -> None:
    def seeded(keep: float, **seeds: int) -> tuple[list[str], Watch]:
        calls: list[dict[str, Any]] = []
        options = {**HALF, "prompt_keep": keep, "max_steps": 4, "reward": recording(calls)}
        watch = watched(trainer(tmp_path, train_dataset=stream(12), **options, **seeds))
        return [prompt for call in calls for prompt in call["prompts"]], watch

    prompts, _ = seeded(1.0, seed=1)
    assert seeded(1.0, seed=2)[0] != prompts
    assert seeded(1.0, seed=2, data_seed=1)[0] == prompts
    _, one = seeded(0.5, seed=1)
    _, other = seeded(0.5, seed=2, data_seed=1)
    assert [ids for _, ids, _, _ in drawn(other)] == [ids for _, ids, _, _ in drawn(one)]
    assert drawn(other) != drawn(one)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_stream_needs_a_number_of_steps(tmp_path: Path, keep: float) -> None:
    """Known before a model is loaded: here its weights do not even exist."""
    tiny_model().config.save_pretrained(tmp_path / "model")
    options = {**HALF, "prompt_keep": keep, "max_steps": -1}
    with pytest.raises(ConfigurationError, match="max_steps=-1: a streaming data set"):
        trainer(tmp_path, model=str(tmp_path / "model"), train_dataset=stream(8), **options)


@pytest.mark.parametrize("count", [0, 3])
def test_a_stream_shorter_than_a_window(tmp_path: Path, count: int) -> None:
    data = IterableDataset.from_generator(lambda: iter([{"prompt": f"{i}="} for i in range(count)]))
    with pytest.raises(ConfigurationError, match=rf"after {count} prompts.* windows of 4\."):
        trainer(tmp_path, train_dataset=data, max_steps=2, **HALF).train()


STREAM: dict[str, Any] = {**TWO_STEPS, "max_steps": 10, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def whole_stream(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Five windows in two passes over ten prompts, a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("whole")
    return watched(trainer(folder, train_dataset=stream(10), **STREAM))


@pytest.mark.parametrize(("step", "generations"), [(3, [2, 3, 4]), (4, [2, 3, 4]), (6, [3, 4])])
def test_a_resumed_stream_is_the_uninterrupted_one(
    tmp_path: Path, whole_stream: Watch, step: int, generations: list[int]
) -> None:
    """After an odd step a generation is under way."""
    run = trainer(tmp_path, train_dataset=stream(10), **STREAM)
    watch = Watch(run)
    run.train(resume_from_checkpoint=f"{whole_stream.trainer.args.output_dir}/checkpoint-{step}")
    assert [generation for generation, *_ in drawn(watch)] == generations
    assert drawn(watch) == drawn(whole_stream)[generations[0] :]
    assert same_parameters(whole_stream, watch)


# -- supply ----------------------------------------------------------------------------------------

FOUR = {**HALF, "per_device_train_batch_size": 4, "prompt_keep": 1.0}
"""4 prompts a generation."""


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> str:
    of_level = [r for r in caplog.records if r.levelno == level and r.name.startswith("dppo")]
    return "\n".join(record.getMessage() for record in of_level)


def test_too_few_prompts_for_a_window(tmp_path: Path) -> None:
    args = config(tmp_path, **{**HALF, "prompt_keep": 0.25})
    with pytest.raises(ConfigurationError, match=r"window of M=8 prompts.* has N=7\."):
        check_supply(dataset(7), args)
    check_supply(dataset(8), args)


def test_too_few_prompts_for_a_generation_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    tiny_model().config.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"3 prompts are fewer .*\(4 prompts\)"):
        trainer(tmp_path, model=str(tmp_path / "model"), train_dataset=dataset(3), **FOUR)
    with pytest.raises(ConfigurationError, match=r"^1 prompt is fewer"):
        check_supply(dataset(1), config(tmp_path, **FOUR))


def test_unused_prompts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dppo"):
        trainer(tmp_path, train_dataset=dataset(10), **FOUR)
    assert "2 of 10 prompts unused per epoch" in said(caplog)
    caplog.clear()
    check_supply(dataset(12), config(tmp_path, **FOUR))
    assert "unused" not in said(caplog)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"max_steps": -1, "num_train_epochs": 1}, "1"),
        ({"max_steps": -1, "num_train_epochs": 1.5}, "1.5"),
        ({"max_steps": 5}, "1.67"),  # 3 generations, or optimizer steps, an epoch
    ],
)
def test_fewer_than_two_passes_have_no_history(
    tmp_path: Path, options: dict[str, Any], passes: str
) -> None:
    data = dataset(12, rate=[0.5] * 12)
    with pytest.raises(ConfigurationError, match=f"makes {passes} passes over the data"):
        check_supply(data, config(tmp_path, **HALF, **options))
    for way_out in ({"allow_single_epoch": True}, {"prompt_prior_column": "rate"}):
        check_supply(data, config(tmp_path, **HALF, **options, **way_out))


def test_two_passes_are_enough(tmp_path: Path) -> None:
    for options in ({"max_steps": 6}, {"max_steps": -1, "num_train_epochs": 2}):
        check_supply(dataset(12), config(tmp_path, **HALF, **options))


@pytest.mark.parametrize("make", [dataset, stream])
def test_a_window_without_a_choice(tmp_path: Path, make: Any) -> None:
    one = {"per_device_train_batch_size": 1, "prompt_keep": 0.7}  # floor(1 / 0.7 + 1/2) = 1
    for options, named in (({"prompt_keep": 0.9}, "2 prompts,"), (one, "1 prompt,")):
        args = config(tmp_path, max_steps=24, **{**HALF, **options})
        with pytest.raises(ConfigurationError, match=f"nothing to choose .* rolls out {named}"):
            check_supply(make(12), args)
    check_supply(make(12), config(tmp_path, max_steps=24, **{**HALF, "prompt_keep": 0.8}))


def test_the_start_line_says_what_is_rolled_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**HALF, "per_device_train_batch_size": 5, "prompt_keep": 0.6, "max_steps": 6}
    with caplog.at_level(logging.WARNING, logger="dppo"):
        trainer(tmp_path, train_dataset=dataset(26), **options)
        trainer(tmp_path, train_dataset=stream(26), **options)
    told = said(caplog).splitlines()
    line, of_stream = (text for text in told if text.startswith("prompt pruning"))
    assert "M=8 candidates, K=5 rolled out, effective keep 0.625" in line
    assert "3 generations per epoch, 2 of 26 prompts unused per epoch" in line
    assert "windows of 8 prompts, 5 of them rolled out (effective keep 0.625)" in of_stream
    assert all("1 generations late" in text for text in (line, of_stream))


def test_equal_prompts_share_a_history_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.from_dict({"prompt": ["1=", "2=", "1=", "3=", "4=", "2=", "5=", "6="]})
    data = data.add_column("name", list(range(8)))
    for column, count in ((None, 1), ("name", 0)):
        run = trainer(tmp_path, train_dataset=data, prompt_id_column=column, max_steps=4, **HALF)
        caplog.clear()
        run.get_train_dataloader()
        assert said(caplog).count("4 of 8 prompts have the text of another") == count


def test_advantages_over_the_batch_are_remarked_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for options in (
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {},
    ):
        caplog.clear()
        check_supply(dataset(12), config(tmp_path, max_steps=6, **HALF, **options))
        assert ("consistent, not unbiased" in said(caplog)) == bool(options)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_an_estimated_token_total_is_remarked_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss_type: str
) -> None:
    caplog.set_level(logging.INFO, logger="dppo")
    for batch, level in ((15, logging.WARNING), (16, logging.INFO)):
        caplog.clear()
        options = {**HALF, "per_device_train_batch_size": batch, "loss_type": loss_type}
        check_supply(dataset(64), config(tmp_path, max_steps=20, **options))
        about = [r for r in caplog.records if "estimated from the" in r.getMessage()]
        assert [record.levelno for record in about] == [level]
        assert f"from the {batch} prompts" in about[0].getMessage()
    caplog.clear()
    check_supply(stream(64), config(tmp_path, max_steps=20, **HALF))
    assert "estimated from the" not in caplog.text


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "bnpo"}, "loss_type='bnpo' divides by the tokens of a micro-batch"),
        ({"entropy_coef": 0.01}, "entropy_coef=0.01 divides by the tokens of a micro-batch"),
    ],
)
def test_a_divisor_that_depends_on_the_draw(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedLossError) as caught:
        config(tmp_path, **{**HALF, **options})
    assert named in str(caught.value)
    config(tmp_path, **{**HALF, **options, "prompt_keep": 1.0})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"completion_keep": "shadow"}, "completion_keep='shadow' trains as if nothing"),
        ({"completion_keep": "shadow:0.3"}, "completion_keep='shadow:0.3' trains as if nothing"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True"),
        (
            {"prompt_id_column": "name", "remove_unused_columns": True},
            "remove_unused_columns=True removes the column 'name'",
        ),
    ],
)
def test_options_that_do_not_go_with_prompt_pruning(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config(tmp_path, **HALF, **options)
    assert named in str(caught.value)
    config(tmp_path, **{**HALF, **options, "prompt_keep": 1.0})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_keep": 0.0}, "prompt_keep"),
        ({"prompt_keep": 1.5}, "prompt_keep"),
        ({"prompt_rule": "best"}, "prompt_rule"),
        ({"prompt_prune_rate": 1.0}, "prompt_prune_rate"),
        ({"prune_warmup_steps": -1}, "prune_warmup_steps=-1"),
        ({"prune_until": 1.5}, "prune_until=1.5"),
        ({"prune_until": -0.1}, "prune_until=-0.1"),
    ],
)
def test_values_outside_their_range(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config(tmp_path, **{**HALF, **options})
    assert named in str(caught.value)


BAD_COLUMNS = [
    ("prompt_prior_column", [1.5] * 8, "rates from 0 to 1, got 1.5"),
    ("prompt_prior_column", [0.5] * 7 + [-0.1], "rates from 0 to 1, got -0.1"),
    ("prompt_prior_column", [float("nan")] * 8, "rates from 0 to 1, got nan"),
    ("prompt_prior_column", ["x"] * 8, "rates from 0 to 1, got 'x'"),
    ("prompt_prior_column", [True] * 8, "rates from 0 to 1, got True"),
    ("prompt_prior_column", [None, 0.5] * 4, "rates from 0 to 1, got None"),
    ("prompt_id_column", [1.0] * 8, "must hold texts or whole numbers from 0 to 2^63 - 1, got 1.0"),
    ("prompt_id_column", [-1] * 8, "got -1"),
    ("prompt_id_column", [True] * 8, "got True"),
    ("prompt_id_column", ["a", None] * 4, "got None"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("option", "values", "named"), BAD_COLUMNS)
def test_columns_that_hold_something_else(
    tmp_path: Path, option: str, values: list[Any], named: str, *, streamed: bool
) -> None:
    """Of a data set before a model is loaded; of a stream when they are read."""
    args = config(tmp_path, max_steps=4, **HALF, **{option: "extra"})
    rows = WindowStream(windows_of(args), stream(8, extra=values))
    with pytest.raises(ConfigurationError) as caught:
        list(islice(rows, 9)) if streamed else check_supply(dataset(8, extra=values), args)
    assert f"{option}='extra'" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("make", [dataset, stream])
@pytest.mark.parametrize("option", ["prompt_prior_column", "prompt_id_column"])
def test_columns_that_are_not_there(tmp_path: Path, option: str, make: Any) -> None:
    args = config(tmp_path, max_steps=4, **HALF, **{option: "extra"})
    with pytest.raises(ConfigurationError, match=rf"{option}='extra' .*'answer', 'prompt'"):
        check_supply(make(8), args)


def test_a_stream_that_does_not_know_its_columns(tmp_path: Path) -> None:
    data = IterableDataset.from_generator(lambda: iter([{"prompt": f"{i}="} for i in range(8)]))
    assert data.column_names is None
    run = trainer(tmp_path, train_dataset=data, prompt_id_column="extra", max_steps=4, **HALF)
    with pytest.raises(ConfigurationError, match="'extra' is none of the columns 'prompt'"):
        run.train()


def test_a_stream_without_prompts(tmp_path: Path) -> None:
    data = IterableDataset.from_generator(lambda: iter([{"question": f"{i}="} for i in range(8)]))
    run = trainer(tmp_path, train_dataset=data, max_steps=4, **HALF)
    with pytest.raises(ConfigurationError, match="'prompt' is none of the columns 'question'"):
        run.train()


def test_beliefs_do_not_need_to_reach_the_rewards(tmp_path: Path) -> None:
    """`remove_unused_columns` takes the column from the rows, after it was read."""
    calls: list[dict[str, Any]] = []
    rates = [1.0, 0.5] * 4
    options = {**HALF, "prompt_prior_column": "rate", "remove_unused_columns": True, "max_steps": 4}
    run = trainer(
        tmp_path, reward=recording(calls), train_dataset=dataset(8, rate=rates), **options
    )
    watch = watched(run)
    assert not any({"rate", "answer"} & call.keys() for call in calls)
    assert any(len(set(pi)) > 1 for *_, pi in drawn(watch)[:2])


@pytest.mark.parametrize("make", [dataset, stream])
def test_images_need_names(tmp_path: Path, make: Any) -> None:
    data, args = make(8, image=["a.png"] * 8), {**HALF, "max_steps": 4}
    with pytest.raises(ConfigurationError, match="prompts with images are not told apart"):
        check_supply(data, config(tmp_path, **args))
    check_supply(data, config(tmp_path, prompt_id_column="answer", **args))
    check_supply(data, config(tmp_path, **{**args, "prompt_keep": 1.0}))


def test_prompts_must_come_from_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="from a train_dataset, and there is none"):
        trainer(tmp_path, train_dataset=None, **HALF)
    with pytest.raises(ConfigurationError, match="there is an environment_factory"):
        trainer(tmp_path, environment_factory=object, max_steps=6, **HALF)


# -- annealing, the paper, metrics -----------------------------------------------------------------


@pytest.mark.parametrize(("options", "steps"), [(HALF, 1), (TWO_STEPS, 2)])
@pytest.mark.parametrize("make", [dataset, stream])
def test_annealing_prunes_in_between_only(
    tmp_path: Path, options: dict[str, Any], steps: int, make: Any
) -> None:
    """In the first 2 and the last 2 of 8 steps nothing is pruned."""
    options = {**options, "max_steps": 8, "reward": recording([])}  # every completion is live
    annealed = {"prune_warmup_steps": 2, "prune_until": 0.75}
    plain = watched(trainer(tmp_path, train_dataset=make(8), **options))
    watch = watched(trainer(tmp_path, train_dataset=make(8), **options, **annealed))
    watch.check()
    assert len(watch.decisions) == len(plain.decisions) == 8 // steps
    for decision in watch.decisions:
        pi, choice = decision.window.selection.pi, decision.choices[0]
        if 2 <= decision.generation * steps < 6:
            assert len(pi) == 4
            assert pi.sum() == pytest.approx(2)
            assert pi.max() < 1
            assert choice.kept.sum() == 2
        else:
            assert pi.tolist() == [1.0, 1.0]
            assert (choice.weight == 1).all()
    assert [log["learning_rate"] for log in watch.logs] == [
        log["learning_rate"] for log in plain.logs
    ]


def test_the_papers_rates_can_be_overridden(tmp_path: Path) -> None:
    args = DPPOConfig.paper(str(tmp_path), report_to=[], prompt_prune_rate=0.4)
    assert (args.completion_rule, args.completion_prune_rate) == ("threshold", 0.5)
    assert (args.prompt_rule, args.prompt_prune_rate, args.prompt_keep) == ("threshold", 0.4, 0.8)
    changed = DPPOConfig.paper(
        str(tmp_path),
        report_to=[],
        completion_prune_rate=0.3,
        prompt_keep=0.6,
        completion_rule="uniform",
        num_generations=2,
    )
    assert (changed.completion_prune_rate, changed.prompt_keep) == (0.3, 0.6)
    assert (changed.completion_rule, changed.num_generations) == ("uniform", 2)
    assert not DPPOConfig.paper(str(tmp_path), report_to=[], prompt_prune_rate=0).prunes_prompts


def test_the_papers_rules_train(tmp_path: Path) -> None:
    options = {**OPTIONS, "num_generations": 2, "max_steps": 12, "loss_type": "dr_grpo"}
    options["packing"] = "bucket"
    args = DPPOConfig.paper(str(tmp_path), **options)
    tokenizer = load_builtin_tokenizer()
    run = DPPOTrainer(
        tiny_model(), alternating_reward, args, dataset(15), processing_class=tokenizer
    )
    watch = watched(run)
    watch.check()
    # K=4 of M=5, and sizes 1 - r_q or 1 once there is a history.
    assert all(len(pi) == 5 for *_, pi in drawn(watch))
    assert all(pi == pytest.approx([0.8] * 5) for *_, pi in drawn(watch)[:3])
    assert any(len(set(np.round(pi, 9))) == 2 for *_, pi in drawn(watch))


def test_metrics_of_the_windows(tmp_path: Path) -> None:
    rewards: list[Any] = []

    def noted(completions: list[str], **given: Any) -> list[float]:
        rewards.append(np.array(alternating_reward(completions)).reshape(3, 2))
        return rewards[-1].ravel().tolist()

    options = {**HALF, "per_device_train_batch_size": 3, "completion_keep": 0.2, "max_steps": 8}
    run = trainer(tmp_path, reward=noted, train_dataset=dataset(18), **options)
    watch = watched(run)
    for log, decision, rewards_PG in zip(watch.logs, watch.decisions, rewards, strict=True):
        selection = decision.window.selection
        pi = selection.pi[selection.kept]
        assert log["dppo/reward/ht"] == pytest.approx((rewards_PG.mean(1) / pi).sum() / 6)
        live = float((rewards_PG[:, 0] != rewards_PG[:, 1]).mean())
        expected = {"candidates": 6, "rolled_out": 3, "sampled_out": 3, "keep": 0.5, "live": live}
        expected["weight/max"] = float((1 / pi).max())
        for name, value in expected.items():
            assert log[f"dppo/prompts/{name}"] == pytest.approx(value), name
    assert [log["dppo/prompts/visited"] for log in watch.logs] == known(watch)
    assert known(watch)[:3] == [0, 0, 0]
    assert min(known(watch)[4:]) > 0
    assert len({log["dppo/reward/ht"] for log in watch.logs}) > 1
    totals = run.totals()
    assert (totals["prompts_candidates"], totals["prompts_rolled_out"]) == (48, 24)
    assert json.loads(json.dumps(totals)) == totals


def test_without_prompt_pruning_candidates_are_rolled_out(tmp_path: Path) -> None:
    for keep in (0.5, 1.0):
        run = trainer(tmp_path, completion_keep=keep, max_steps=2)
        watch = watched(run)
        totals = run.totals()
        assert totals["prompts_candidates"] == totals["prompts_rolled_out"] == 4
        assert not [name for name in watch.logs[0] if name.startswith("dppo/prompts/")]


def test_windows_without_signal_are_steps_that_train_on_nothing(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        reward=lambda completions, **given: [0.0] * len(completions),
        rollout_func=Script([[3, 4, 1], [5, 1]] * 2),
        train_dataset=dataset(12),
        max_steps=12,
        **HALF,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = watched(run)
    assert run.state.global_step == watch.optimizer_steps == len(watch.decisions) == 12
    assert run.totals()["completions_trained"] == 0
    assert all(log["grad_norm"] == 0 for log in watch.logs)
    after = parameters(run.model)
    assert all(torch.equal(after[name], watch.before[name]) for name in after)
    told = [str(w.message) for w in caught if "no gradient in" in str(w.message)]
    assert len(told) == 1
    assert "no gradient in 10 generations in a row" in told[0]


# -- how late observations arrive ------------------------------------------------------------------

LAG: Any = DPPOConfig.observation_lag


@pytest.mark.parametrize(
    ("steps", "iterations", "accumulation", "workers", "lag"),
    [
        (2, 1, 2, 0, 1),
        (4, 1, 2, 0, 0),
        (1, 1, 1, 0, 1),
        (1, 1, 4, 0, 4),
        (2, 1, 3, 0, 1),
        (2, 2, 3, 0, 0),
        (2, 1, 2, 1, 2),
        (1, 1, 2, 1, 4),
        (2, 2, 4, 1, 1),
    ],
)
def test_windows_wait_for_observations_no_longer_than_the_loader_works_ahead(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    iterations: int,
    accumulation: int,
    workers: int,
    lag: int,
) -> None:
    generations = 2 * accumulation + 3  # of an epoch: more than the pattern takes to repeat
    batches = generations * steps * iterations

    def waiting(generations_late: int) -> Any:
        monkeypatch.setattr(DPPOConfig, "observation_lag", generations_late)
        return trainer(
            tmp_path,
            reward=recording([]),
            rollout_func=Script([[3, 4, 1], [4, 1]] * 2),
            train_dataset=dataset(4 * generations),
            **{**HALF, "per_device_train_batch_size": 4 // steps},
            steps_per_generation=steps,
            num_iterations=iterations,
            gradient_accumulation_steps=accumulation,
            dataloader_num_workers=workers,
            max_steps=2 * -(-batches // accumulation),
        )

    run = waiting(LAG)
    assert run.pruner.config.observation_lag == lag
    assert len(watched(run).decisions) == 2 * generations
    if lag:
        with pytest.raises(InvalidInputError, match="comes too late"):
            waiting(lag - 1).train()
