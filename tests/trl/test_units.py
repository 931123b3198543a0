"""The parts below the trainer: schedule, rows, recorder, rollout facts, signal."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from dppo.packing import spread
from dppo.tasks import load_builtin_tokenizer
from dppo.trl import rows, schedule
from dppo.trl.clock import PhaseClock
from dppo.trl.decision import Rows
from dppo.trl.recorder import record_generation
from dppo.trl.rollout import Rollout
from dppo.trl.signal import signal

from .conftest import Script, host_trainer, random_completions, tiny_model

GEOMETRIES = [
    schedule.Geometry(ranks=r, micro_batch=b, steps_per_generation=s, iterations=i, accumulation=a)
    for r, b, s, i, a in (
        (1, 1, 1, 1, 1),
        (1, 4, 2, 1, 2),
        (1, 2, 3, 1, 2),
        (2, 2, 4, 2, 2),
        (3, 2, 1, 3, 2),
        (2, 3, 4, 1, 8),
        (4, 1, 6, 2, 5),
    )
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_segments_partition_the_micro_steps(geometry: schedule.Geometry) -> None:
    for left in range(1, geometry.accumulation + 1):
        cut = schedule.segments(geometry, window_left=left)
        assert [s.first for s in cut] == [0, *(s.last for s in cut[:-1])]
        assert cut[-1].last == geometry.micro_steps
        for segment in cut:
            per_pass = geometry.steps_per_generation
            assert {m // per_pass for m in range(segment.first, segment.last)} == {
                segment.iteration
            }
            steps = {
                (geometry.accumulation - left + m) // geometry.accumulation
                for m in range(segment.first, segment.last)
            }
            assert steps == {segment.optimizer_step}
            closes = (geometry.accumulation - left + segment.last) % geometry.accumulation == 0
            assert segment.closes == (closes or segment.last == geometry.micro_steps)
        # A new segment begins for a reason: a new pass, or a new optimizer step.
        for one, other in pairwise(cut):
            assert (one.iteration, one.optimizer_step) != (other.iteration, other.optimizer_step)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_row_has_one_micro_step(geometry: schedule.Geometry) -> None:
    orders = set()
    for generation in range(3):
        place_N = schedule.order_of_rows(geometry, seed=1, generation=generation)
        assert sorted(place_N) == list(range(geometry.rows_of_all))
        counts = np.bincount(schedule.micro_step_of_rows(place_N, geometry))
        each = geometry.ranks * geometry.micro_batch
        assert counts.tolist() == [each] * geometry.steps_per_generation
        orders.add(tuple(place_N.tolist()))
        again = schedule.order_of_rows(geometry, seed=1, generation=generation)
        assert np.array_equal(place_N, again)
    assert len(orders) > 1 or geometry.rows_of_all <= 2


def test_optimizer_steps_do_not_depend_on_how_many_ranks_share_them() -> None:
    found = set()
    for ranks, micro_batch, accumulation in (
        (1, 4, 3),
        (2, 2, 3),
        (4, 1, 3),
        (3, 4, 1),
        (1, 1, 12),
    ):
        geometry = schedule.Geometry(ranks, micro_batch, 2 * accumulation, 2, accumulation)
        place_N = schedule.order_of_rows(geometry, seed=3, generation=5)
        micro_step_N = schedule.micro_step_of_rows(place_N, geometry)
        cut = schedule.segments(geometry, window_left=accumulation)
        found.add(
            tuple(
                tuple(schedule.optimizer_step_of_rows(micro_step_N, cut, geometry, iteration))
                for iteration in range(2)
            )
        )
    assert len(found) == 1
    assert {step for passed in found.pop() for step in passed} == {0, 1, 2, 3}


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_layout_gives_ranks_equal_shapes_and_rows_one_place(
    geometry: schedule.Geometry, sort: bool, moves: bool
) -> None:
    rng = np.random.default_rng(0)
    size = geometry.rows_of_all
    for trial in range(6):
        kept_N = rng.random(size) < (0.0, 0.2, 0.5, 1.0, 0.5, 0.1)[trial]
        if trial == 4:
            kept_N[: geometry.rows] = False  # a rank with nothing
        weight_N = np.where(kept_N, 1 + rng.random(size), 0.0)
        length_N = rng.integers(1, 9, size)
        place_N = schedule.order_of_rows(geometry, seed=0, generation=trial, moves=moves)
        micro_step_N = schedule.micro_step_of_rows(place_N, geometry)
        tokens_N = schedule.original_tokens(length_N, place_N, geometry)
        for left in {1, geometry.accumulation}:
            for segment in schedule.segments(geometry, window_left=left):
                bins = schedule.layout(
                    segment,
                    kept_N,
                    micro_step_N=micro_step_N,
                    length_N=length_N,
                    geometry=geometry,
                    sort=sort,
                    moves=moves,
                )
                assert len(bins) == segment.last - segment.first
                # What is not run comes first, so that the last micro-step synchronises.
                filled = [rows is not None for rows in bins]
                assert filled == sorted(filled)
                assert filled[-1] or not segment.closes
                position_N = segment.iteration * geometry.steps_per_generation + micro_step_N
                here_N = kept_N & (position_N >= segment.first) & (position_N < segment.last)
                laid = [rows for rows in bins if rows is not None]
                if moves:  # as few as hold them
                    held = geometry.ranks * geometry.micro_batch
                    assert len(laid) == max(-(-here_N.sum() // held), int(segment.closes))
                found = np.zeros(size)
                for rows_WR in laid:
                    assert rows_WR.shape[0] == geometry.ranks
                    assert 1 <= rows_WR.shape[1] <= geometry.micro_batch
                    for rank, rows_R in enumerate(rows_WR):
                        real = rows_R != spread.PADDING
                        found[rows_R[real]] += 1
                        assert moves or (rows_R[real] // geometry.rows == rank).all()
                        batch = schedule.micro_batch_of(rows_R, weight_N, tokens_N, segment)
                        assert np.array_equal(batch.weight_R[real], weight_N[rows_R[real]])
                        assert not batch.weight_R[~real].any()
                        assert np.array_equal(batch.full_tokens_R[real], tokens_N[rows_R[real]])
                assert np.array_equal(found, here_N)


def test_original_tokens_are_those_of_the_micro_batch() -> None:
    geometry = GEOMETRIES[3]
    length_N = np.arange(1, 17)
    place_N = schedule.order_of_rows(geometry, seed=0, generation=0)
    tokens_N = schedule.original_tokens(length_N, place_N, geometry)
    for i in range(16):
        mates = place_N // 2 == place_N[i] // 2
        assert mates.sum() == 2
        assert tokens_N[i] == length_N[mates].sum()


# -- rows ------------------------------------------------------------------------------------------


def batch_of(prompts: list[int], completions: list[int], *, width: int = 8) -> dict[str, Any]:
    """Rows of those lengths; every value tells its row and column."""
    count = len(prompts)
    place = torch.arange(count * width).reshape(count, width)
    columns = torch.arange(width)
    prompt_mask = (columns >= width - torch.tensor(prompts)[:, None]).long()
    completion_mask = (columns < torch.tensor(completions)[:, None]).long()
    return {
        "prompt_ids": place,
        "prompt_mask": prompt_mask,
        "completion_ids": place + 1000,
        "completion_mask": completion_mask,
        "advantages": torch.arange(count).float(),
        "old_per_token_logps": -place.float(),
        "importance_sampling_ratio": torch.ones(count, 1),
        "num_items_in_batch": torch.tensor(3),
    }


def test_trim_cuts_what_is_padding_in_every_row() -> None:
    batch = batch_of([3, 5], [2, 4])
    cut = rows.trim(batch, left=True, multiple=None)
    assert torch.equal(cut["prompt_ids"], batch["prompt_ids"][:, 3:])
    assert torch.equal(cut["completion_ids"], batch["completion_ids"][:, :4])
    assert torch.equal(cut["old_per_token_logps"], batch["old_per_token_logps"][:, :4])
    assert cut["importance_sampling_ratio"].shape == (2, 1)
    assert cut["prompt_mask"].sum() == 8
    assert cut["completion_mask"].sum() == 6
    assert cut["num_items_in_batch"] == 3


def test_trim_keeps_multiples_and_the_left_where_positions_are_absolute() -> None:
    batch = batch_of([3, 5], [2, 5])
    assert rows.trim(batch, left=False, multiple=None)["prompt_ids"].shape == (2, 8)
    cut = rows.trim(batch, left=True, multiple=4)
    assert cut["prompt_ids"].shape == cut["completion_ids"].shape == (2, 8)
    cut = rows.trim(batch_of([3, 4], [2, 1]), left=True, multiple=4)
    assert cut["prompt_ids"].shape == cut["completion_ids"].shape == (2, 4)
    cut = rows.trim(batch_of([3, 4], [0, 0]), left=True, multiple=None)
    assert cut["completion_ids"].shape == (2, 1)  # a forward needs a column
    images = {**batch, "pixel_values": torch.zeros(2)}
    assert rows.trim(images, left=True, multiple=None) is images


def test_left_padding_may_go_only_where_distances_alone_matter() -> None:
    assert rows.shift_invariant(Qwen3Config())
    assert rows.shift_invariant(LlamaConfig())
    assert not rows.shift_invariant(GPT2Config())
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not rows.shift_invariant(LlamaConfig(rope_parameters=dynamic))


def test_select_rows_blanks_padding_rows() -> None:
    batch = batch_of([3, 5, 2], [2, 4, 8])
    batch["old_per_token_logps"][0] = torch.nan  # an unscored row must not leak: 0 * NaN is NaN
    batch["texts"] = ["a", "b", "c"]
    batch["nothing"] = None
    picked = rows.select_rows(batch, np.array([2, spread.PADDING, 1]))
    assert picked["texts"] == ["c", "a", "b"]
    assert picked["nothing"] is None
    assert picked["advantages"].tolist() == [2, 0, 1]
    assert picked["completion_mask"].sum(1).tolist() == [8, 0, 4]
    assert torch.isfinite(picked["old_per_token_logps"]).all()
    assert torch.isnan(batch["old_per_token_logps"][0]).all()  # the buffer itself is untouched


# -- recorder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}])
def test_recorded_log_probs_are_the_policys(options: dict[str, Any]) -> None:
    """At temperature 0.7, prompts left-padded, some rows ended by the end-of-sequence token.

    1e-5: float32 log-softmax, with and without a key-value cache.
    """
    model, tokenizer = tiny_model().eval(), load_builtin_tokenizer()
    prompts = tokenizer(["314=", "27182818=", "1="] * 6, return_tensors="pt", padding=True)
    assert (prompts["attention_mask"] == 0).any()
    torch.manual_seed(0)
    with record_generation(model, 0.7) as recorder, torch.no_grad():
        output = model.generate(
            **prompts,
            **{"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 12, **options},
            eos_token_id=[1, 4, 6, 8, 10],  # that some rows end early under every option
            pad_token_id=0,
        )
    assert "generate" not in vars(model)
    assert recorder.calls == 1
    width = prompts["input_ids"].shape[1]
    sampled = output[:, width:]
    recorded = recorder.log_probs()
    assert recorded.shape == sampled.shape
    ends = torch.isin(sampled, torch.tensor([1, 4, 6, 8, 10])).long()
    after_end = ends.cumsum(1) - ends > 0
    assert after_end.any()
    assert not after_end.all(1).any()
    mask = torch.cat([prompts["attention_mask"], torch.ones_like(sampled)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=output, attention_mask=mask, position_ids=positions).logits
    manual = (
        (logits[:, width - 1 : -1] / 0.7).log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    )
    torch.testing.assert_close(recorded[~after_end], manual[~after_end], rtol=1e-5, atol=1e-5)


def test_recording_changes_no_sample_and_survives_an_error() -> None:
    model = tiny_model().eval()
    ids = torch.full((4, 3), 5)

    def sample() -> torch.Tensor:
        torch.manual_seed(1)
        return model.generate(input_ids=ids, do_sample=True, max_new_tokens=8, pad_token_id=0)

    plain = sample()
    with record_generation(model, 1.0) as recorder:
        assert torch.equal(sample(), plain)
        sample()
    assert recorder.calls == 2
    with pytest.raises(RuntimeError, match="inside"), record_generation(model, 1.0):
        raise RuntimeError("inside")
    assert "generate" not in vars(model)


# -- facts -----------------------------------------------------------------------------------------


def noted(ids: list[list[int]], *, mask: Any = None, log_probs: Any = None) -> Rollout:
    rollout = Rollout([{} for _ in ids])
    rollout.note(([[7, 7]] * len(ids), ids, mask, [""] * len(ids), log_probs, {}), None)
    return rollout


def test_facts_count_tokens_and_weigh_surprisal() -> None:
    ids = [[3, 4, 1], [3, 4, 5, 6]]
    logs = [np.log([0.5, 0.5, 0.5]), np.log([0.25, 1.0, 1.0, 1.0])]
    facts = noted(ids, log_probs=logs).facts(per="token", masked_unless_ending_in=None)
    assert facts[:, :3].tolist() == [[2, 3, 3], [2, 4, 4]]
    np.testing.assert_allclose(facts[:, 3], [np.sqrt(3 * 0.25), 0.75])
    per_sequence = noted(ids, log_probs=logs).facts(per="sequence", masked_unless_ending_in=None)
    np.testing.assert_allclose(per_sequence[:, 3], facts[:, 3] / [3, 4])


def test_facts_leave_tool_tokens_and_truncated_rows_out() -> None:
    ids = [[3, 4, 5, 1], [3, 4, 5, 6], []]
    mask = [[1, 0, 0, 1], [1, 1, 0, 1], []]
    logs = [np.log([0.5, 0.1, 0.1, 0.5])] * 2 + [[]]
    facts = noted(ids, mask=mask, log_probs=logs).facts(per="token", masked_unless_ending_in=(1, 0))
    assert facts[:, :3].tolist() == [[2, 4, 2], [2, 4, 0], [2, 0, 0]]
    np.testing.assert_allclose(facts[0, 3], np.sqrt(2 * 0.25))
    assert np.isnan(facts[1:, 3]).all()


def test_facts_without_log_probs_or_with_holes() -> None:
    ids = [[3, 4, 5, 1]] * 4
    assert np.isnan(noted(ids).facts(per="token", masked_unless_ending_in=None)[:, 3]).all()
    half = np.log(0.5)
    logs = [
        [half, None, half, None],
        [half, float("nan"), half, half],
        [None] * 4,
        [half, half, half, half, half],  # longer than the completion, as a padded record is
    ]
    norm = noted(ids, log_probs=logs).facts(per="token", masked_unless_ending_in=None)[:, 3]
    # Unknown tokens count as typical of the known ones: sqrt(4 x 0.25).
    np.testing.assert_allclose(norm[[0, 1, 3]], 1.0)
    assert np.isnan(norm[2])


def test_facts_round_trip_through_the_gather() -> None:
    facts = noted([[3, 1], [4, 5, 1]]).facts(per="token", masked_unless_ending_in=None)
    found = Rows.from_facts(facts)
    assert found.prompt_tokens.tolist() == [2, 2]
    assert found.completion_tokens.tolist() == found.loss_tokens.tolist() == [2, 3]
    assert np.isnan(found.surprisal).all()


# -- signal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [
        ("sum_then_normalize", "group"),
        ("sum_then_normalize", "batch"),
        ("sum_then_normalize", "none"),
        ("normalize_then_sum", "group"),
    ],
)
@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_signal_has_the_hosts_advantages(
    tmp_path: Path, aggregation: str, scale: str, missing: float
) -> None:
    """Against the advantages that the host computes, for two reward functions with None among them.

    1e-5 relative to advantages of about 1: the host works in float32 and divides by spreads that
    are at least 0.1 here. Where a group is constant the host leaves float dust; ours is exactly 0.
    """
    drawn: dict[str, list[Any]] = {}

    def one(completions: list[str], **kwargs: Any) -> list[Any]:
        return drawn["one"]

    def other(completions: list[str], **kwargs: Any) -> list[Any]:
        return drawn["other"]

    host = host_trainer(
        tmp_path,
        reward=[one, other],
        reward_weights=[0.7, 0.3],
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
        rollout_func=Script(random_completions(16, seed=0)),
        gradient_accumulation_steps=4,
    )
    host.model.train()
    inputs = [dict(row) for row in host.train_dataset.select(range(4)) for _ in range(4)]
    rng = np.random.default_rng(0)
    dead = 0
    for trial in range(12):
        values = rng.choice([0.0, 0.1, 0.5, 1.0], (16, 2))
        if trial % 3 == 0:
            values[4:8] = values[4]  # a constant group
        hole = rng.random((16, 2)) < missing
        for name, column, gaps in zip(("one", "other"), values.T, hole.T, strict=True):
            drawn[name] = [None if gap else float(v) for v, gap in zip(column, gaps, strict=True)]
        expected = host._generate_and_score_completions(inputs)["advantages"].numpy()
        rewards = np.where(hole, np.nan, values).astype(np.float32)
        told = signal(
            rewards,
            np.array([0.7, 0.3], np.float32),
            group=4,
            scale=scale,
            aggregation=aggregation,
        )
        found, gone = told.advantages_PG.ravel(), np.repeat(told.dead_P, 4)
        np.testing.assert_allclose(found[~gone], expected[~gone], atol=1e-5)
        assert np.abs(expected[gone]).max(initial=0) < 1e-3  # dust, over an epsilon of 1e-4
        assert not found[gone].any()
        # Where the host has an advantage beyond a dead group, the row may not count as inert.
        assert not expected[~told.alive_PG.ravel() & ~gone].any()
        dead += int(told.dead_P.sum())
    assert dead or missing


# -- clock -----------------------------------------------------------------------------------------


def test_time_is_counted_once() -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    passes(5)
    clock.enter("train")
    passes(1)
    with clock.running("rollout"):
        passes(2)
        with clock.running("score"):
            passes(4)
        assert clock.phase == "rollout"
    passes(8)
    assert clock.since_last() == {"rollout": 2, "score": 4, "train": 9, "prune": 0}
    clock.enter("idle")
    passes(16)
    assert not any(clock.since_last().values())
    with pytest.raises(KeyError), clock.running("prune"):
        raise KeyError
    assert clock.phase == "idle"


def test_a_prompt_is_shared_only_where_it_is_the_same() -> None:
    """As an environment or a rollout function may give each completion a prompt of its own."""
    facts = noted([[3, 1], [4, 1], [5, 1], [6, 1]]).facts(per="token", masked_unless_ending_in=None)
    rows_N = Rows.from_facts(facts)
    assert rows_N.groups(2).tolist() == [0, 0, 1, 1]  # all have one prompt here
    changed = facts.copy()
    changed[1, 4] += 1
    first = Rows.from_facts(changed).groups(2)
    assert len(set(first[:2].tolist())) == 2
    assert len(set(first[2:].tolist())) == 1
