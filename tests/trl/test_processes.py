"""Several gloo processes decide and train as one does, and end, whatever is left on any.

Completions follow from prompt and place in the group, so that any number of processes has the
same. Draws, and which optimizer step trains a row, do not depend on that number either; so
parameters must be equal to 1e-6: float32 sums are only split differently over ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .conftest import tiny_model
from .processes import launch

CLOSE = 1e-6


def flags(*counts: int) -> list[bool]:
    """So many kept rows of every six."""
    return [i < count for count in counts for i in range(6)]


UNEVEN: dict[str, Any] = {
    "batch": 12,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 5,
    # Rolled out on two ranks: 5 and 1 survivors, 4 and 0, none, 6 and 2; on three other shares.
    "forced": [flags(5, 1), flags(4, 0), flags(0, 0), flags(6, 2), flags(1, 5)],
}


def alike(alone: list[Any], several: list[list[Any]], cases: list[dict[str, Any]]) -> None:
    for number, case in enumerate(cases):
        one, ranks = alone[number], [of_rank[number] for of_rank in several]
        assert one["error"] is None, case
        assert all(found["kept"] == one["kept"] for found in ranks), case
        for found in ranks:
            gap = (one["parameters"] - found["parameters"]).abs().max()
            assert gap < CLOSE, (case, float(gap))
            assert torch.equal(ranks[0]["parameters"], found["parameters"]), case
            for name in ("loss", "entropy"):  # estimates over all ranks
                assert np.allclose(one[name], found[name], atol=1e-5), (case, name)


def test_one_two_and_three_processes_train_the_same(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    with_kl = {"beta": 0.1, "reference": str(tmp_path / "model")}
    cases: list[dict[str, Any]] = [
        {**UNEVEN, "loss_type": loss, **kl, "packing": packing, **room}
        for loss, packing, room in (
            ("grpo", "none", {}),
            ("dapo", "varlen", {"packing_capacity": 20}),  # 3 bins and 1, if rows stayed
            ("dr_grpo", "bucket", {}),
        )
        for kl in ({}, with_kl)
    ]
    cases += [
        {"batch": 12, "max_steps": 5, "completion_keep": 0.5, "loss_type": "dapo"},
        {"batch": 12, "max_steps": 5, "completion_keep": 0.25, "loss_type": "grpo", **with_kl},
        # A generation of two optimizer steps and two passes; prompts pruned; a stream.
        {
            "batch": 12,
            "steps_per_generation": 4,
            "num_iterations": 2,
            "completion_keep": 0.5,
            "loss_type": "grpo",
            "packing": "varlen",
        },
        {"batch": 12, "prompt_keep": 0.5, "loss_type": "dr_grpo", "prompts": 24},
        {
            "batch": 12,
            "prompt_keep": 0.5,
            "loss_type": "dapo",
            "prompts": 24,
            "stream": True,
            "sampling_design": "poisson",
        },
    ]
    (alone,) = launch(tmp_path / "one", 1, cases)
    alike(alone, launch(tmp_path / "two", 2, cases), cases)
    alike(alone, launch(tmp_path / "three", 3, cases), cases)


def test_whatever_is_left_two_processes_end_and_agree(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"steps_per_generation": 4, "num_iterations": 2, "completion_keep": 0.2},
        {"steps_per_generation": 3, "num_iterations": 2, "completion_keep": 0.1, "packing": "auto"},
        {"steps_per_generation": 3, "completion_keep": 1.0, "packing": "auto"},
        {"completion_keep": "auto", "max_steps": 12},  # by time, which differs between ranks
        {"steps_per_generation": 1, "completion_keep": 0.1, "loss_type": "bnpo"},
        {"steps_per_generation": 2, "completion_rule": "threshold", "loss_type": "luspo"},
        {"steps_per_generation": 3, "prompt_keep": 0.5, "completion_keep": 1.0, "prompts": 12},
        {"evaluates": True, "completion_keep": 0.3, "log_completions": True},
    ]
    ranks = launch(tmp_path / "two", 2, cases)
    for case, a, b in zip(cases, *ranks, strict=True):
        assert a["error"] is None, (case, a["error"])
        assert torch.equal(a["parameters"], b["parameters"]), case
        assert torch.isfinite(a["parameters"]).all(), case
        assert a["kept"] == b["kept"], case
        assert a["imbalance"] == b["imbalance"], case
    assert ranks[0][-1]["evaluations"] == 4


def test_one_failing_rank_stops_all(tmp_path: Path) -> None:
    ranks = launch(
        tmp_path / "three",
        3,
        [
            {"batch": 12, "breaks": {1: "reward"}},
            {"batch": 12, "breaks": {2: "seed"}},
            {"batch": 12, "completion_keep": 0.5},  # and the processes are fit for another run
        ],
    )
    rewards, seeds, sound = ([of_rank[number] for of_rank in ranks] for number in range(3))
    assert all(found["seconds"] < 20 for found in (*rewards, *seeds))
    assert rewards[1]["error"].startswith("RewardError: reward function 'breaking' failed")
    for rank in (0, 2):
        assert rewards[rank]["error"].startswith(
            "RankError: rank 1 failed, so all stop: RewardError: reward function 'breaking' failed"
        )
        assert "the judge is down" in rewards[rank]["error"]
    for found in seeds:
        assert "RankError: ranks do not agree on which completions to train on" in found["error"]
        assert "ranks [0, 1] have" in found["error"]
        assert "ranks [2] have" in found["error"]
    assert [found["error"] for found in sound] == [None] * 3


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, before: int, after: int
) -> None:
    """Inside a generation of four optimizer steps, too; with other accumulation, the same batch."""
    many: dict[str, Any] = {
        "batch": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 8,
        "prompt_keep": 0.5,
        "packing": "auto",
        "loss_type": "grpo",
        "prompts": 16,
        "output_dir": str(tmp_path / "run"),
    }
    saving = {"save_strategy": "steps", "save_steps": 1}
    few = {**many, "batch": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    resumed = [{**c, "resume": str(tmp_path / "run" / "checkpoint-5")} for c in (many, few)]
    whole = launch(tmp_path / "before", before, [{**many, **saving}])
    again = launch(tmp_path / "same", before, resumed[:1])
    for of_rank in again:
        assert torch.equal(of_rank[0]["parameters"], whole[0][0]["parameters"])
    for of_rank in launch(tmp_path / "after", after, resumed):
        for found, case in zip(of_rank, resumed, strict=True):
            assert found["error"] is None, (case, found["error"])
            gap = (found["parameters"] - whole[0][0]["parameters"]).abs().max()
            assert gap < CLOSE, (case, float(gap))
            assert found["kept"][-1] == whole[0][0]["kept"][-1]


def test_sharded_parameters_train_as_whole_ones(tmp_path: Path) -> None:
    """`fully_shard` leaves no rank a whole parameter or gradient."""
    cases: list[dict[str, Any]] = [
        {"loss_type": loss, "packing": packing, "completion_keep": 0.5}
        for loss, packing in (("dapo", "none"), ("grpo", "varlen"))
    ]
    (alone,) = launch(tmp_path / "one", 1, cases)
    alike(alone, launch(tmp_path / "two", 2, [{**c, "sharded": True} for c in cases]), cases)
