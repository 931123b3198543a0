"""What `DPPOTrainer` logs: `dppo/*`, and the host's own names with full-batch estimates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dppo.pruner import DROP_REASONS

_OF_A_BATCH = ("kl", "entropy", "cispo_clip_ratio", "policy_loss")
_OF_A_BATCH_PREFIX = ("clip_ratio/", "vespo/")
"""The host's metrics that are statistics of the rows it was given. All move to `dppo/kept/*`; those
that `full_batch.host_metrics` can estimate come back under their own names."""


@contextmanager
def of_survivors(trainer: Any) -> Iterator[None]:
    """What the host logs in this block about its rows goes to `dppo/kept/*`."""
    logged = trainer._metrics["train"]
    before = {name: len(values) for name, values in logged.items()}
    yield
    for name in [n for n in logged if n in _OF_A_BATCH or n.startswith(_OF_A_BATCH_PREFIX)]:
        new = logged[name][before.get(name, 0) :]
        del logged[name][before.get(name, 0) :]
        if not logged[name]:
            del logged[name]
        logged[f"dppo/kept/{name}"].extend(new)


@contextmanager
def discarded(trainer: Any) -> Iterator[None]:
    """What the host logs in this block is forgotten."""
    logged = trainer._metrics["train"]
    before = {name: len(values) for name, values in logged.items()}
    yield
    for name in list(logged):
        del logged[name][before.get(name, 0) :]
        if not logged[name]:
            del logged[name]


def gathered(trainer: Any, values_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of all ranks, in global order."""
    local = torch.from_numpy(values_B).to(trainer.accelerator.device)
    return trainer.accelerator.gather(local).cpu().numpy()


def log_decision(trainer: Any) -> None:
    """Metrics of a generation's pruning, the same on all ranks."""
    decision, logged = trainer._decision, trainer._metrics["train"]
    of_pruner = trainer.pruner.metrics()
    for name, value in of_pruner.items():
        logged[f"dppo/{name}"].append(value)
    generated = int(decision.rows.completion_tokens.sum())
    skipped = sum(decision.tokens_by_reason.values())
    logged["dppo/tokens/generated"].append(generated)
    logged["dppo/tokens/trained"].append(generated - skipped)
    for reason in DROP_REASONS:
        counts = [choice.dropped[reason] for choice in decision.choices]
        logged[f"dppo/dropped/{reason}"].append(sum(counts) / len(counts))
    logged["dppo/tokens/density_padded"].append(decision.padded_density)
    logged["dppo/pairs/attended_padded"].append(decision.padded_attended)
    logged["dppo/reward/ht"].append(decision.reward)
    if trainer.accelerator.num_processes > 1:
        logged["dppo/ranks/imbalance"].append(decision.imbalance)
    for name, share in decision.group_shares.items():
        logged[f"dppo/groups/{name}"].append(share)
    kept = decision.kept_rewards
    if kept.size and trainer.args.prunes:
        logged["dppo/kept/reward"].append(float(kept.mean()))
        logged["dppo/kept/reward_std"].append(float(kept.std(ddof=1)) if kept.size > 1 else 0.0)
    if trainer._rollout_file is not None:
        trainer._rollout_file.add(decision)
    if trainer._auto is not None:
        rate = trainer._basis.keep
        for name, value in trainer._auto.metrics(rate).items():
            logged[f"dppo/auto/{name}"].append(value)
    if decision.window is not None:
        _log_prompts(trainer, decision)
    trainer._notices.live(of_pruner["completions/live"], decision.choices[0].dropped)
    per_step = decision.kept_per_micro_step() * trainer.args.gradient_accumulation_steps
    trainer._notices.few(per_step)
    if trainer.args.prunes:
        trainer._totals.add(decision, of_pruner.get("weight/ess"))
    else:
        trainer._totals.add_unpruned(decision.rows.completion_tokens, group=trainer.num_generations)
    if trainer.log_completions:
        choice = decision.choices[0]
        why = [DROP_REASONS[i] if i >= 0 else "" for i in choice.reason.ravel().tolist()]
        trainer._logs["extra"]["weight"].extend(choice.weight.ravel().tolist())
        trainer._logs["extra"]["dropped"].extend(why)


def _log_prompts(trainer: Any, decision: Any) -> None:
    """Metrics of the window that the prompts of a generation were drawn from."""
    logged, window = trainer._metrics["train"], decision.window
    candidates, rolled_out = len(window.ids_M), len(window.ids)
    values = {
        "keep": rolled_out / candidates,
        "candidates": candidates,
        "rolled_out": rolled_out,
        "sampled_out": candidates - rolled_out,
        "live": float(decision.choices[0].live.any(axis=1).mean()),
        "visited": window.visited,
        "weight/max": float((1 / window.pi).max()),
    }
    for name, value in values.items():
        logged[f"dppo/prompts/{name}"].append(value)


def log_unweighted(trainer: Any, local_rows: int) -> None:
    """Keep the table of completions rectangular where nothing was pruned (evaluation)."""
    if trainer.log_completions and (trainer.args.decides or trainer._plans):
        count = local_rows * trainer.accelerator.num_processes
        trainer._logs["extra"]["weight"].extend([1.0] * count)
        trainer._logs["extra"]["dropped"].extend([""] * count)


def log_times(trainer: Any) -> None:
    """Seconds per phase of an optimizer step that is over."""
    logged = trainer._metrics["train"]
    spent = trainer.clock.since_last()
    for phase, seconds in spent.items():
        logged[f"dppo/time/{phase}"].append(seconds)
    laid = trainer._density
    if laid["computed"]:
        logged["dppo/tokens/density"].append(laid["real"] / laid["computed"])
        if laid["pairs"]:
            logged["dppo/pairs/attended"].append(laid["attended"] / laid["pairs"])
        logged["dppo/forwards"].append(laid["forwards"])
        logged["dppo/forwards_padded"].append(trainer.args.gradient_accumulation_steps)
    laid.clear()
    of_pruner = trainer.pruner.metrics()
    if not trainer.args.decides or "variance/inflation" not in of_pruner:
        return  # nothing decided, or a rule without inclusion probabilities
    kept = of_pruner["cost/keep"]
    trainer._times.add(
        fixed=spent["rollout"] + spent["score"],
        train=spent["train"],
        kept=kept if trainer.args.prunes else 1.0,
    )
    efficiency = trainer._times.efficiency(of_pruner["variance/inflation"], kept)
    if efficiency is not None:
        logged["dppo/efficiency/predicted"].append(efficiency)


def log_step(trainer: Any) -> None:
    """Estimates over an optimizer step whose last micro-step has run."""
    logged = trainer._metrics["train"]

    def over_ranks(values: list[float]) -> list[float]:
        local = torch.tensor(values, dtype=torch.float32, device=trainer.accelerator.device)
        return trainer.accelerator.reduce(local, reduction="sum").tolist()

    ranks = trainer.accelerator.num_processes
    logged["dppo/loss_ht"].append(over_ranks([float(trainer._window_loss)])[0] / ranks)
    for name, value in trainer._averages.means(over_ranks).items():
        logged[name].append(value)
        if name == "kl":
            trainer._notices.first_kl(value)


def log_grad_norm(trainer: Any, norm: float) -> None:
    """How much gradient clipping took, which pruning makes bite more often."""
    limit = trainer.args.max_grad_norm
    factor = 1.0 if limit <= 0 or norm <= limit else limit / norm
    logged = trainer._metrics["train"]
    logged["dppo/clip/factor"].append(factor)
    trainer._notices.zero_loss(float(trainer._window_loss), norm)
    trainer._window_loss = 0.0
