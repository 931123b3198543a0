"""`audit_step`: it finds a bias that is there, none where there is none, and leaves no trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dppo
from dppo.audit import load_recording, redraws
from dppo.errors import ConfigurationError
from dppo.trl import DPPOTrainer, decision, step_audit
from dppo.trl.step_audit import METRICS

from .conftest import Script, config, parameters, random_completions, trainer

BATCH: dict[str, Any] = {
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2},
    **{"completion_keep": 0.4, "packing": "auto"},
}
"""4 prompts x 4 completions a generation."""


def script() -> Script:
    return Script(*(random_completions(16, seed=seed) for seed in range(4)))


def audited(tmp_path: Path, step: int = 2, **options: Any) -> tuple[dict[str, Any], Any]:
    """What the file says, and the run."""
    given = {"audit_step": step, "rollout_func": script(), **BATCH, **options}
    run = trainer(tmp_path, **given)
    run.train()
    return json.loads((tmp_path / f"audit_step_{step}.json").read_text()), run


def trace(run: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All that a run logs but audit and times, and its parameters."""
    timed = ("dppo/time/", "dppo/audit/", "dppo/efficiency/", "step_time", "train_")
    logs = [
        {k: v for k, v in log.items() if not k.startswith(timed)} for log in run.state.log_history
    ]
    return logs, parameters(run.model)


@pytest.mark.parametrize(
    ("loss_type", "packing", "design", "more"),
    [
        ("grpo", "auto", "systematic", {}),
        ("dapo", "bucket", "poisson", {}),
        ("bnpo", "auto", "poisson", {"entropy_coef": 0.1}),
        ("dapo", "auto", "systematic", {"completion_rule": "threshold"}),
    ],
)
def test_pruning_is_found_unbiased(  # noqa: PLR0917 - pytest passes them by name
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    loss_type: str,
    packing: str,
    design: str,
    more: dict[str, Any],
) -> None:
    """By a seed; a z of 4 has a chance of some 1e-4 along g, and some more in any direction."""
    with caplog.at_level("INFO", logger="dppo"):
        found, run = audited(
            tmp_path, loss_type=loss_type, packing=packing, sampling_design=design, **more
        )
    assert abs(found["along_z"]) < 4
    assert found["bias_z"] < 4
    assert found["along"] == pytest.approx(1, abs=5 * found["along_error"])
    assert found["inflation"] > 0.01
    assert 0 < found["inflation_predicted"] < 20 * found["inflation"]
    assert 0 < found["expected_kept"] < found["completions"] <= 16
    assert found["redraws"] == 32
    (log,) = [log for log in run.state.log_history if "dppo/audit/along" in log]
    assert log["step"] == 2
    for name in METRICS:
        assert log[f"dppo/audit/{name}"] == pytest.approx(found[name])
    said = [text for text in caplog.messages if "audit" in text or "predicted" in text]
    assert any("32 redraws" in text for text in said)
    assert not any("biased" in text for text in said)
    assert log["dppo/variance/inflation"] == pytest.approx(found["inflation_predicted"])


@pytest.mark.parametrize(
    ("loss_type", "packing"), [("dapo", "auto"), ("grpo", "bucket"), ("bnpo", "auto")]
)
def test_a_redraw_is_the_weighted_sum_of_the_recorded_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, packing: str
) -> None:
    """Which go the same way one by one; each row stays with its optimizer step."""
    seen: dict[str, Any] = {}
    measure, drawn = step_audit.measure_redraws, DPPOTrainer._drawn

    def measured(full_PK: Any, redraws_RK: Any) -> Any:
        seen.update(full=full_PK, redraws=redraws_RK)
        return measure(full_PK, redraws_RK)

    def noted(self: Any, *args: Any) -> Any:
        decision = drawn(self, *args)
        seen.setdefault("decisions", []).append((self.phase, decision))
        return decision

    monkeypatch.setattr(step_audit, "measure_redraws", measured)
    monkeypatch.setattr(DPPOTrainer, "_drawn", noted)
    recording = {"record_rollouts": str(tmp_path / "x.npz"), "record_gradients": step_audit.SIZE}
    options = {"max_steps": 1, "loss_type": loss_type, "packing": packing, "audit_redraws": 8}
    audited(tmp_path, 1, **options, **recording)
    each_PGK = load_recording(tmp_path / "x.npz").gradients_PGK
    assert each_PGK is not None
    close: dict[str, Any] = {"rtol": 0, "atol": 2e-5 * np.abs(each_PGK).max()}
    np.testing.assert_allclose(seen["full"], each_PGK.sum(axis=1), **close)
    (_, real), *redrawn = seen["decisions"]
    close["atol"] *= 10  # weights of up to about ten
    for (phase, drawn_again), found in zip(redrawn, seen["redraws"], strict=True):
        assert phase == "idle"  # which no clock counts
        weighted = drawn_again.choices[0].weight[:, :, None] * each_PGK
        np.testing.assert_allclose(found, weighted.sum(axis=(0, 1)), **close)
        np.testing.assert_array_equal(drawn_again.micro_step_N, real.micro_step_N)
    kept = {tuple(d.choices[0].kept.ravel()) for _, d in seen["decisions"]}
    assert len(kept) > 5


def test_control_weights_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    micro_batch_of = decision.schedule.micro_batch_of

    def heavier(rows_R: Any, weight_N: Any, *given: Any) -> Any:
        return micro_batch_of(rows_R, 1.3 * weight_N, *given)

    monkeypatch.setattr(decision.schedule, "micro_batch_of", heavier)
    found, _ = audited(tmp_path, loss_type="dapo", completion_keep=0.7)
    assert found["along_z"] > 4
    assert found["along"] == pytest.approx(1.3, abs=5 * found["along_error"])
    assert any("seems to be biased" in text for text in caplog.messages)


def test_control_the_lowest_fraction_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a draw: the smaller half of the probabilities, weights as they were."""

    def lowest(self: Any, pi: Any, advantages: Any, rows: Any, *, key: Any) -> Any:
        return pi[rows] >= np.median(pi[rows])

    monkeypatch.setattr(dppo.Pruner, "_draw", lowest)
    found, _ = audited(tmp_path, loss_type="dapo")
    assert max(abs(found["along_z"]), found["bias_z"]) > 4


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (2, {}),
        (2, {"completion_keep": "auto", "auto_cost": "tokens", "max_steps": 4}),
        (
            3,  # of 4 steps of a generation, the first of its second pass
            {
                **{"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 5},
                **{"num_iterations": 2, "loss_type": "grpo", "log_completions": True},
                **{"learning_rate": 1e-1},
            },
        ),
        (2, {"steps_per_generation": 3, "loss_type": "dapo", "rollout_func": None, "max_steps": 4}),
        (2, {"steps_per_generation": 1, "loss_type": "grpo", "rollout_func": None}),
        (
            2,  # which trains two passes over the generation, a draw for each
            {
                **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
                **{"steps_per_generation": 4, "num_iterations": 2, "max_steps": 3},
            },
        ),
        (
            2,
            {
                "record_gradients": 16,
                "rollout_func": None,
                "packing": "bucket",
                "loss_type": "bnpo",
            },
        ),
        (
            2,
            {
                **{"prompt_keep": 0.5, "allow_single_epoch": True, "rollout_func": None},
                **{"loss_type": "dr_grpo", "prompt_rule": "uniform"},
            },
        ),
    ],
)
def test_training_goes_on_as_if_nothing_had_been(
    tmp_path: Path, step: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trl.trainer.grpo_trainer.print_prompt_completions_sample", lambda *a, **k: 0
    )
    recording = (
        {"record_rollouts": str(tmp_path / "x.npz")} if "record_gradients" in options else {}
    )
    found, run = audited(tmp_path, step, **options, **recording)
    options = {name: value for name, value in options.items() if name != "record_gradients"}
    plain = trainer(tmp_path, **{**BATCH, "rollout_func": script(), **options})
    plain.train()
    (logs, after), (expected_logs, expected) = trace(run), trace(plain)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert str(logs) == str(expected_logs)  # NaN equals NaN there
    assert found["along_z"] == pytest.approx(0, abs=4)
    assert found["bias_z"] < 4
    assert run._logs["advantages"] == plain._logs["advantages"]


def test_what_it_cannot_say_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="dppo"):
        run = trainer(tmp_path, audit_step=2, **{**BATCH, "completion_rule": "inert"})
        run.train()
    assert any("left to chance" in text for text in caplog.messages)
    assert not (tmp_path / "audit_step_2.json").exists()


def test_a_run_that_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Inside a generation whose old log-probs are not all known; and after the step."""
    options = {
        **{"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 4},
        **{"save_strategy": "steps", "save_steps": 1, "loss_type": "grpo"},
    }
    trainer(tmp_path, rollout_func=script(), **{**BATCH, **options}).train()
    for step, begun, text in ((2, 1, "resumed inside"), (1, 2, "is over already")):
        with caplog.at_level("INFO", logger="dppo"):
            again = {**BATCH, **options, "rollout_func": script(), "save_strategy": "no"}
            run = trainer(tmp_path, audit_step=step, **again)
            run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{begun}"))
        assert any(text in message for message in caplog.messages)
        assert not (tmp_path / f"audit_step_{step}.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audit_step": 0}, "audit_step=0: steps are counted from 1"),
        ({"audit_step": 9}, "audit_step=9 is after the last step, max_steps=3"),
        ({"audit_redraws": 1}, "audit_redraws=1"),
        ({"completion_keep": 1.0}, r"completion_keep=1\.0 none are"),
        ({"completion_keep": "shadow"}, "completion_keep='shadow' none are"),
    ],
)
def test_what_the_configuration_refuses(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **{"audit_step": 2, **change})


def test_what_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = {"max_steps": -1, "num_train_epochs": 0.1}
    with pytest.raises(ConfigurationError, match=r"audit_step=99 is after the last of \d+"):
        trainer(tmp_path, audit_step=99, **epochs).train()
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(ConfigurationError, match="audit_step=1 works in one process only"):
        trainer(tmp_path, audit_step=1)


def test_a_pruner_of_another_kind_is_refused(tmp_path: Path) -> None:
    class Other(dppo.Pruner):
        pass

    run = trainer(tmp_path, audit_step=1)
    run.pruner = Other(run.pruner.config, seed=0)
    with pytest.raises(ConfigurationError, match="prunes otherwise"):
        run.train()


def test_the_threshold_is_what_is_documented() -> None:
    assert redraws.SUSPICIOUS == 4
    assert step_audit.SIZE == 4096
