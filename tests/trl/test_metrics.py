"""What is logged: the names, the sums, the table of completions, and the host's losses."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from dppo.pruner import DROP_REASONS
from dppo.tasks import sorting_dataset
from dppo.trl import full_batch, schedule
from dppo.trl.decision import Rows, decide
from dppo.trl.signal import Signal

from .conftest import Script, alternating_reward, random_completions, trainer, watched
from .test_exact import TablePolicy

DESIGNED = (
    *("completions/live", "completions/keep", "tokens/trained", "tokens/generated"),
    *("tokens/density", "weight/ess", "weight/max", "variance/inflation", "clip/factor"),
    *("time/rollout", "time/score", "time/train", "time/prune"),
    *(f"dropped/{reason}" for reason in DROP_REASONS),
)
"""Those of the design that concern completions."""


def test_names_sums_and_times(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=4, beta=0.0, completion_keep=0.4)
    began = time.perf_counter()
    watch = watched(run)
    wall = time.perf_counter() - began
    for log, decision in zip(watch.logs, watch.decisions, strict=True):
        missing = [name for name in DESIGNED if f"dppo/{name}" not in log]
        assert missing == ([] if decision.choices[0].kept.any() else ["weight/ess"])
        dropped = [log[f"dppo/dropped/{reason}"] for reason in DROP_REASONS]
        kept = int(decision.choices[0].kept.sum())
        assert sum(dropped) == 8 - kept
        assert log["dppo/completions/keep"] == kept / 8
        assert log["dppo/tokens/generated"] == decision.rows.completion_tokens.sum()
        trained = decision.rows.completion_tokens[decision.choices[0].kept.ravel()].sum()
        assert log["dppo/tokens/trained"] == pytest.approx(trained)
        assert (log["dppo/tokens/density"] > 0) == (kept > 0)
        assert log["dppo/tokens/density"] <= 1
        assert 0 < log["dppo/clip/factor"] <= 1
        assert log["dppo/clip/factor"] == pytest.approx(1 / max(1, log["grad_norm"]), rel=1e-4)
    spent = [log[f"dppo/time/{phase}"] for log in watch.logs for phase in ("rollout", "train")]
    assert all(seconds > 0 for seconds in spent)
    seconds = run.totals()["seconds"]
    assert sum(seconds.values()) <= wall
    logged = {p: sum(log[f"dppo/time/{p}"] for log in watch.logs) for p in seconds}
    assert all(logged[p] <= seconds[p] + 1e-6 for p in seconds)
    # The last step's optimizer update comes after its log.
    assert sum(logged.values()) > 0.5 * sum(seconds.values())


def test_step_time_has_the_rollout_in_it(tmp_path: Path) -> None:
    """The host's own metric means the same with pruning on: all of the step, sampling included."""

    def slow(completions: list[str], **kwargs: Any) -> list[float]:
        time.sleep(0.2)
        return alternating_reward(completions)

    for keep in (1.0, 0.5):
        watch = watched(trainer(tmp_path, reward=slow, completion_keep=keep, max_steps=2))
        assert all(log["step_time"] > 0.2 for log in watch.logs), keep


def test_totals_add_up(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=4, num_iterations=2, mask_truncated_completions=True)
    watched(run)
    totals = run.totals()
    assert json.loads(json.dumps(totals)) == totals
    skipped = sum(totals["completion_tokens_skipped"].values())
    trained, generated = (
        totals["completion_tokens_trained"],
        totals["completion_tokens_generated"],
    )
    # Each of the sums is rounded to whole tokens.
    assert abs(trained + skipped - generated) <= len(DROP_REASONS)
    assert totals["completions_generated"] == 16
    assert 0 < totals["completions_trained"] < 16
    assert 0 < totals["effective_sample_size"] <= 1


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_the_hosts_names_are_still_there(tmp_path: Path, loss_type: str) -> None:
    run = trainer(
        tmp_path, loss_type=loss_type, entropy_coef=0.01, epsilon_high=5.0, num_iterations=2
    )
    watch = watched(run)
    expected = {
        *("loss", "grad_norm", "learning_rate", "num_tokens", "reward", "reward_std", "entropy"),
        *("frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
        *("step_time", "entropy_coef", "rewards/alternating_reward/mean"),
    }
    if loss_type == "dapo":
        expected |= {f"clip_ratio/{name}_mean" for name in ("low", "high", "region")}
    if loss_type == "cispo":
        expected |= {"cispo_clip_ratio"}
    # The host reports step_time only where its own count of micro-steps closes a window.
    logged = set().union(*watch.logs)
    assert expected - logged == set()
    assert {"dppo/kept/entropy", "dppo/kept/loss"} <= logged


def test_kl_is_logged_for_the_batch_and_for_the_survivors(tmp_path: Path) -> None:
    from dppo.tasks import builtin_path, load_builtin_model

    assert builtin_path().is_dir()
    run = trainer(tmp_path, model=load_builtin_model(), beta=0.1, learning_rate=1e-3)
    watch = watched(run)
    assert all({"kl", "dppo/kept/kl", "clip_ratio/low_mean"} <= log.keys() for log in watch.logs)
    assert all(log["kl"] >= 0 for log in watch.logs)


@pytest.mark.parametrize("keep", [0.5, "shadow"])
def test_the_table_of_completions_has_weights(tmp_path: Path, keep: Any) -> None:
    run = trainer(
        tmp_path,
        completion_keep=keep,
        log_completions=True,
        num_completions_to_print=0,
        eval_dataset=sorting_dataset(3, seed=1, split="test"),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    watch = watched(run)
    tables = {p.stem: pd.read_parquet(p) for p in (tmp_path / "completions").glob("*.parquet")}
    assert len(tables) == 4
    for table in tables.values():
        assert {"weight", "dropped", "advantage", "prompt", "completion"} <= set(table.columns)
        assert ((table["weight"] == 0) == (table["dropped"] != "")).all()
        assert set(table["dropped"]) <= {"", *DROP_REASONS}
    # The table holds the latest generation: at step 1 that of training, later those of evaluation.
    (expected,) = watch.decisions[0].choices
    found = tables["completions_00001"]
    np.testing.assert_allclose(found["weight"], expected.weight.ravel())
    np.testing.assert_allclose(found["advantage"], expected.advantages.ravel(), atol=1e-5)
    assert set(tables["completions_00000"]["weight"]) == {1.0}


@pytest.mark.parametrize("packing", ["bucket", "varlen"])
def test_density_counts_no_padding_rows(tmp_path: Path, packing: str) -> None:
    """A micro-batch of padding alone has no real token."""
    run = trainer(
        tmp_path,
        packing=packing,
        rollout_func=Script(random_completions(8, seed=0)),
        reward=lambda completions, **kwargs: [0.0] * len(completions),
        max_steps=1,
    )
    (log,) = watched(run).logs
    assert log["dppo/tokens/density"] == 0


# -- the host's losses, by hand --------------------------------------------------------------------

LENGTH = 8
SPLITS = [(4, 1), (2, 2), (1, 4)]


class Losses:
    """Completions whose per-token loss is a constant of the row: ratio 1, advantage minus it."""

    def __init__(
        self,
        host: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        lengths: list[int],
        per_token: list[float],
        micro_batch: int,
        masked: tuple[int, ...] = (),
    ) -> None:
        self.host, self.rows, self.micro_batch = host, len(lengths), micro_batch
        self.steps = self.rows // micro_batch
        mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
        mask[list(masked)] = 0
        self.advantages = -torch.tensor(per_token, dtype=torch.float64)
        self.batch: dict[str, Tensor] = {
            "prompt_ids": torch.arange(self.rows)[:, None],
            "prompt_mask": torch.ones(self.rows, 1, dtype=torch.long),
            "completion_ids": torch.ones(self.rows, LENGTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": self.advantages,
            "num_items_in_batch": mask.sum(),
        }
        torch.manual_seed(0)
        self.policy = TablePolicy(torch.randn(self.rows, LENGTH, 5, dtype=torch.float64))
        self.lengths, self.mask = np.array(lengths), mask
        host.max_completion_length = LENGTH
        host.args.per_device_train_batch_size = micro_batch
        host.args.steps_per_generation = host.current_gradient_accumulation_steps = self.steps
        host.args.gradient_accumulation_steps = self.steps

        def in_order(geometry: Any, **key: Any) -> Any:
            return np.arange(geometry.rows)

        monkeypatch.setattr(schedule, "order_of_rows", in_order)

    def full(self, loss_type: str) -> float:
        """Accumulated over the micro-batches, nothing pruned."""
        self.host.loss_type = loss_type
        total = 0.0
        for step in range(self.steps):
            part = slice(step * self.micro_batch, (step + 1) * self.micro_batch)
            inputs = {k: v[part] if v.ndim else v for k, v in self.batch.items()}
            total += GRPOTrainer.compute_loss(self.host, self.policy, inputs).item()
        return total

    def lossless(self, loss_type: str) -> float:
        """Accumulated over the micro-batches that are left without inert rows."""
        host = self.host
        host.loss_type = loss_type
        shape = (self.rows // 2, 2)
        advantages = self.advantages.numpy().reshape(shape)
        ones = np.ones(self.rows, np.int64)
        tokens = self.mask.sum(1).numpy()
        told = Signal(
            np.arange(self.rows, dtype=float).reshape(shape),
            advantages,
            np.zeros(shape[0], bool),
            np.ones(shape, bool),
        )
        host._decision = decide(
            host.pruner,
            told,
            Rows(ones, self.lengths.astype(np.int64), tokens, np.full(self.rows, 0.5)),
            geometry=host._geometry(),
            rank=0,
            generation=0,
            window_left=self.steps,
            loss_type=loss_type,
            other_terms=False,
            sort=True,
        )
        host._buffered_inputs, host._held = self.batch, np.arange(self.rows)
        total = 0.0
        for step, micro_batch in enumerate(host._decision.micro_batches):
            if micro_batch is not None:
                host._step = host._rolled_out_at = step
                total += host.compute_loss(self.policy, host._prepare_inputs(None)).item()
        host._metrics["train"].clear()
        return total


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = trainer(tmp_path_factory.mktemp("losses"), completion_rule="inert")
    run.model.train()
    return run


CONSTANT = {"lengths": [2, 6, 1, 3], "per_token": [1, -1, 2, 0.5]}


@pytest.mark.parametrize("micro_batch", [4, 2, 1])
@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", 0.625), ("dapo", -0.0416667), ("dr_grpo", -0.015625)]
)
def test_the_loss_does_not_depend_on_the_split(
    stub: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str, expected: float, micro_batch: int
) -> None:
    case = Losses(stub, monkeypatch, micro_batch=micro_batch, **CONSTANT)
    assert case.full(loss_type) == pytest.approx(expected, abs=1e-7)
    assert case.lossless(loss_type) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("micro_batch", "expected"), [(4, -0.0416667), (2, 0.1875), (1, 0.625)])
def test_bnpo_depends_on_the_split_by_design(
    stub: Any, monkeypatch: pytest.MonkeyPatch, micro_batch: int, expected: float
) -> None:
    case = Losses(stub, monkeypatch, micro_batch=micro_batch, **CONSTANT)
    assert case.full("bnpo") == pytest.approx(expected, abs=1e-7)
    assert case.lossless("bnpo") == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("micro_batch", [6, 2, 1])
def test_masked_rows_leave_the_token_losses_alone_and_count_as_rows(
    stub: Any, monkeypatch: pytest.MonkeyPatch, micro_batch: int
) -> None:
    """dapo divides by tokens, and the masked have none; grpo and dr_grpo divide by rows."""
    case = Losses(
        stub,
        monkeypatch,
        lengths=[2, 6, 1, 3, 8, 8],
        per_token=[1, -1, 2, 0.5, 5.0, -3.0],
        micro_batch=micro_batch,
        masked=(4, 5),
    )
    for loss_type, expected in (
        ("dapo", -0.0416667),
        ("grpo", 0.625 * 4 / 6),
        ("dr_grpo", -0.015625 * 4 / 6),
    ):
        assert case.full(loss_type) == pytest.approx(expected, abs=1e-7)
        assert case.lossless(loss_type) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("masked", "expected"), [((), 1.0), ((1,), 1.0), ((0, 1), 0.0)])
def test_truncated_tokens_are_not_in_the_denominator(
    stub: Any, monkeypatch: pytest.MonkeyPatch, masked: tuple[int, ...], expected: float
) -> None:
    for micro_batch in (2, 1):
        case = Losses(
            stub,
            monkeypatch,
            lengths=[4, 4],
            per_token=[1.0, 1.0],
            micro_batch=micro_batch,
            masked=masked,
        )
        assert case.full("dapo") == pytest.approx(expected, abs=1e-7)
        assert case.lossless("dapo") == pytest.approx(expected, abs=1e-7)
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in case.policy.parameters())


def test_lengths_are_logged_before_masking(tmp_path: Path) -> None:
    completions = [[3, 4, 1], [3, 4, 5, 6, 7, 8, 9, 10]] * 4
    run = trainer(
        tmp_path,
        rollout_func=Script(completions),
        mask_truncated_completions=True,
        max_completion_length=8,
        max_steps=1,
    )
    (log,) = watched(run).logs
    assert (log["completions/min_length"], log["completions/max_length"]) == (3, 8)
    assert log["completions/clipped_ratio"] == 0.5
    assert log["dppo/tokens/generated"] == 44


def test_reward_metrics_are_over_all_completions(tmp_path: Path) -> None:
    """Weights 0.7 and 0.3, rewards 1 and 0; then one function that never scores."""

    def one(completions: list[str], **kwargs: Any) -> list[Any]:
        return [1.0] * len(completions)

    def zero(completions: list[str], **kwargs: Any) -> list[Any]:
        return [0.0] * len(completions)

    def never(completions: list[str], **kwargs: Any) -> list[Any]:
        return [None] * len(completions)

    for funcs, weights in (([one, zero], [0.7, 0.3]), ([one, never], [0.7, 0.3])):
        run = trainer(tmp_path, reward=funcs, reward_weights=weights, max_steps=1)
        (log,) = watched(run).logs
        assert log["reward"] == pytest.approx(0.7)
        assert log["rewards/one/mean"] == 1
        assert log.get("rewards/never/mean") is None
    kinds = itertools.cycle([[1.0] * 4, [0.0] * 4, [1.0, 0.0] * 2, [0.0, 1.0] * 2])

    def mixed(completions: list[str], **kwargs: Any) -> list[float]:
        return [value for _ in range(len(completions) // 4) for value in next(kinds)]

    run = trainer(tmp_path, reward=mixed, per_device_train_batch_size=8, max_steps=1)
    (log,) = watched(run).logs
    assert log["dppo/dropped/all_right"] == log["dppo/dropped/all_wrong"] == 4
    assert log["frac_reward_zero_std"] == log["dppo/completions/live"] == 0.5
    assert log["dppo/groups/all_right"] == log["dppo/groups/all_wrong"] == 0.25
    assert log["dppo/groups/dead"] == 0.5
    assert log["reward"] == 0.5
    assert log["reward_std"] == pytest.approx(np.array([1, 0] * 8).std(ddof=1))
    # And of those that are trained on: from the mixed groups only, so 0 or 1 or in between.
    assert 0 <= log["dppo/kept/reward"] <= 1
    kept = round(16 * log["dppo/completions/keep"])
    right = round(kept * log["dppo/kept/reward"])
    assert right == pytest.approx(kept * log["dppo/kept/reward"])
    of_kept = np.repeat([1.0, 0.0], [right, kept - right])
    assert log["dppo/kept/reward_std"] == pytest.approx(of_kept.std(ddof=1) if kept > 1 else 0)
    reasons = [value for name, value in log.items() if name.startswith("dppo/dropped/")]
    assert sum(reasons) == 16 - kept


def test_a_short_window_counts_as_one_step() -> None:
    """Micro-batches of 1, 1, 1 and 4, three to a step: 1 and 4, and so 2.5 on average, not 1.75."""
    averages, means = full_batch.StepAverages(), []
    for window in ([1.0, 1.0, 1.0], [4.0]):
        for value in window:
            scores = {"entropy": (torch.full((2, 3), value), full_batch.ALL_TOKENS)}
            averages.add(scores, torch.ones(2), torch.ones(2, 3))
            averages.add_denominators({"tokens": 6.0})
        means.append(averages.means(lambda values: values)["entropy"])
    assert means == [1, 4]
    assert np.mean(means) == 2.5
