"""A tiny random policy and a trainer on it; tests that need torch and TRL live in this folder."""

from typing import Any

import pytest

pytest.importorskip("trl", reason="the trl extra is not installed")

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _silence_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host warns that rollout functions and environments are experimental."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def tiny_model(
    seed: int = 0, *, vocab: int | None = None, positions: int = 128, **overrides: Any
) -> Qwen3ForCausalLM:
    """A random Qwen3 of some thousand parameters, weights large enough for ratios to move."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab or len(load_builtin_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **overrides,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def alternating_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Some reward that differs within most groups and repeats for equal completions."""
    return [float(sum(map(ord, c)) % 3 == 0) for c in completions]


OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
"""2 prompts x 4 completions a generation."""

OURS: dict[str, Any] = {"packing": "bucket", "completion_keep": 0.5}
"""So that a micro-batch's rows are the model's; what packing does with them: test_packed. And so
that the rate is known; how it is chosen: test_auto_keep."""

OF_THE_TRAINER = (
    *("eval_dataset", "callbacks", "peft_config", "rollout_func", "tools", "environment_factory"),
    *("train_dataset", "processing_class"),
)


def config(tmp_path: Any, **overrides: Any) -> DPPOConfig:
    """A small configuration: 2 prompts x 4 completions a generation."""
    return DPPOConfig(output_dir=str(tmp_path), **{**OPTIONS, **OURS, **overrides})


def trainer(
    tmp_path: Any, *, model: Any = None, reward: Any = alternating_reward, **overrides: Any
) -> DPPOTrainer:
    """A trainer on the tiny model and the built-in task."""
    return _build(DPPOTrainer, DPPOConfig, tmp_path, model, reward, overrides)


def host_trainer(
    tmp_path: Any,
    *,
    model: Any = None,
    reward: Any = alternating_reward,
    kind: type = GRPOTrainer,
    **overrides: Any,
) -> GRPOTrainer:
    """The host's trainer on the same."""
    return _build(kind, GRPOConfig, tmp_path, model, reward, overrides)


def _build(  # noqa: PLR0917 - of no one else's concern
    kind: type, config_kind: type, tmp_path: Any, model: Any, reward: Any, overrides: dict[str, Any]
) -> Any:
    given = {name: overrides.pop(name) for name in OF_THE_TRAINER if name in overrides}
    ours = OURS if issubclass(config_kind, DPPOConfig) else {}
    defaults = {
        "train_dataset": sorting_dataset(64, seed=0),
        "processing_class": load_builtin_tokenizer(),
    }
    return kind(
        tiny_model() if model is None else model,
        reward,
        config_kind(output_dir=str(tmp_path), **{**OPTIONS, **ours, **overrides}),
        **{**defaults, **given},
    )


class Script:
    """A rollout function that hands out prepared completions, one generation after the other."""

    def __init__(self, *generations: list[list[int]], **fields: Any) -> None:
        self.generations, self.fields, self.calls = generations, fields, 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        completions = self.generations[self.calls % len(self.generations)]
        self.calls += 1
        ids = trainer.processing_class(text=prompts)["input_ids"]
        fields = {"logprobs": None, **self.fields}
        return {"prompt_ids": ids, "completion_ids": completions, **fields}


def random_completions(
    rows: int, *, seed: int, longest: int = 6, ended: float = 0.7
) -> list[list[int]]:
    """Digits (ids 3 to 12), most of them ending in the end-of-sequence token (id 1)."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(rows):
        digits = rng.integers(3, 13, rng.integers(2, longest + 1)).tolist()
        drawn.append([*digits[:-1], 1] if rng.random() < ended else digits)
    return drawn


class Watch(TrainerCallback):
    """Sees the decisions, the forward passes, the optimizer steps and the logs of a run."""

    def __init__(self, trainer: Any) -> None:
        self.decisions: list[Any] = []
        self.gradient_rows: list[int] = []
        self.scored_rows: list[int] = []
        self.optimizer_steps = 0
        self.before = parameters(trainer.model)
        self.trainer = trainer
        trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)
        trainer.add_callback(self)
        if isinstance(trainer, DPPOTrainer):
            decide = trainer._decide

            def noted(rollout: Any) -> Any:
                self.decisions.append(decide(rollout))
                return self.decisions[-1]

            trainer._decide = noted

    def _forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:  # else a step of the generation
            rows = kwargs["input_ids"].shape[0]
            (self.gradient_rows if torch.is_grad_enabled() else self.scored_rows).append(rows)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer_steps += 1

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [log for log in self.trainer.state.log_history if "loss" in log]

    def check(self) -> None:
        """What every run must show."""
        trainer, after = self.trainer, parameters(self.trainer.model)
        steps = trainer.args.max_steps
        assert self.optimizer_steps == trainer.state.global_step == len(self.logs) == steps
        assert all(torch.isfinite(p).all() for p in after.values())
        trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        assert any(not torch.equal(after[name], self.before[name]) for name in trained)
        assert all(np.isfinite(log["loss"]) for log in self.logs)
        rates = [log["learning_rate"] for log in self.logs]
        linear = [trainer.args.learning_rate * (1 - step / steps) for step in range(steps)]
        assert rates == pytest.approx(linear)
        # Exactly the micro-batches that were decided, with exactly their rows.
        decided = [
            len(micro_batch.rows_R)
            for decision in self.decisions
            for micro_batch in decision.micro_batches
            if micro_batch is not None
        ]
        assert self.gradient_rows == decided[: len(self.gradient_rows)]
        # The last generation may serve more micro-steps than the run has left.
        last = sum(m is not None for m in self.decisions[-1].micro_batches)
        assert len(decided) - last <= len(self.gradient_rows) <= len(decided)


def watched(trainer: Any) -> Watch:
    """Train, and return what was seen."""
    watch = Watch(trainer)
    trainer.train()
    return watch


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
