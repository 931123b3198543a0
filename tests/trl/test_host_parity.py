"""Off, in shadow mode and without loss, the trainer is the host's; and it overrides little.

Bit for bit means `torch.equal` of every parameter after five steps on the same seed.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from dppo.errors import RewardError
from dppo.tasks import sorting_dataset
from dppo.trl import DPPOTrainer, contract
from dppo.trl.weighted import WeightedPasses

from .conftest import Script, host_trainer, parameters, random_completions, trainer, watched

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_off_and_shadow_train_bit_for_bit_as_the_host(tmp_path: Path, loss_type: str) -> None:
    host = host_trainer(tmp_path, loss_type=loss_type, max_steps=5)
    host.train()
    expected = parameters(host.model)
    for keep in (1.0, "shadow"):
        ours = trainer(
            tmp_path, loss_type=loss_type, max_steps=5, completion_keep=keep, packing="none"
        )
        watch = watched(ours)
        found = parameters(ours.model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), keep
        assert any(not torch.equal(found[name], watch.before[name]) for name in found)
        predicted = [log.get("dppo/completions/keep") for log in watch.logs]
        if keep == "shadow":
            assert len(watch.decisions) == 5
            assert all(0 <= share < 1 for share in predicted)
            assert all("dppo/variance/inflation" in log for log in watch.logs)
        else:
            assert predicted == [None] * 5


def test_two_passes_over_a_generation_are_bit_equal_when_off(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 5}
    host = host_trainer(tmp_path, **options)
    host.train()
    expected = parameters(host.model)
    for keep in (1.0, "shadow"):
        ours = trainer(tmp_path, completion_keep=keep, packing="none", **options)
        ours.train()
        found = parameters(ours.model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), keep


def test_shadow_counts_everything_as_trained(tmp_path: Path) -> None:
    ours = trainer(tmp_path, completion_keep="shadow")
    ours.train()
    totals = ours.totals()
    assert totals["completions_trained"] == totals["completions_generated"] == 24
    assert totals["completion_tokens_trained"] == totals["completion_tokens_generated"] > 0


class ZeroedDeadGroups(GRPOTrainer):
    """The host, float dust in the advantages of constant groups set to exactly 0."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        groups = self._rewards.view(-1, self.num_generations)
        dead = groups.amax(1) - groups.amin(1) <= 1e-6
        output["advantages"][dead.repeat_interleave(self.num_generations)] = 0
        return output

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args)
        self._rewards = rewards.sum(1)
        return rewards


def rarely_mixed(completions: list[str], **kwargs: Any) -> list[float]:
    """A constant that float32 cannot hold, and more for completions that start with 0."""
    return [0.1 + float(c.startswith("0")) for c in completions]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_inert_is_lossless(tmp_path: Path, loss_type: str) -> None:
    """Dropping what has no gradient leaves the parameters alone.

    Not bit for bit: the survivors share other micro-batches in another order (the row-to-micro-
    batch shuffle is not the host's), so the same terms are added up in another order. With SGD the
    parameters inherit that rounding linearly: gradients of size 0.1 to 1 summed in float32 differ
    by about 1e-7 and the step is 0.05 of that. bnpo is left out: its micro-batch means depend on
    the shuffle itself.
    """
    generations = [random_completions(16, seed=seed) for seed in range(3)]
    options: dict[str, Any] = {
        "loss_type": loss_type,
        "reward": rarely_mixed,
        "gradient_accumulation_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.05,
    }
    host = host_trainer(
        tmp_path, kind=ZeroedDeadGroups, rollout_func=Script(*generations), **options
    )
    host.train()
    ours = trainer(tmp_path, completion_rule="inert", rollout_func=Script(*generations), **options)
    watch = watched(ours)
    watch.check()
    live = [decision.choices[0].live.mean() for decision in watch.decisions]
    assert 0 < np.mean(live) < 0.8  # many dead groups, and some gradient
    assert len(watch.gradient_rows) < 12  # of the 3 x 4 micro-batches some were not run
    expected, found = parameters(host.model), parameters(ours.model)
    moved = max((expected[n] - watch.before[n]).abs().max().item() for n in expected)
    assert moved > 1e-3
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    for ours_log, host_log in zip(watch.logs, _logs(host), strict=True):
        assert ours_log["loss"] == pytest.approx(host_log["loss"], abs=1e-5)
        assert ours_log["grad_norm"] == pytest.approx(host_log["grad_norm"], rel=1e-4)


def _logs(host: Any) -> list[dict[str, Any]]:
    return [log for log in host.state.log_history if "loss" in log]


def test_evaluation_is_the_hosts(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_dataset": sorting_dataset(8, seed=1, split="test"),
        "per_device_eval_batch_size": 8,
        "seed": 3,
    }
    results, states = [], []
    for build, extra in ((host_trainer, {}), (trainer, {"completion_keep": 0.25})):
        run = build(tmp_path, **options, **extra)
        torch.manual_seed(5)
        results.append(run.evaluate())
        states.append(torch.get_rng_state())
    host, ours = results
    assert host.keys() == ours.keys()
    for name, value in host.items():
        if not name.endswith(("_time", "_runtime", "_per_second")):
            assert ours[name] == value, name
    assert torch.equal(*states)


def test_evaluation_inside_a_pruned_run_sees_every_completion(tmp_path: Path) -> None:
    scored: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        scored.append(len(completions))
        return [float(len(c) % 2) for c in completions]

    run = trainer(
        tmp_path,
        reward=reward,
        eval_dataset=sorting_dataset(4, seed=1, split="test"),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    watch = watched(run)
    watch_evals = [log for log in run.state.log_history if "eval_reward" in log]
    assert [log["step"] for log in watch_evals] == [0, 1, 2, 3]
    assert not [name for log in watch_evals for name in log if name.startswith("eval_dppo/")]
    # Four prompts of four completions, in micro-batches of four: 16 a time; training: 8 a time.
    assert sum(scored) == 4 * 16 + 3 * 8
    assert watch.optimizer_steps == 3
    assert run.totals()["completions_generated"] == 24


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_evaluation_after_an_interrupted_rollout_is_the_hosts(
    tmp_path: Path, error: type[BaseException]
) -> None:
    """Nothing of the broken rollout may reach the next one: its rows, its rewards."""
    asked: list[list[str]] = []

    def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        asked.append(answer)
        if len(asked) == 1:
            raise error
        return [float(len(a) % 2) for a in answer]

    held_out = sorting_dataset(2, seed=1, split="test")
    run = trainer(tmp_path, reward=reward, eval_dataset=held_out, per_device_eval_batch_size=8)
    with pytest.raises(RewardError if issubclass(error, Exception) else error):
        run.train()
    before = len(asked)
    results = run.evaluate()
    assert {a for of_call in asked[before:] for a in of_call} == set(held_out["answer"])
    assert results["eval_reward"] == np.mean([len(a) % 2 for a in held_out["answer"]])


OURS = {**vars(WeightedPasses), **vars(DPPOTrainer)}


def test_the_loss_is_the_hosts() -> None:
    assert DPPOTrainer._compute_loss is GRPOTrainer._compute_loss


def test_overrides_are_short_and_under_contract() -> None:
    """Every method that the host has too; `__init__` is the one that is not looked up by a hook."""
    own = {name: member for name, member in OURS.items() if callable(member)}
    overridden = {name for name in own if hasattr(GRPOTrainer, name)}
    assert overridden - {"__init__"} == set(contract.WRAPPED)
    for name, member in own.items():
        assert len(inspect.getsource(member).splitlines()) < 100, name


def test_nothing_of_the_host_is_shadowed_by_accident(tmp_path: Path) -> None:
    """Properties and private helpers of ours bear names that the host does not use."""
    plain = host_trainer(tmp_path)
    ours = {name for name in OURS if not name.startswith("__")}
    hosts = {name for kind in GRPOTrainer.__mro__ for name in vars(kind)} | set(vars(plain))
    described = {"_tag_names", "_name", "_paper", "args"}
    assert (ours & hosts) - set(contract.WRAPPED) <= described
    mine = trainer(tmp_path)
    added = set(vars(mine)) - set(vars(plain))
    assert not added & {name for kind in GRPOTrainer.__mro__ for name in vars(kind)}
