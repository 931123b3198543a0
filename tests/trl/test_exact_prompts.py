"""E[gradient] over both phases, through the trainer's real loss, equals that of all candidates.

Every outcome of the window is visited, the completion probabilities are solved anew for each, and
every outcome of theirs is visited. The full batch is the host's own loss on all M * G completions.

Tolerance as in `test_exact`: 1e-10 relative to the largest entry.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

import dppo
from dppo.trl import full_batch, schedule
from dppo.trl.decision import Decision, Rows, decide
from dppo.trl.windows import Window

from .conftest import trainer as make_trainer
from .test_exact import (
    EXACT,
    GROUP,
    LENGTH,
    SEEN,
    VOCABULARY,
    Case,
    EveryOutcome,
    TablePolicy,
    deviation,
    told_of,
)

CANDIDATES, ROLLED_OUT, MICRO_BATCH = 4, 2, 2
ROWS = CANDIDATES * GROUP
REWARDS = [[1, 0, 0, 1], [0.25, 0, 1, 0.5], [1, 1, 1, 1], [0, 0, 0, 1]]
BY_ROWS = ("grpo", "sapo", "luspo", "dr_grpo")
BY_TOKENS = ("dapo", "cispo", "vespo")
RULES = ("proportional", "threshold", "uniform")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make_trainer(
        tmp_path_factory.mktemp("exact"),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ROLLED_OUT * GROUP // MICRO_BATCH,
        prompt_keep=ROLLED_OUT / CANDIDATES,
        allow_single_epoch=True,
    )
    trainer.model.train()
    return trainer


class Candidates:
    """Four prompts of which two are rolled out, and the draw's probabilities from a history."""

    def __init__(
        self, host: Any, *, prompt_rule: str = "proportional", passes: int = 1, **options: Any
    ) -> None:
        self.host = host
        rng = np.random.default_rng(3)
        self.theta = torch.from_numpy(rng.normal(size=(ROWS, LENGTH, VOCABULARY)))
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, (ROWS, LENGTH)))
        near = self.theta.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        lengths = rng.integers(1, LENGTH + 1, ROWS)
        mask = torch.from_numpy((np.arange(LENGTH) < lengths[:, None]).astype(np.int64))
        self.batch = {
            "prompt_ids": torch.arange(ROWS)[:, None],
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
            "completion_ids": ids,
            "completion_mask": mask,
            "old_per_token_logps": near + torch.from_numpy(0.3 * rng.normal(size=ids.shape)),
            "ref_per_token_logps": near + torch.from_numpy(0.3 * rng.normal(size=ids.shape)),
        }
        self.surprisal = 0.1 + rng.random(ROWS)
        self.tokens = mask.sum(1).numpy()
        accumulation = ROLLED_OUT * GROUP // MICRO_BATCH
        self.geometry = schedule.Geometry(1, MICRO_BATCH, accumulation, passes, accumulation)
        Case._configure(self, **options)
        config = {**host.pruner.config.to_dict(), "prompt_keep": ROLLED_OUT / CANDIDATES}
        host.pruner = dppo.Pruner(
            dppo.PruneConfig(**{**config, "prompt_rule": prompt_rule}), seed=0
        )
        for step, rewards in enumerate(([1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1])):
            seen = [rewards, [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
            host.pruner.observe(range(CANDIDATES), seen, step=step)
        self.pi = host.pruner.select_prompts(range(CANDIDATES), count=ROLLED_OUT, step=9).pi

    def rows_of(self, prompts: np.ndarray) -> np.ndarray:
        return (np.flatnonzero(prompts)[:, None] * GROUP + np.arange(GROUP)).ravel()

    def part(self, rows: np.ndarray) -> dict[str, Tensor]:
        """What the host makes of the rollouts of these rows' prompts."""
        told = self.told(rows)
        part = {key: value[torch.from_numpy(rows)] for key, value in self.batch.items()}
        part["advantages"] = torch.from_numpy(told.advantages_PG.ravel().copy())
        part["num_items_in_batch"] = torch.tensor(float(self.tokens[rows].sum()))
        return part

    def told(self, rows: np.ndarray) -> Any:
        return told_of(np.array(REWARDS, np.float32).ravel()[rows][:, None])

    def decide(self, selection: dppo.Selection) -> Decision:
        rows = self.rows_of(selection.kept)
        tokens = self.tokens[rows]
        self.host._decision = decide(
            self.host.pruner,
            self.told(rows),
            Rows(np.ones(len(rows), np.int64), tokens, tokens, self.surprisal[rows]),
            geometry=self.geometry,
            rank=0,
            generation=0,
            window_left=self.geometry.accumulation,
            loss_type=self.host.loss_type,
            other_terms=self.other_terms,
            sort=True,
            window=Window(0, np.arange(CANDIDATES), selection, visited=1.0),
        )
        return self.host._decision

    def pruned(self, selection: dppo.Selection) -> tuple[Tensor, float, dict[str, float]]:
        """Gradient, loss and logged means of the first optimizer step on the survivors."""
        self.decide(selection)
        return self.step(selection, self.theta, 0)

    def step(
        self, selection: dppo.Selection, theta: Tensor, number: int
    ) -> tuple[Tensor, float, dict[str, float]]:
        """The same of any optimizer step, at any parameters; decided before."""
        host, policy, value = self.host, TablePolicy(theta), 0.0
        host.args.steps_per_generation = self.geometry.steps_per_generation
        host.current_gradient_accumulation_steps = self.geometry.accumulation
        host._averages = full_batch.StepAverages()
        host._buffered_inputs = self.part(self.rows_of(selection.kept))
        host._held = np.arange(ROLLED_OUT * GROUP)
        first = number * self.geometry.accumulation
        for micro_step in range(first, first + self.geometry.accumulation):
            host._step = host._rolled_out_at = micro_step
            host._count_segment(micro_step)
            if host._decision.micro_batches[micro_step] is not None:
                loss = host.compute_loss(policy, host._prepare_inputs(None))
                loss.backward()
                value += loss.item()
        host._metrics["train"].clear()
        grad = policy.theta.grad
        grad = torch.zeros_like(self.theta) if grad is None else grad
        return grad, value, host._averages.means(lambda values: values)

    def full(self, theta: Tensor | None = None) -> tuple[Tensor, float]:
        """The host's gradient and loss on all candidates."""
        theta = self.theta if theta is None else theta
        host, policy, value = self.host, TablePolicy(theta), 0.0
        accumulation = ROWS // MICRO_BATCH
        host.args.steps_per_generation = host.current_gradient_accumulation_steps = accumulation
        batch = self.part(np.arange(ROWS))
        for rows in torch.arange(ROWS).split(MICRO_BATCH):
            inputs = {key: v[rows] if v.ndim else v for key, v in batch.items()}
            loss = GRPOTrainer.compute_loss(host, policy, inputs)
            loss.backward()
            value += loss.item()
        host._metrics["train"].clear()
        return policy.theta.grad, value


def expected(
    case: Candidates, every: EveryOutcome, of: Callable[[dppo.Selection], np.ndarray]
) -> np.ndarray:
    """E[of(window)] over both phases."""
    total, windows = 0.0, 0
    result: Any = 0
    for probability, selection in dppo.outcomes(case.pi, design="systematic"):
        windows += 1
        for given, value in every.of(lambda selection=selection: of(selection)):
            result, total = result + probability * given * value, total + probability * given
    assert windows >= 2
    assert total == pytest.approx(1, abs=1e-12)
    return result


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "sequence level": {"level": "sequence"},
    "all completions": {"keep": 1.0},
}


@pytest.mark.parametrize("prompt_rule", RULES)
@pytest.mark.parametrize("loss_type", BY_ROWS)
def test_a_mean_over_rows_is_unbiased(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str, prompt_rule: str
) -> None:
    for name, options in VARIANTS.items():
        case = Candidates(host, loss_type=loss_type, prompt_rule=prompt_rule, **options)
        assert len(set(case.pi.tolist())) > 1 or prompt_rule == "uniform"

        def gradient_and_loss(selection: dppo.Selection, case: Candidates = case) -> np.ndarray:
            grad, value, _ = case.pruned(selection)
            return np.append(grad.numpy(), value)

        found = expected(case, EveryOutcome(monkeypatch, "systematic"), gradient_and_loss)
        grad, value = case.full()
        assert deviation(torch.from_numpy(found[:-1]), grad.ravel()) < EXACT, name
        assert found[-1] == pytest.approx(value, abs=1e-10), name


@pytest.mark.parametrize("loss_type", BY_TOKENS)
def test_a_sum_over_tokens_is_unbiased_but_for_the_estimated_total(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """E[gradient * estimated total] = gradient * total; the gradient itself is a ratio's."""
    for name, options in VARIANTS.items():
        case = Candidates(host, loss_type=loss_type, **options)
        tokens_P = case.tokens.reshape(CANDIDATES, GROUP).sum(1)

        def both(
            selection: dppo.Selection, case: Candidates = case, tokens_P: np.ndarray = tokens_P
        ) -> np.ndarray:
            grad = case.pruned(selection)[0].numpy()
            return np.stack([grad * (tokens_P * selection.weight).sum(), grad])

        found = expected(case, EveryOutcome(monkeypatch, "systematic"), both)
        grad = case.full()[0]
        assert deviation(torch.from_numpy(found[0]), grad * float(tokens_P.sum())) < EXACT, name
        # Two prompts of different lengths: far from exact, as the notice says, and no more.
        assert SEEN < deviation(torch.from_numpy(found[1]), grad) < 0.3, name


def test_independent_completion_draws_too(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Candidates(host, loss_type="grpo", keep=0.4)
    found = expected(
        case, EveryOutcome(monkeypatch, "poisson"), lambda window: case.pruned(window)[0].numpy()
    )
    assert deviation(torch.from_numpy(found), case.full()[0]) < EXACT


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_a_later_step_is_unbiased_at_fixed_parameters_only(
    host: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """Two passes share the draw of prompts, though not that of completions.

    So the second is exact where the parameters do not depend on the draw; where the first pass has
    moved them it is not, as the documentation says.
    """
    case = Candidates(host, loss_type=loss_type, passes=2, keep=0.8)

    def second(selection: dppo.Selection) -> np.ndarray:
        case.decide(selection)
        moved = case.theta - 5.0 * case.step(selection, case.theta, 0)[0]
        fixed = case.step(selection, case.theta, 1)[0]
        return np.stack([fixed, case.step(selection, moved, 1)[0], case.full(moved)[0]])

    fixed, estimate, truth = expected(case, EveryOutcome(monkeypatch, "systematic"), second)
    assert deviation(torch.from_numpy(fixed), case.full()[0]) < EXACT
    assert deviation(torch.from_numpy(estimate), torch.from_numpy(truth)) > SEEN


def test_control_the_denominator_of_what_was_rolled_out(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decision, "prompt_factor", lambda self, kind: 1.0)
    assert _grpo(host, monkeypatch) > SEEN


def test_control_prompts_without_their_weights(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    select = dppo.Pruner.select_completions

    def unweighted(self: Any, rewards: Any, **options: Any) -> Any:
        return select(self, rewards, **{**options, "prompts": None})

    monkeypatch.setattr(dppo.Pruner, "select_completions", unweighted)
    monkeypatch.setattr(Decision, "prompt_factor", lambda self, kind: 1.0)  # then D is over K
    assert _grpo(host, monkeypatch) > SEEN


def _grpo(host: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    case = Candidates(host, loss_type="grpo")
    found = expected(
        case,
        EveryOutcome(monkeypatch, "systematic"),
        lambda window: case.pruned(window)[0].numpy(),
    )
    return deviation(torch.from_numpy(found), case.full()[0])


def test_logged_estimates_are_of_the_candidates(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward exactly; KL, over an estimated token total, times that total."""
    case = Candidates(host, loss_type="grpo", beta=0.1)

    def values(selection: dppo.Selection) -> np.ndarray:
        _, _, means = case.pruned(selection)
        decision = case.host._decision
        segment = decision.segments[0]
        tokens = decision.denominators(segment, case.geometry, rank=0)["live_tokens"]
        return np.array([decision.reward, means["kl"] * tokens, tokens])

    found = expected(case, EveryOutcome(monkeypatch, "systematic"), values)
    scored = TablePolicy(case.theta)(
        torch.cat([case.batch["prompt_ids"], case.batch["completion_ids"]], 1),
        torch.cat([case.batch["prompt_ids"], case.batch["completion_ids"]], 1),
    )
    gap = case.batch["ref_per_token_logps"] - scored.log_probs
    kl = ((gap.exp() - gap - 1) * case.batch["completion_mask"]).sum().item()
    assert found == pytest.approx([np.mean(REWARDS), kl, case.tokens.sum()], rel=1e-9)
