"""verl's own `main_ppo` on two CPU ranks, pruned: whole loops, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

LIMIT = 400
"""Seconds for a run, which takes about two minutes, most of them for Ray's processes to start."""


def run(folder: Path, *options: str, mode: str = "prune_sync") -> list[dict[str, Any]]:
    """Metrics of every step."""
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder), "MODE": mode}
    environment["PROMPTS"] = "32"  # all of them are seen in every step
    command = ["bash", str(ROOT / "configs/verl/smoke_cpu.sh"), "trainer.val_before_train=False"]
    done = subprocess.run(
        [*command, "trainer.test_freq=-1", *options],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


def test_three_steps_and_a_resumed_one(tmp_path: Path) -> None:
    """Several mini-batches and epochs, with KL; the window of a resumed step is the one it was."""
    options = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
        "trainer.save_freq=2",
    ]
    whole = run(tmp_path, "trainer.total_training_steps=3", *options)
    assert [step["training/global_step"] for step in whole] == [1, 2, 3]
    for step in whole:
        assert step["dppo/prompts/candidates"] == 32
        assert step["dppo/prompts/rolled_out"] == 24
        assert 0.2 < step["dppo/completions/keep"] < 0.9
        assert step["dppo/tokens/trained"] < step["dppo/tokens/generated"]
        assert step["actor/grad_norm"] > 0
        assert "dppo/kept/pg_loss" in step
        assert step["critic/score/mean"] != step["dppo/kept/reward"]  # of all, and of survivors
        dropped = sum(v for k, v in step.items() if k.startswith("dppo/dropped/"))
        assert dropped + step["dppo/completions/keep"] * 24 * 8 == pytest.approx(24 * 8)
    saved = tmp_path / "checkpoints" / "global_step_2"
    assert (saved / "dppo_state.json").is_file()
    # The last step was saved, too; go on from the one before.
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    resume = [*options, "trainer.resume_mode=auto", "trainer.total_training_steps=3"]
    (again,) = run(tmp_path, *resume)
    assert again["training/global_step"] == 3
    assert again["dppo/prompts/weight/max"] == whole[2]["dppo/prompts/weight/max"]


def test_completions_alone_with_a_rate_that_is_chosen(tmp_path: Path) -> None:
    steps = run(
        tmp_path,
        "prune.completion_keep=auto",
        "prune.prompt_keep=1.0",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "trainer.total_training_steps=2",
    )
    assert [step["dppo/auto/rate"] for step in steps] == [0.5, 0.5]
    assert all("dppo/prompts/keep" not in step for step in steps)
    assert steps[0]["dppo/time/train"] > 0


def test_a_shadow_decides_and_trains_on_everything(tmp_path: Path) -> None:
    """The update, verl's own, is told of as many rows as were generated."""
    steps = run(
        tmp_path,
        "prune.completion_keep=shadow:0.25",
        "prune.prompt_keep=1.0",
        "trainer.total_training_steps=2",
    )
    for step in steps:
        assert step["dppo/cost/keep"] == pytest.approx(0.25, abs=0.1)
        assert step["dppo/tokens/trained"] < step["dppo/tokens/generated"]
        assert step["dppo/efficiency/predicted"] > 0
        assert "actor/pg_loss" in step
        assert not any(name.startswith("dppo/kept/pg") for name in step)


def test_a_step_without_any_signal_trains_on_nothing(tmp_path: Path) -> None:
    """All rewards are 0: the optimizer steps on zero gradients, as it would for the full batch."""
    reward = tmp_path / "nothing.py"
    reward.write_text("def compute_score(*args, **kwargs):\n    return 0.0\n")
    steps = run(
        tmp_path,
        f"reward.custom_reward_function.path={reward}",
        "prune.prompt_keep=1.0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.total_training_steps=2",
    )
    for step in steps:
        assert step["dppo/completions/keep"] == 0
        assert step["actor/grad_norm"] == 0
        assert step["critic/score/max"] == 0
        assert step["dppo/dropped/all_wrong"] == 32 * 8


def test_off_runs_verls_own_step(tmp_path: Path) -> None:
    off = ["prune.completion_keep=1.0", "prune.prompt_keep=1.0", "trainer.total_training_steps=1"]
    (step,) = run(tmp_path / "off", *off)
    assert not any(name.startswith("dppo/") for name in step)
    assert "actor/pg_loss" in step


def test_an_unknown_option_is_named_before_workers_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"prune\.completion_kep is no option; did you mean"):
        run(tmp_path, "+prune.completion_kep=0.5")
