"""Recorded gradients: their sum is what the host accumulates; recording changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from dppo.audit import load_recording, measure, unbiased_methods
from dppo.errors import ConfigurationError
from dppo.trl import gradients
from dppo.trl.gradients import Sketch

from .conftest import (
    Script,
    config,
    host_trainer,
    parameters,
    random_completions,
    tiny_model,
    trainer,
    watched,
)

SIZE = 512
ROUNDING = 2e-5
"""Of float32: sums of some thousand products in another order, relative to the largest entry."""

RUN: dict[str, Any] = {
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1},
    "max_grad_norm": 0.0,  # else the gradient that is seen is clipped
}


class Accumulated(TrainerCallback):
    """The gradient of the first optimizer step, sketched."""

    def __init__(self, run: Any) -> None:
        self.run, self.sketch, self.before = run, None, parameters(run.model)
        run.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sketch is None:
            trained = [p.grad for p in self.run.model.parameters() if p.requires_grad]
            self.sketch = Sketch.of(self.run, size=SIZE).reduced(trained)


def recorded(tmp_path: Path, name: str, **options: Any) -> tuple[np.ndarray, Any]:
    """Gradients of the first generation (8 rows), and the run."""
    path = tmp_path / f"{name}.npz"
    script = Script(*(random_completions(8, seed=seed) for seed in range(4)))
    given = {"record_rollouts": str(path), "record_gradients": SIZE, "rollout_func": script}
    run = trainer(tmp_path, **{**RUN, **given, **options})
    run.train()
    found = load_recording(path)
    assert found.gradients_PGK is not None
    return found.gradients_PGK[:2].reshape(8, SIZE), run


def saved(tmp_path: Path) -> dict[str, Any]:
    """The model in a folder, where the host loads its reference from."""
    tiny_model().save_pretrained(tmp_path / "model")
    return {"model": str(tmp_path / "model")}


def off(found: np.ndarray, truth: np.ndarray) -> float:
    assert np.abs(truth).max() > 0
    return float(np.abs(found - truth).max() / np.abs(truth).max())


@pytest.mark.parametrize(
    ("loss_type", "keep", "packing", "more"),
    [
        ("grpo", 0.5, "bucket", {}),
        ("dapo", 0.5, "auto", {"beta": 0.1}),
        ("grpo", 1.0, "auto", {"entropy_coef": 0.1, "per_device_train_batch_size": 8}),
        ("bnpo", 0.5, "auto", {"per_device_train_batch_size": 8}),
        ("dapo", "shadow", "auto", {}),
    ],
)
def test_gradients_add_up_to_what_the_host_accumulates(
    tmp_path: Path, loss_type: str, keep: Any, packing: str, more: dict[str, Any]
) -> None:
    """Where the loss divides by micro-batch, there is one: the host has other ones than we."""
    options = {**RUN, "loss_type": loss_type, **more}
    if "beta" in more:
        options |= saved(tmp_path)
    if options["per_device_train_batch_size"] == 8:
        options["gradient_accumulation_steps"] = 1
    script = Script(random_completions(8, seed=0))
    host = host_trainer(tmp_path, rollout_func=script, **options)
    truth = Accumulated(host)
    host.train()
    found, _ = recorded(tmp_path, "ours", completion_keep=keep, packing=packing, **options)
    assert off(found.sum(axis=0), truth.sketch) < ROUNDING
    # The control: one completion less is seen.
    largest = np.linalg.norm(found, axis=1).argmax()
    assert off(found.sum(axis=0) - found[largest], truth.sketch) > 0.05


def test_gradients_are_the_same_in_float64(tmp_path: Path) -> None:
    """What is left is the sketch's rounding to float32 in the file, and the host's float32 head."""
    options = {**RUN, "loss_type": "grpo", "disable_dropout": True}
    host = host_trainer(
        tmp_path,
        model=tiny_model().double(),
        rollout_func=Script(random_completions(8, seed=0)),
        **options,
    )
    truth = Accumulated(host)
    host.train()
    found, _ = recorded(tmp_path, "ours", model=tiny_model().double(), **options)
    assert off(found.sum(axis=0), truth.sketch) < 2e-6


def test_rows_that_are_not_trained_on_have_the_gradient_that_they_would_have(
    tmp_path: Path,
) -> None:
    """Two optimizer steps a generation, and a reference: their log-probs are filled in."""
    options = {
        **{"steps_per_generation": 4, "per_device_train_batch_size": 2, "max_steps": 2},
        **{"loss_type": "dapo", "beta": 0.1, "num_iterations": 2},
        **saved(tmp_path),
    }
    whole, _ = recorded(tmp_path, "shadow", completion_keep="shadow", **options)
    found, run = recorded(tmp_path, "pruned", completion_keep=0.3, packing="auto", **options)
    assert run._buffered_inputs["old_per_token_logps"].isnan().any()
    assert off(found, whole) < ROUNDING


def test_recording_changes_nothing(tmp_path: Path) -> None:
    options = {"max_steps": 3, "rollout_func": None, "packing": "auto", "completion_keep": "auto"}
    _, run = recorded(tmp_path, "with", auto_cost="tokens", **options)
    without = trainer(tmp_path, auto_cost="tokens", **{**RUN, **options})
    logs = watched(without).logs
    assert untimed(run.state.log_history) == untimed(without.state.log_history)
    assert len(logs) == 3
    after, before = parameters(run.model), parameters(without.model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    recording = load_recording(tmp_path / "with.npz")
    assert recording.gradients_PGK.shape == (6, 4, SIZE)
    assert measure(recording, unbiased_methods(recording), draws=5)
    inert = recording.advantages_PG == 0
    assert not recording.gradients_PGK[inert].any()
    assert recording.gradients_PGK[~inert].any(axis=1).all()


def untimed(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what times go into."""
    timed = ("dppo/time/", "dppo/audit/", "dppo/efficiency/", "step_time", "train_")
    return [{k: v for k, v in log.items() if not k.startswith(timed)} for log in logs]


def test_a_sketch_is_linear_fixed_and_keeps_inner_products() -> None:
    rng = np.random.default_rng(0)
    named = {"a": torch.zeros(300, 20), "b": torch.zeros(500)}
    x, y = ([torch.from_numpy(rng.normal(size=p.shape)) for p in named.values()] for _ in range(2))
    sketch = Sketch(named, size=1024, seed=0)
    both = sketch.reduced([a + 2 * b for a, b in zip(x, y, strict=True)])
    np.testing.assert_allclose(both, sketch.reduced(x) + 2 * sketch.reduced(y), atol=1e-10)
    np.testing.assert_array_equal(sketch.reduced(x), Sketch(named, size=1024, seed=0).reduced(x))
    assert not np.allclose(sketch.reduced(x), Sketch(named, size=1024, seed=1).reduced(x))
    np.testing.assert_array_equal(
        sketch.reduced([x[0], None]), sketch.reduced([x[0], torch.zeros(500)])
    )
    # |Sx|^2 / |x|^2 has mean 1 and standard deviation sqrt(2 / K); of 200 seeds, 5 errors.
    square = float(sum((a**2).sum() for a in x))
    ratio = [
        float((Sketch(named, size=128, seed=seed).reduced(x) ** 2).sum()) / square
        for seed in range(200)
    ]
    assert abs(np.mean(ratio) - 1) < 5 * np.sqrt(2 / 128 / 200)
    assert 0.7 < np.std(ratio) / np.sqrt(2 / 128) < 1.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record_gradients": 0}, "record_gradients=0: must be >= 1"),
        ({"record_rollouts": None}, "record_gradients=8 has no file"),
        ({"top_entropy_quantile": 0.5, "completion_keep": "shadow"}, "takes the loss apart"),
    ],
)
def test_what_the_configuration_refuses(tmp_path: Path, change: Any, message: str) -> None:
    given = {"record_rollouts": str(tmp_path / "x.npz"), "record_gradients": 8}
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **{**given, **change})


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("is_deepspeed_enabled", "DeepSpeed does not leave"),
        ("is_fsdp_enabled", "FSDP does not leave"),
        ("aux_loss_enabled", "router's auxiliary loss"),
        ("processes", "one process only, and there are 2"),
        ("use_vllm", "the sampler's ratio"),
    ],
)
def test_what_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, message: str
) -> None:
    run = trainer(tmp_path, record_rollouts=str(tmp_path / "x.npz"), record_gradients=8)
    if attribute == "processes":
        monkeypatch.setattr(type(run.accelerator), "num_processes", 2)
    else:
        monkeypatch.setattr(run, attribute, True)
    with pytest.raises(ConfigurationError, match=message):
        gradients.check_start(run)


def test_a_long_recording_is_remarked_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gradients, "LONG", 0.0)
    with caplog.at_level("INFO", logger="dppo"):
        recorded(tmp_path, "long", max_steps=2)
    assert sum("record_gradients: those of" in text for text in caplog.messages) == 1
