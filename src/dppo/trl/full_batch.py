"""What the host would have logged for the full batch, estimated from the survivors.

Survivors are high-surprisal by design, so their plain means are not those of the batch. Each
quantity that the host logs as a mean over tokens (or rows) is estimated as

    sum over kept rows of  w_i x_i  /  (tokens or rows of the unpruned optimizer step)

which is unbiased as the gradient is. Entropy and KL are means over the *live* rows: inert ones are
never run through the model, so nothing is known of theirs.

Suffixes: `_R` rows of a micro-batch, `_T` tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dppo.estimator.weights import loss_denominator

LIVE_TOKENS, ALL_TOKENS, ALL_ROWS = "live_tokens", "tokens", "rows"


@dataclass(frozen=True)
class Scores:
    """What the forward pass of a micro-batch returned, detached, shape (R, T)."""

    log_probs: Tensor
    entropies: Tensor


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Completion tokens in the loss, shape (R, T)."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def log_ratio(inputs: dict[str, Any], scores: Scores, *, level: str) -> Tensor:
    """log(pi_theta / pi_old) per token, shape (R, T), or its mean per sequence, shape (R, 1)."""
    old = inputs.get("old_per_token_logps")
    per_token = scores.log_probs - (scores.log_probs if old is None else old)
    if level == "token":
        return per_token
    mask = loss_mask(inputs)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]


def kl(inputs: dict[str, Any], scores: Scores, ratio: Tensor, *, corrected: bool) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token, shape (R, T)."""
    gap = inputs["ref_per_token_logps"] - scores.log_probs
    k3 = torch.exp(gap) - gap - 1
    return k3 * ratio if corrected else k3


def host_metrics(
    host: Any, inputs: dict[str, Any], scores: Scores
) -> dict[str, tuple[Tensor, str]]:
    """By the host's names: the values, shape (R, T) or (R, 1), and what they average over."""
    ratio = torch.exp(log_ratio(inputs, scores, level=host.importance_sampling_level))
    values: dict[str, tuple[Tensor, str]] = {"entropy": (scores.entropies, LIVE_TOKENS)}
    if host.beta != 0:
        corrected = host.args.use_bias_correction_kl
        values["kl"] = (kl(inputs, scores, ratio, corrected=corrected), LIVE_TOKENS)
    # By the level, not by the shape: completions of one token also have one column.
    over = ALL_ROWS if host.importance_sampling_level == "sequence" else ALL_TOKENS
    advantages = inputs["advantages"]
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    if host.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        if host.args.delta is not None:
            ratio = ratio.clamp(max=host.args.delta)
        low = ((ratio < 1 - host.epsilon_low) & (advantages < 0)).float()
        high = ((ratio > 1 + host.epsilon_high) & (advantages > 0)).float()
        values["clip_ratio/low_mean"] = (low, over)
        values["clip_ratio/high_mean"] = (high, over)
        values["clip_ratio/region_mean"] = (low + high, over)
    elif host.loss_type == "cispo":
        clipped = (ratio > host.epsilon_high) & (advantages > 0)
        values["cispo_clip_ratio"] = (clipped.float(), over)
    return values


class StepAverages:
    """Sums over the micro-batches of an optimizer step; a mean is a sum over a denominator."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._over: dict[str, float] = defaultdict(float)

    def add_denominators(self, counts: dict[str, float]) -> None:
        """Tokens and rows of a segment before pruning."""
        for name, count in counts.items():
            self._over[name] += count

    def add(self, values: dict[str, tuple[Tensor, str]], weight_R: Tensor, mask: Tensor) -> None:
        """Add the weighted sums of a micro-batch."""
        for name, (value, over) in values.items():
            per_row = value[:, 0] if over == ALL_ROWS else (value * mask).sum(-1)
            self._sums[name, over] += float((weight_R.to(per_row) * per_row).sum())

    def means(self, reduce: Any) -> dict[str, float]:
        """The estimates over all ranks; `reduce` sums a list of numbers over the ranks."""
        keys, overs = sorted(self._sums), sorted(self._over)
        totals = reduce([self._sums[key] for key in keys] + [self._over[name] for name in overs])
        over = dict(zip(overs, totals[len(keys) :], strict=True))
        self._sums.clear()
        self._over.clear()
        sums = zip(keys, totals[: len(keys)], strict=True)
        return {name: total / over[per] for (name, per), total in sums if over.get(per)}


def other_terms(
    host: Any, inputs: dict[str, Any], scores: Scores, factor_R: Tensor, entropy_factor_R: Tensor
) -> Tensor:
    """KL and entropy terms of the loss of a micro-batch, each row times its gradient factor."""
    mask = loss_mask(inputs).float()
    accumulation = host.current_gradient_accumulation_steps
    total = torch.zeros((), device=mask.device)
    if host.beta != 0:
        ratio = torch.exp(log_ratio(inputs, scores, level=host.importance_sampling_level))
        per_token = kl(inputs, scores, ratio, corrected=host.args.use_bias_correction_kl)
        per_row = factor_R.to(per_token) * (per_token * mask).sum(-1)
        total = total + host.beta * (per_row / _row_divisor(host, inputs, mask)).sum()
    if host.entropy_coef != 0:
        per_row = (scores.entropies * mask).sum(-1)
        bonus = (entropy_factor_R.to(per_row) * per_row).sum() / mask.sum().clamp(min=1)
        total = total - host.entropy_coef * bonus / accumulation
    return total


def _row_divisor(host: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """What the host divides each row's token sum by, accumulation included, shape (R,)."""
    how = loss_denominator(host.loss_type)
    accumulation = host.current_gradient_accumulation_steps
    if how.kind == "generation tokens":
        per_step = inputs["num_items_in_batch"].clamp(min=1) / host.accelerator.num_processes
        return (per_step * accumulation / host.args.steps_per_generation).expand(len(mask))
    if how.kind == "micro-batch tokens":
        return (mask.sum().clamp(min=1) * accumulation).expand(len(mask))
    tokens = mask.sum(-1).clamp(min=1) if how.per == "sequence" else torch.ones_like(mask[:, 0])
    longest = host.max_completion_length if host.loss_type == "dr_grpo" else 1
    return tokens * longest * len(mask) * accumulation
