"""Runs of the trainer in several gloo processes, on completions that do not depend on their number.

A case is options of `DPPOConfig`, plus

* `batch`: rows of a micro-step over all processes (8);
* `prompts` (64), `stream`: of the data set; `reference`: where the model is; `resume`: from where;
* `forced`: kept rows per generation, one list of flags after the other, whatever is drawn;
* `breaks`: `{rank: what}`, "reward" from its second call on or "seed";
* `sharded`: parameters and gradients sharded by `fully_shard`, in place of DDP;
* `evaluates`: evaluation after every step.
"""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from dppo.errors import DPPOError
from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOTrainer

from .conftest import alternating_reward, config, tiny_model

LIMIT = 150
"""Seconds for a launch, far above what it takes: a hang fails instead of stalling the suite."""


def scripted(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that follow from the prompt and the place in the group."""
    tokenizer, group = load_builtin_tokenizer(), trainer.num_generations
    first = trainer.accelerator.process_index * len(prompts)
    result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
    for place, prompt in enumerate(prompts, start=first):
        rng = np.random.default_rng([sum(map(ord, prompt)), place % group])
        digits = rng.integers(3, len(tokenizer), int(rng.integers(1, 6))).tolist()
        result["prompt_ids"].append(tokenizer(prompt)["input_ids"])
        result["completion_ids"].append([*digits, tokenizer.eos_token_id])
    return result


class Breaking:
    """A reward that is down from its second call on."""

    __name__ = "breaking"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("the judge is down")
        return alternating_reward(completions)


def force(run: Any, kept: list[list[bool]]) -> None:
    """Keep these rows, generation after generation, with weight 2 each."""
    select = run.pruner.select_completions

    def selected(rewards: Any, *, step: int, **given: Any) -> Any:
        choice = select(rewards, step=step, **given)
        flags = np.array(kept[step % len(kept)]).reshape(choice.kept.shape)
        pi = np.full(flags.shape, 0.5)
        return replace(choice, kept=flags, pi=pi, pi_completion=pi, weight=flags / pi)

    run.pruner.select_completions = selected


def shard(run: Any, model: Any) -> None:
    """In place of DDP, which cannot hold sharded parameters."""
    run.accelerator.prepare_model = lambda given, **kwargs: given
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())


def train(folder: str, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_train(folder, world, dict(case)) for case in cases]


def _train(folder: str, world: int, case: dict[str, Any]) -> dict[str, Any]:
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, **case}
    rows = options.pop("batch", 8)
    assert rows % world == 0
    options["per_device_train_batch_size"] = rows // world
    options["adam_epsilon"] = 1e-3  # with 1e-8 Adam makes whole steps of float32 dust
    own = {
        name: options.pop(name, None)
        for name in ("reference", "resume", "forced", "breaks", "sharded", "evaluates")
    }
    prompts: Any = sorting_dataset(options.pop("prompts", 64), seed=0)
    if options.pop("stream", False):
        prompts = prompts.to_iterable_dataset()
    if own["evaluates"]:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
        options["num_generations_eval"] = 2
    args = config(options.pop("output_dir", folder), **options)
    rank = args.process_index
    broken = (own["breaks"] or {}).get(rank)
    if broken == "seed":
        args.seed = 1
    model: Any = own["reference"] or tiny_model()
    if own["sharded"]:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    run = DPPOTrainer(
        model,
        Breaking() if broken == "reward" else alternating_reward,
        args,
        prompts,
        sorting_dataset(8, seed=1) if own["evaluates"] else None,
        processing_class=load_builtin_tokenizer(),
        rollout_func=scripted,
    )
    assert run.accelerator.num_processes == world
    if own["forced"]:
        force(run, own["forced"])
    if own["sharded"]:
        shard(run, model)
    began, error = time.monotonic(), None
    try:
        run.train(resume_from_checkpoint=own["resume"])
    except DPPOError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {**_seen(run), "error": error, "seconds": time.monotonic() - began}


def _seen(run: Any) -> dict[str, Any]:
    policy = run.accelerator.unwrap_model(run.model)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in policy.parameters()]
    logs = [log for log in run.state.log_history if "loss" in log]
    return {
        "parameters": torch.cat([p.detach().flatten() for p in whole]),
        "kept": [log.get("dppo/completions/keep") for log in logs],  # one per generation
        "loss": [log["loss"] for log in logs],
        "entropy": [log.get("entropy", 0.0) for log in logs],
        "imbalance": [log.get("dppo/ranks/imbalance") for log in logs],
        "evaluations": sum("eval_loss" in log for log in run.state.log_history),
    }


def child(rank: int, folder: str, world: int, port: int, cases: list[dict[str, Any]]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        TRL_EXPERIMENTAL_SILENCE="1",
        OMP_NUM_THREADS="1",  # else accelerate sets as many threads as there are cores
    )
    torch.set_num_threads(1)
    if world > 1 and any(case.get("sharded") for case in cases):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    torch.save(train(folder, world, cases), Path(folder) / f"rank{rank}.pt")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a peer that is gone would break the other's last exchange
        time.sleep(1)
    os._exit(0)  # gloo may wait forever for its peers when the interpreter ends


def launch(
    folder: Path, world: int, cases: list[dict[str, Any]], *, limit: float = LIMIT
) -> list[list[dict[str, Any]]]:
    """Results of the cases, by rank; fails if they do not end in time."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=child, args=(rank, str(folder), world, port, cases))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    ends = time.monotonic() + limit
    for process in ranks:
        process.join(max(ends - time.monotonic(), 0))
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
    assert not hanging, f"ranks {hanging} still run after {limit:.0f} s"
    assert [process.exitcode for process in ranks] == [0] * world
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
