"""E[gradient] through the trainer's real loss equals the full batch's, by visiting every outcome.

The policy is a float64 table of logits with one entry per (row, position, token), so each row's
gradient has coordinates of its own and nothing can cancel between rows. Everything else is the real
thing: `decide`, the micro-batches, the gate, `GRPOTrainer._compute_loss`.

Tolerance 1e-10 relative to the largest entry: float64 sums of some hundred terms lose about 1e-14.
"""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

import dppo
from dppo.packing.layout import Price
from dppo.packing.spread import Room
from dppo.trl import full_batch, schedule, weighted
from dppo.trl.decision import Rows, decide
from dppo.trl.gate import Gate
from dppo.trl.signal import Signal, signal

from .conftest import trainer as make_trainer

PROMPTS, GROUP, LENGTH, VOCABULARY = 2, 4, 5, 7
ROWS = PROMPTS * GROUP
EXACT = 1e-10
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class TablePolicy(torch.nn.Module):
    """Logits theta[row, position]; the prompt is one token, which names the row."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = torch.nn.Parameter(theta.clone())

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> SimpleNamespace:
        row, targets = input_ids[:, 0], labels[:, 1:]
        logits = self.theta[row, : targets.shape[1]].log_softmax(-1)
        scored = targets != -100
        log_probs = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        entropy = -(logits.exp() * logits).sum(-1)
        return SimpleNamespace(log_probs=log_probs * scored, entropy=entropy * scored)


class EveryOutcome:
    """Replaces the pruner's draws: run a function once for every combination of outcomes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, design: str) -> None:
        self.design = design
        self._script: list[int] = []
        self._sizes: list[int] = []
        self._probability = 1.0
        monkeypatch.setattr(dppo.Pruner, "_draw", self._draw)

    def _draw(self, pi: Any, advantages: Any, rows: Any, *, key: Any) -> Any:
        outcomes = list(dppo.outcomes(pi[rows], design=self.design))
        place = len(self._sizes)
        self._sizes.append(len(outcomes))
        if place == len(self._script):
            self._script.append(0)
        probability, selection = outcomes[self._script[place]]
        self._probability *= probability
        return selection.kept

    def of(self, run: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        self._script = []
        while True:
            self._sizes, self._probability = [], 1.0
            result = run()
            yield self._probability, result
            while self._script and self._script[-1] == self._sizes[len(self._script) - 1] - 1:
                self._script.pop()
            if not self._script:
                return
            self._script[-1] += 1


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make_trainer(
        tmp_path_factory.mktemp("exact"), per_device_train_batch_size=2, completion_keep=0.5
    )
    trainer.model.train()
    return trainer


def told_of(rewards_N1: np.ndarray) -> Signal:
    """What one reward function says, scaled by group."""
    return signal(
        rewards_N1,
        np.ones(1, np.float32),
        group=GROUP,
        scale="group",
        aggregation="sum_then_normalize",
    )


class Case:
    """A generation of 2 prompts x 4 completions, micro-batches of 2, and one way to train on it."""

    def __init__(
        self, host: Any, *, two_passes: bool = False, capacity: int | None = None, **options: Any
    ) -> None:
        self.host, self.room = host, None
        rng = np.random.default_rng(7)
        self.lengths = np.array([5, 2, 4, 3, 1, 5, 3, 2])
        self.loss_mask = (np.arange(LENGTH) < self.lengths[:, None]).astype(np.int64)
        self.rewards = np.array([1, 0, 0, 1, 0.25, 0, 1, 0.5], np.float32)[:, None]
        self.theta = torch.from_numpy(rng.normal(size=(ROWS, LENGTH, VOCABULARY)))
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, (ROWS, LENGTH)))
        near = self.theta.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

        def noise(scale: float) -> Tensor:
            return torch.from_numpy(rng.normal(size=(ROWS, LENGTH)) * scale)

        self.batch = {
            "prompt_ids": torch.arange(ROWS)[:, None],
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
            "completion_ids": ids,
            "completion_mask": torch.from_numpy(self.loss_mask),
            "old_per_token_logps": near + noise(0.3),
            "ref_per_token_logps": near + noise(0.3),
        }
        if options.get("sampler"):
            self.batch["sampling_per_token_logps"] = near + noise(0.1)
            # As the host makes it: exactly 1 outside the loss mask (vespo sums over all columns).
            ratio = 1 + noise(0.1) * torch.from_numpy(self.loss_mask)
            self.batch["importance_sampling_ratio"] = ratio
        if options.pop("tools", False):
            tools = torch.ones(ROWS, LENGTH, dtype=torch.long)
            tools[[0, 2, 5], 1] = 0
            self.batch["tool_mask"] = tools
            self.loss_mask = self.loss_mask * tools.numpy()
        if options.pop("masked", False):
            self.batch["completion_mask"][3] = 0
            self.loss_mask[3] = 0
        self.rewards = np.array(options.pop("rewards", self.rewards), np.float32).reshape(-1, 1)
        self.geometry = schedule.Geometry(
            ranks=1,
            micro_batch=2,
            steps_per_generation=4,
            iterations=2 if two_passes else 1,
            accumulation=4 if two_passes else 2,
        )
        if capacity is not None:  # completions share prompts of three tokens
            prompt_N, group_N = np.full(ROWS, 3), np.arange(ROWS) // GROUP
            self.room = Room(capacity, Price(9999), True, prompt_N, self.lengths, group_N)
        self.told = told_of(self.rewards)
        self.batch["advantages"] = torch.from_numpy(self.told.advantages_PG.ravel())
        self.batch["num_items_in_batch"] = torch.tensor(float(self.loss_mask.sum()))
        self._configure(**options)

    def _configure(
        self,
        *,
        loss_type: str = "grpo",
        level: str = "token",
        beta: float = 0.0,
        corrected: bool = False,
        entropy: float = 0.0,
        sampler: bool = False,
        delta: float | None = None,
        rule: str = "proportional",
        keep: float = 0.5,
    ) -> None:
        host = self.host
        host.loss_type, host.importance_sampling_level, host.beta = loss_type, level, beta
        host.args.use_bias_correction_kl, host.args.delta = corrected, delta
        host.entropy_coef, host._entropy_bonus_enabled = entropy, entropy != 0
        host.use_vllm = host.vllm_importance_sampling_correction = sampler
        host.off_policy_mask_threshold = 0.01 if sampler else None
        host.epsilon_high = 5.0 if loss_type == "cispo" else 0.28
        host.max_completion_length = LENGTH
        host.args.steps_per_generation = self.geometry.steps_per_generation
        host.current_gradient_accumulation_steps = self.geometry.accumulation
        host.num_iterations = self.geometry.iterations
        host.pruner = dppo.Pruner(
            dppo.PruneConfig(completion_rule=rule, completion_keep=keep), seed=0
        )
        self.other_terms = beta != 0 or entropy != 0

    def decide(self) -> Any:
        surprisal = 0.1 + np.random.default_rng(1).random(ROWS)
        tokens = self.lengths.astype(np.int64)
        self.host._decision = decide(
            self.host.pruner,
            self.told,
            Rows(np.ones(ROWS, np.int64), tokens, self.loss_mask.sum(1), surprisal),
            geometry=self.geometry,
            rank=0,
            generation=0,
            window_left=self.geometry.accumulation,
            loss_type=self.host.loss_type,
            other_terms=self.other_terms,
            sort=True,
            room=self.room,
        )
        return self.host._decision

    def full_gradient(self, theta: Tensor, optimizer_step: int) -> Tensor:
        """The host's own loss over the micro-batches of an optimizer step, unpruned."""
        policy = TablePolicy(theta)
        steps, first = (
            self.geometry.steps_per_generation,
            optimizer_step * self.geometry.accumulation,
        )
        for micro_step in range(first, first + self.geometry.accumulation):
            rows = np.flatnonzero(self.host._decision.micro_step_N == micro_step % steps)
            inputs = {k: v[torch.from_numpy(rows)] if v.ndim else v for k, v in self.batch.items()}
            GRPOTrainer.compute_loss(self.host, policy, inputs).backward()
        return policy.theta.grad

    def pruned_gradient(self, theta: Tensor, optimizer_step: int) -> Tensor:
        """What the trainer accumulates on the survivors."""
        policy, host = TablePolicy(theta), self.host
        host._buffered_inputs, host._rolled_out_at = self.batch, 0
        host._held = np.arange(ROWS)
        first = optimizer_step * self.geometry.accumulation
        for micro_step in range(first, first + self.geometry.accumulation):
            if host._decision.micro_batches[micro_step] is not None:
                host._step = host._rolled_out_at = micro_step
                inputs = host._prepare_inputs(None)
                host.compute_loss(policy, inputs).backward()
        host._metrics["train"].clear()
        grad = policy.theta.grad
        return torch.zeros_like(theta) if grad is None else grad


def deviation(estimate: Tensor, truth: Tensor) -> float:
    return float((estimate - truth).abs().max() / truth.abs().max())


def one_step(case: Case, every: EveryOutcome) -> float:
    """Deviation of E[ghat] from g in the first optimizer step."""

    def run() -> Tensor:
        case.decide()
        return case.pruned_gradient(case.theta, 0)

    expected = sum(p * grad for p, grad in every.of(run))
    return deviation(expected, case.full_gradient(case.theta, 0))


def second_step(case: Case, every: EveryOutcome, rate: float = 0.5) -> float:
    """Deviation of E[ghat_2(theta_1)] from E[g_2(theta_1)], theta_1 = theta_0 - rate * ghat_1."""

    def run() -> tuple[Tensor, Tensor]:
        case.decide()
        moved = case.theta - rate * case.pruned_gradient(case.theta, 0)
        return case.pruned_gradient(moved, 1), case.full_gradient(moved, 1)

    estimate = truth = 0
    for probability, (pruned, full) in every.of(run):
        estimate, truth = estimate + probability * pruned, truth + probability * full
    return deviation(estimate, truth)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-sided clip": {"delta": 1.4},
    "kl": {"beta": 0.1},
    "corrected kl": {"beta": 0.1, "corrected": True},
    "entropy bonus": {"entropy": 0.1},
    "kl and entropy": {"beta": 0.1, "entropy": 0.1},
    "sampler correction and off-policy mask": {"sampler": True},
    "tools and truncation": {"tools": True, "masked": True, "beta": 0.1},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_is_unbiased_in_two_successive_steps(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str, level: str
) -> None:
    for name, options in VARIANTS.items():
        case = Case(host, loss_type=loss_type, level=level, **options)
        every = EveryOutcome(monkeypatch, "systematic")
        assert second_step(case, every) < EXACT, (name, "second step")


@pytest.mark.parametrize("rule", ["proportional", "threshold", "uniform", "inert"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_rule_is_unbiased_under_independent_draws(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str, rule: str
) -> None:
    case = Case(host, loss_type=loss_type, rule=rule, keep=0.4)
    assert one_step(case, EveryOutcome(monkeypatch, "poisson")) < EXACT


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_two_passes_over_a_generation_have_a_draw_each(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    case = Case(host, loss_type=loss_type, two_passes=True, beta=0.1)
    assert second_step(case, EveryOutcome(monkeypatch, "systematic")) < EXACT


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_cut_by_tokens_are_unbiased_too(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    case = Case(host, loss_type=loss_type, beta=0.1, keep=0.8, capacity=30)
    case.decide()
    sizes = [len(b.rows_R) for b in case.host._decision.micro_batches if b is not None]
    assert max(sizes) > 2  # more rows than a padded micro-batch has
    assert second_step(case, EveryOutcome(monkeypatch, "systematic")) < EXACT


# The five ways to lose it (and one more): the same check must see each of them.

SEEN = 1e-3
"""Far above rounding, far below what each fault does here (1 % and more)."""


def test_control_denominator_over_the_kept_rows(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Gate.of

    def over_kept_rows(micro_batch: Any, **sizes: Any) -> Gate:
        return of(micro_batch, **{**sizes, "full_rows": len(micro_batch.rows_R)})

    monkeypatch.setattr(weighted.Gate, "of", over_kept_rows)
    case = Case(host, loss_type="grpo")
    assert one_step(case, EveryOutcome(monkeypatch, "poisson")) > SEEN


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_control_denominator_over_the_kept_tokens(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    def over_kept_tokens(micro_batch: Any, **sizes: Any) -> Gate:
        kept = sum(host._decision.rows.loss_tokens[micro_batch.rows_R])
        share = sum(host._decision.rows.loss_tokens) / kept if loss_type == "dapo" else 1.0
        weight = torch.from_numpy(micro_batch.weight_R * share)
        return Gate(weight, weight, weight)

    monkeypatch.setattr(weighted.Gate, "of", over_kept_tokens)
    case = Case(host, loss_type=loss_type)
    assert one_step(case, EveryOutcome(monkeypatch, "poisson")) > SEEN


def test_control_advantages_recomputed_on_the_survivors(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(host, loss_type="dapo")
    frozen = case.batch["advantages"]

    def run() -> Tensor:
        kept = case.decide().choices[0].kept
        survivors = np.where(kept, case.rewards.reshape(PROMPTS, GROUP), np.nan)
        again = dppo.group_advantages(survivors).values_PG.ravel()
        case.batch["advantages"] = torch.from_numpy(again)
        return case.pruned_gradient(case.theta, 0)

    every = EveryOutcome(monkeypatch, "poisson")
    expected = sum(p * grad for p, grad in every.of(run))
    case.batch["advantages"] = frozen
    assert deviation(expected, case.full_gradient(case.theta, 0)) > SEEN


def test_control_weight_on_the_advantage_only(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_loss = GRPOTrainer.compute_loss

    def weighted(self: Any, model: Any, inputs: Any, *rest: Any) -> Tensor:
        if self._gate is not None and self._gate.replayed is None:
            weight = self._gate.factor_R
            self._gate.factor_R = torch.ones_like(weight)
            inputs = {**inputs, "advantages": inputs["advantages"] * weight}
        return compute_loss(self, model, inputs, *rest)

    case = Case(host, loss_type="dapo", beta=0.1)
    monkeypatch.setattr(GRPOTrainer, "compute_loss", weighted)
    assert one_step(case, EveryOutcome(monkeypatch, "poisson")) > SEEN
    case = Case(host, loss_type="dapo", beta=0.0)
    assert one_step(case, EveryOutcome(monkeypatch, "poisson")) < EXACT  # without KL it is right


@pytest.mark.parametrize("rule", ["lowest fraction", "random floor(r n)"])
def test_control_deterministic_fractions(
    host: Any, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Drop floor(r n) of each group's low rows, weight the other low rows by 1 / (1 - r)."""
    # Three of four are low: floor(0.5 * 3) = 1 is dropped, E[weight] = 2/3 * 2 = 1.33, not 1.
    case, rate = Case(host, loss_type="dapo", rule="threshold", rewards=[1, 0, 0, 0] * 2), 0.5
    magnitude = np.abs(case.told.advantages_PG)
    low = magnitude < magnitude.mean(axis=1, keepdims=True)
    dropped = []
    for of_group, is_low in zip(magnitude, low, strict=True):
        members = np.flatnonzero(is_low)
        count = int(rate * len(members))
        lowest = [tuple(members[np.argsort(of_group[members], kind="stable")][:count])]
        anyone = list(itertools.combinations(members, count))
        dropped.append(lowest if rule == "lowest fraction" else anyone)
    expected: Any = 0
    combinations = list(itertools.product(*dropped))
    for subsets in combinations:
        kept = np.ones((PROMPTS, GROUP), bool)
        for prompt, rows in enumerate(subsets):
            kept[prompt, list(rows)] = False
        weight = np.where(kept, np.where(low, 1 / (1 - rate), 1.0), 0.0)
        decision = case.decide()
        batches = [
            None
            if rows_WR is None  # token counts are of no use to this loss
            else schedule.micro_batch_of(rows_WR[0], weight.ravel(), np.ones(ROWS), segment)
            for segment in decision.segments
            for rows_WR in schedule.layout(
                segment,
                kept.ravel(),
                micro_step_N=decision.micro_step_N,
                length_N=case.lengths,
                geometry=case.geometry,
                sort=True,
            )
        ]
        object.__setattr__(decision, "micro_batches", batches)
        expected = expected + case.pruned_gradient(case.theta, 0) / len(combinations)
    assert deviation(expected, case.full_gradient(case.theta, 0)) > SEEN


def test_control_one_draw_shared_by_two_steps(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(host, loss_type="dapo", two_passes=True)
    every = EveryOutcome(monkeypatch, "systematic")
    draw, drawn = every._draw, {}

    def shared(pi: Any, advantages: Any, rows: Any, *, key: Any) -> Any:
        if key[1] == 0:  # the first pass draws, the second reuses
            drawn["kept"] = draw(pi, advantages, rows, key=key)
        return drawn["kept"]

    monkeypatch.setattr(dppo.Pruner, "_draw", staticmethod(shared))
    every._sizes = []
    assert second_step(case, every) > SEEN


def test_logged_loss_and_metrics_are_unbiased_too(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E[value of the loss] = the full batch's loss, and so for KL, entropy and the clip ratio.

    The control: what the host logs of the survivors, unweighted, is off.
    """
    clip = "clip_ratio/region_mean"
    for loss_type, level in itertools.product(LOSS_TYPES, ("token", "sequence")):
        options = {"loss_type": loss_type, "level": level, "beta": 0.1, "entropy": 0.05}
        case = Case(host, **options)

        def run(case: Case = case) -> np.ndarray:
            case.decide()
            host._averages = full_batch.StepAverages()
            policy, value = TablePolicy(case.theta), 0.0
            host._buffered_inputs, host._held = case.batch, np.arange(ROWS)
            for micro_step in range(case.geometry.accumulation):
                host._step = host._rolled_out_at = micro_step
                host._count_segment(micro_step)
                if host._decision.micro_batches[micro_step] is not None:
                    value += host.compute_loss(policy, host._prepare_inputs(None)).item()
            kept = {n: sum(v) for n, v in host._metrics["train"].items() if "/kept/" in n}
            host._metrics["train"].clear()
            means = host._averages.means(lambda values: values)
            weighted = [value, *(means.get(name, 0.0) for name in ("kl", "entropy", clip))]
            return np.array([weighted, [kept.get("dppo/kept/loss", 0.0), 0.0, 0.0, 0.0]])

        every = EveryOutcome(monkeypatch, "poisson")
        expected = sum(p * v for p, v in every.of(run))
        rows = np.flatnonzero(host._decision.micro_step_N < 2)
        scored = TablePolicy(case.theta)(
            torch.cat([case.batch["prompt_ids"], case.batch["completion_ids"]], 1),
            torch.cat([case.batch["prompt_ids"], case.batch["completion_ids"]], 1),
        )
        mask = case.batch["completion_mask"][rows]
        entropy = float((scored.entropy[rows] * mask).sum() / mask.sum())
        gap = (case.batch["ref_per_token_logps"] - scored.log_probs)[rows]
        kl = float(((gap.exp() - gap - 1) * mask).sum() / mask.sum())
        loss, clipped = 0.0, 0.0
        for micro_step in range(2):
            chosen = torch.from_numpy(np.flatnonzero(host._decision.micro_step_N == micro_step))
            inputs = {k: v[chosen] if v.ndim else v for k, v in case.batch.items()}
            loss += GRPOTrainer.compute_loss(host, TablePolicy(case.theta), inputs).item()
            # The host's mean over a micro-batch; its share of the step's tokens, or rows.
            tokens = inputs["completion_mask"].sum() / mask.sum()
            share = 0.5 if level == "sequence" else float(tokens)
            clipped += share * (host._metrics["train"].get(clip) or [0.0])[-1]
        host._metrics["train"].clear()
        truth = np.array([loss, kl, entropy, clipped])
        assert np.abs(expected[0] - truth)[:3].max() < 1e-9, (options, expected, truth)
        assert abs(expected[0][3] - clipped) < 1e-6, options  # the host sums flags in float32
        assert abs(expected[1][0] - loss) > SEEN, options
