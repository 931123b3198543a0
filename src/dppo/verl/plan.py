"""One step decided: who is trained on, in which PPO mini-batch of which epoch, with which factor.

numpy only. A step looks at M candidate prompts x G completions, in B mini-batches of M G / B rows
each; which mini-batch a row belongs to is drawn before any selection, for candidates that are not
rolled out, too. Each (epoch, mini-batch) is an optimizer step with an independent draw. Its
gradient is

    sum over kept rows of  (w_i / D_b) d l_i / d theta

D_b being what verl divides by without pruning: rows, or the loss tokens, of the whole mini-batch.

Suffixes: `_N` the M x G rows of all candidates, `_PG` prompts that were rolled out x group, `_K`
kept rows of an optimizer step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.estimator.designs import generator
from dppo.estimator.sizes import DEFAULT_ADVANTAGE_FLOOR
from dppo.packing.spread import PADDING, spread
from dppo.pruner import Pruner
from dppo.types import CompletionChoice, Selection

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rollouts:
    """What a step rolled out, arrays of shape (P, G); NaN or 0 where a rollout failed."""

    scores: Floats
    advantages: Floats
    prompt_tokens: Ints
    response_tokens: Ints
    loss_tokens: Ints
    surprisal: Floats | None
    """None: the engine gave no log-probs."""
    window: Selection | None = None
    """Over the M candidates, whose kept ones these P prompts are; None: all were rolled out."""


@dataclass(frozen=True)
class Sizes:
    """Of a step."""

    mini_batches: int
    epochs: int
    ranks: int
    token_mean: bool
    """Whether losses are divided by tokens; else by rows."""
    other_terms: bool
    """Whether a term of the loss (KL, entropy) acts where the advantage is 0."""


@dataclass(frozen=True)
class OptimizerStep:
    """Rows of one mini-batch in one epoch."""

    rows_K: Ints
    """Flat index into (P, G)."""
    factor_K: Floats
    """w / D."""


@dataclass(frozen=True)
class Plan:
    """A step."""

    choices: list[CompletionChoice]
    """One for every epoch."""
    steps: list[OptimizerStep]
    """In the order in which they are made."""
    rows: int
    """Of a mini-batch, before pruning."""

    @property
    def union(self) -> Ints:
        """Rows that any step trains on, in order."""
        kept = np.concatenate([np.zeros(0, np.int64), *(step.rows_K for step in self.steps)])
        return np.unique(kept)


def decide(
    pruner: Pruner, rollouts: Rollouts, sizes: Sizes, *, step: int, keep: float | None = None
) -> Plan:
    """Choose and lay out.

    Args:
        pruner: Makes the draws.
        rollouts: All that was rolled out.
        sizes: Of the step.
        step: Its number.
        keep: Rate in place of the configured one.
    """
    shape, window = rollouts.scores.shape, rollouts.window
    candidates = shape[0] if window is None else window.kept.size
    of_all = _mini_batch_of_rows(pruner.seed, step, candidates * shape[1], sizes.mini_batches)
    here = np.ones(shape[0], bool) if window is None else window.kept
    batch_PG = of_all.reshape(candidates, shape[1])[here]
    masked_PG = rollouts.loss_tokens == 0
    choices = [
        pruner.select_completions(
            rollouts.scores,
            step=step,
            advantages_PG=rollouts.advantages,
            prompts=window,
            surprisal_PG=rollouts.surprisal,
            lengths_PG=rollouts.prompt_tokens + rollouts.response_tokens,
            live=np.ones(shape) if sizes.other_terms else rollouts.advantages != 0,
            iteration=epoch,
            optimizer_step_PG=batch_PG,
            masked_PG=masked_PG,
            advantage_floor=DEFAULT_ADVANTAGE_FLOOR if sizes.other_terms else 0.0,
            keep=keep,
        )
        for epoch in range(sizes.epochs)
    ]
    rows = candidates * shape[1] // sizes.mini_batches
    over_B = np.full(sizes.mini_batches, float(rows))
    if sizes.token_mean:
        weight_P = np.ones(shape[0]) if window is None else 1 / window.pi[here]
        tokens = (rollouts.loss_tokens * weight_P[:, None]).ravel()
        over_B = np.bincount(batch_PG.ravel(), weights=tokens, minlength=sizes.mini_batches)
        over_B = np.maximum(over_B, 1.0)
    steps = []
    for choice in choices:
        for number in range(sizes.mini_batches):
            rows_K = np.flatnonzero((choice.kept & (batch_PG == number)).ravel())
            factor_K = choice.weight.ravel()[rows_K] / over_B[number]
            steps.append(OptimizerStep(rows_K, factor_K))
    return Plan(choices, steps, rows)


def _mini_batch_of_rows(seed: int, step: int, rows: int, count: int) -> Ints:
    """Shape (N,). Drawn from the stream "shuffle"."""
    place_N = np.empty(rows, dtype=np.int64)
    key_N = generator(seed, step, stream="shuffle").random(rows)
    place_N[np.argsort(key_N, kind="stable")] = np.arange(rows)
    return place_N // (rows // count)


@dataclass(frozen=True)
class Layout:
    """Rows of an update as verl's workers take them: rank by rank, each rank's steps in order."""

    rows: Ints
    """Shape (W * S * R,). Flat index into (P, G), or `PADDING`."""
    factor: Floats
    """0 for padding."""
    kept: Ints
    """Rows of the step that are no padding."""
    step_rows: int
    """Rows of a step over all ranks, W * R."""


def layout(plan: Plan, length_N: Ints, ranks: int, *, multiple: int = 1) -> Layout:
    """Every step padded to as many rows, its tokens about even over the ranks.

    Args:
        plan: What is trained on.
        length_N: Tokens of each row of (P, G), flat.
        ranks: Data-parallel ranks, W.
        multiple: Of which a rank's rows in a step must be one.
    """
    tables = []
    for step in plan.steps:
        here = np.zeros(length_N.size, dtype=np.bool_)
        here[step.rows_K] = True
        bins = spread(
            here,
            -length_N,
            length_N,
            ranks=ranks,
            micro_batch=max(length_N.size, 1),
            room=None,
            most=1,
            at_least=1,
        )
        tables.append(bins[0])
    width = -(-max(table.shape[1] for table in tables) // multiple) * multiple
    laid = np.full((ranks, len(tables), width), PADDING, dtype=np.int64)
    factor, kept = np.zeros(laid.shape), np.empty_like(laid)
    of_row = np.zeros(length_N.size)
    for number, (step, table) in enumerate(zip(plan.steps, tables, strict=True)):
        laid[:, number, : table.shape[1]] = table
        of_row[step.rows_K] = step.factor_K
        real = laid[:, number] != PADDING
        factor[:, number] = np.where(real, of_row[laid[:, number]], 0.0)
        kept[:, number] = real.sum()
    return Layout(laid.ravel(), factor.ravel(), kept.ravel(), ranks * width)


def metrics_of(plan: Plan, rollouts: Rollouts) -> dict[str, Any]:
    """`dppo/*` of a step, as in TRL, without what the pruner says itself."""
    tokens = rollouts.response_tokens
    kept = np.mean([c.kept for c in plan.choices], axis=0)
    generated = float(tokens.sum())
    found: dict[str, Any] = {
        "tokens/generated": generated,
        "tokens/trained": float((tokens * kept).sum()),
        "reward/ht": _reward(rollouts),
    }
    of_kept = rollouts.scores[plan.choices[0].kept]
    if of_kept.size:
        found["kept/reward"] = float(of_kept.mean())
        found["kept/reward_std"] = float(of_kept.std(ddof=1)) if of_kept.size > 1 else 0.0
    for reason in plan.choices[0].dropped:
        counts = [choice.dropped[reason] for choice in plan.choices]
        found[f"dropped/{reason}"] = sum(counts) / len(counts)
    window = rollouts.window
    if window is not None:
        candidates, rolled_out = window.kept.size, int(window.kept.sum())
        found |= {
            "prompts/keep": rolled_out / candidates,
            "prompts/candidates": candidates,
            "prompts/rolled_out": rolled_out,
            "prompts/sampled_out": candidates - rolled_out,
            "prompts/live": float(plan.choices[0].live.any(axis=1).mean()),
            "prompts/weight/max": float((1 / window.pi[window.kept]).max()),
        }
    return found


def _reward(rollouts: Rollouts) -> float:
    """Estimate of the candidates' mean reward."""
    scored = ~np.isnan(rollouts.scores)
    count_P = scored.sum(axis=1)
    mean_P = np.where(scored, rollouts.scores, 0.0).sum(axis=1) / np.maximum(count_P, 1)
    window = rollouts.window
    weight_P = np.ones(count_P.size) if window is None else 1 / window.pi[window.kept]
    prompts = count_P.size if window is None else window.kept.size
    judged = prompts - float(weight_P[count_P == 0].sum())
    return float((weight_P * mean_P).sum()) / judged if judged > 0 else float("nan")
