"""A tiny random policy and a trainer on it; tests that need torch and TRL live in this folder."""

from typing import Any

import pytest

pytest.importorskip("trl", reason="the trl extra is not installed")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer

torch.set_num_threads(1)


def tiny_model(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 of some thousand parameters, weights large enough for ratios to move."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(load_builtin_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
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


def config(tmp_path: Any, **overrides: Any) -> DPPOConfig:
    """A small configuration: 2 prompts x 4 completions a generation."""
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
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
    return DPPOConfig(**{**options, **overrides})


def trainer(
    tmp_path: Any, *, model: Any = None, reward: Any = alternating_reward, **overrides: Any
) -> DPPOTrainer:
    """A trainer on the tiny model and the built-in task."""
    return DPPOTrainer(
        tiny_model() if model is None else model,
        reward,
        config(tmp_path, **overrides),
        sorting_dataset(64, seed=0),
        processing_class=load_builtin_tokenizer(),
    )
