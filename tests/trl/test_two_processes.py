"""Two gloo processes decide and train as one does, and end, whatever is left on either.

Completions are scripted (a function of prompt and place in the group), so that one process and two
have the same. Where one optimizer step takes a whole generation the draws are the same too, and
so must be the parameters: to 1e-6, since float32 sums are split differently over ranks. Where a
generation feeds several steps, rows stay with their rank, so the steps differ with the number of
ranks; there the runs must end, and the ranks agree.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOTrainer

from .conftest import alternating_reward, config, tiny_model

LIMIT = 120
"""Seconds for a launch, far above the ten it takes: a hang fails instead of stalling the suite."""


def scripted(prompts: list[str], trainer: Any) -> dict[str, Any]:
    tokenizer = load_builtin_tokenizer()
    first = trainer.accelerator.process_index * len(prompts)
    result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
    for place, prompt in enumerate(prompts, start=first):
        rng = np.random.default_rng([sum(map(ord, prompt)), place % 4])
        digits = rng.integers(3, len(tokenizer), int(rng.integers(1, 6))).tolist()
        result["prompt_ids"].append(tokenizer(prompt)["input_ids"])
        result["completion_ids"].append([*digits, tokenizer.eos_token_id])
    return result


def train(folder: str, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        options = {"max_steps": 4, "gradient_accumulation_steps": 2, **case}
        options["per_device_train_batch_size"] = 8 // world
        options["adam_epsilon"] = 1e-3  # with 1e-8 Adam makes whole steps of float32 dust
        reference, resume = options.pop("reference", None), options.pop("resume", None)
        prompts = sorting_dataset(options.pop("prompts", 64), seed=0)
        if options.pop("stream", False):
            prompts = prompts.to_iterable_dataset()
        run = DPPOTrainer(
            tiny_model() if reference is None else reference,
            alternating_reward,
            config(options.pop("output_dir", folder), **options),
            prompts,
            processing_class=load_builtin_tokenizer(),
            rollout_func=scripted,
        )
        assert run.accelerator.num_processes == world
        run.train(resume_from_checkpoint=resume)
        policy = run.accelerator.unwrap_model(run.model)
        logs = run.state.log_history[:4]
        results.append(
            {
                "parameters": torch.cat([p.detach().flatten() for p in policy.parameters()]),
                "kept": [log.get("dppo/completions/keep") for log in logs],  # one per generation
                "loss": [log["loss"] for log in logs],
                "entropy": [log.get("entropy", 0.0) for log in logs],
            }
        )
    return results


def child(rank: int, folder: str, world: int, port: int, cases: list[dict[str, Any]]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        TRL_EXPERIMENTAL_SILENCE="1",
    )
    torch.set_num_threads(1)
    torch.save(train(folder, world, cases), Path(folder) / f"rank{rank}.pt")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a peer that is gone would break the other's last exchange
        time.sleep(1)
    os._exit(0)  # gloo may wait forever for its peers when the interpreter ends


def launch(folder: Path, world: int, port: int, cases: list[dict[str, Any]]) -> list[Any]:
    folder.mkdir()
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=child, args=(rank, str(folder), world, port, cases))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
    assert not hanging, f"ranks {hanging} still run after {LIMIT} s"
    assert [process.exitcode for process in ranks] == [0] * world
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def port() -> int:
    return 20000 + os.getpid() % 20000


def test_two_processes_train_what_one_trains(tmp_path: Path, port: int) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    cases = [
        {"completion_keep": 0.5, "loss_type": "dapo"},
        {"completion_keep": 0.5, "loss_type": "dapo", "packing": "varlen"},
        {"completion_keep": 0.25, "loss_type": "grpo"},
        {"completion_keep": 0.5, "loss_type": "dr_grpo", "sampling_design": "poisson"},
        {
            "completion_keep": 0.3,
            "loss_type": "grpo",
            "beta": 0.1,
            "packing": "varlen",
            "reference": str(tmp_path / "model"),
        },
        {"prompt_keep": 0.5, "loss_type": "dr_grpo", "prompts": 16},  # 2 generations an epoch
        {"prompt_keep": 0.5, "loss_type": "dapo", "prompts": 16, "stream": True},
    ]
    (alone,) = launch(tmp_path / "one", 1, port, cases)
    both = launch(tmp_path / "two", 2, port + 1, cases)
    for case, one, first, second in zip(cases, alone, *both, strict=True):
        assert one["kept"] == first["kept"] == second["kept"], case
        assert (one["parameters"] - first["parameters"]).abs().max() < 1e-6, case
        assert torch.equal(first["parameters"], second["parameters"]), case
        for name in ("loss", "entropy"):  # estimates over both ranks
            assert np.allclose(one[name], first[name], atol=1e-5), (case, name)


def test_whatever_is_left_two_processes_end_and_agree(tmp_path: Path, port: int) -> None:
    cases = [
        {"steps_per_generation": 4, "num_iterations": 2, "completion_keep": 0.2},
        {"steps_per_generation": 3, "num_iterations": 2, "completion_keep": 0.1},
        {"steps_per_generation": 3, "num_iterations": 2, "completion_keep": 0.1, "packing": "auto"},
        {"steps_per_generation": 3, "completion_keep": 1.0, "packing": "auto"},
        {"completion_keep": "auto", "max_steps": 12},  # by time, which differs between ranks
        {"steps_per_generation": 1, "completion_keep": 0.1, "loss_type": "bnpo"},
        {"steps_per_generation": 2, "completion_rule": "threshold", "loss_type": "luspo"},
        {"steps_per_generation": 3, "prompt_keep": 0.5, "completion_keep": 1.0, "prompts": 12},
    ]
    first, second = launch(tmp_path / "two", 2, port + 2, cases)
    for case, a, b in zip(cases, first, second, strict=True):
        assert torch.equal(a["parameters"], b["parameters"]), case
        assert torch.isfinite(a["parameters"]).all(), case
        assert a["kept"] == b["kept"], case


def test_two_processes_resume_inside_a_generation(tmp_path: Path, port: int) -> None:
    """Two generations of four steps; each rank restores its part of the second."""
    whole = {
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 8,
        "prompt_keep": 0.5,
        "packing": "auto",
        "prompts": 16,
        "save_strategy": "steps",
        "save_steps": 1,
        "output_dir": str(tmp_path / "run"),
    }
    resumed = {**whole, "resume": str(tmp_path / "run" / "checkpoint-5"), "save_strategy": "no"}
    first, second = launch(tmp_path / "two", 2, port + 3, [whole, resumed])
    assert torch.equal(first[0]["parameters"], first[1]["parameters"])
    assert torch.equal(first[1]["parameters"], second[1]["parameters"])
