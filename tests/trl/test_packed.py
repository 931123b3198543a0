"""The packed forward: the log-probs and gradients of each row alone, or it is not used."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from dppo.errors import ConfigurationError
from dppo.trl import packed
from dppo.trl.packed import IGNORED, Layout, PackedModel

from .conftest import Script, random_completions, tiny_model, trainer, watched

VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
}
MODELS: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16),
    "llama": transformers.LlamaConfig(**GATED),
    "gemma": transformers.GemmaConfig(**GATED, head_dim=16),
    "gemma3, sliding": transformers.Gemma3TextConfig(**GATED, head_dim=16, sliding_window=4),
    "mistral, sliding": transformers.MistralConfig(**GATED, sliding_window=4),
    "gpt2, absolute positions": transformers.GPT2Config(**GPT2),
}
LEAKING: dict[str, Any] = {
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "bloom": transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2),
}
ROWS = [(2, 5), (4, 1), (1, 3), (3, 6), (2, 2)]
"""Prompt and completion tokens."""


def build(config: Any, attention: str = "eager", *, temperature: float = 1.0) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model.eval()  # no dropout


def padded(ids: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Prompts padded on the left, completions on the right, as the host does."""
    left, right = (max(row[side] for row in ROWS) for side in (0, 1))
    batch = np.full((len(ROWS), left + right), pad)
    mask = np.zeros_like(batch)
    labels = np.full_like(batch, IGNORED)
    for row, (tokens, (prompt, completion)) in enumerate(zip(ids, ROWS, strict=True)):
        here = slice(left - prompt, left + completion)
        batch[row, here], mask[row, here] = tokens, 1
        labels[row, left : left + completion] = tokens[prompt:]
    named = {"input_ids": batch, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(values) for name, values in named.items()}


def some_ids(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, sum(row)).tolist() for row in ROWS]


def alone(model: Any, ids: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies of each completion, its sequence alone and from position 0."""
    scored = []
    for tokens, (prompt, _) in zip(ids, ROWS, strict=True):
        row = torch.tensor([tokens])
        labels = row.clone()
        labels[:, :prompt] = IGNORED
        place = torch.arange(len(tokens))[None]
        out = model(input_ids=row, position_ids=place, labels=labels, fused_lm_head=True)
        scored.append((out.log_probs[0, prompt - 1 :], out.entropy[0, prompt - 1 :]))
    return scored


def of_completions(values: Tensor) -> list[Tensor]:
    left = max(row[0] for row in ROWS)
    return [row[left - 1 : left - 1 + c] for row, (_, c) in zip(values, ROWS, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("attention", "hidden"), [("sdpa", 1), ("sdpa", 64), ("eager", 64)])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_each_row_alone(
    name: str, attention: str, hidden: int, dtype: torch.dtype
) -> None:
    """Log-probs and gradients to rounding: the host's head returns float32 in any case.

    A leak, a wrong position or a wrong label is off by 0.1 and more.
    """
    model = build(MODELS[name], attention).to(dtype)
    ids = some_ids()
    weight = torch.linspace(0.5, 2.0, len(ROWS))
    out = PackedModel(model, window=64, hidden=hidden)(**padded(ids), fused_lm_head=True)
    found = of_completions(out.log_probs)
    sum(w * part.sum() for w, part in zip(weight, found, strict=True)).backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = alone(model, ids)
    sum(w * part.sum() for w, (part, _) in zip(weight, expected, strict=True)).backward()
    for part, entropy, (log_probs, entropies) in zip(
        found, of_completions(out.entropy), expected, strict=True
    ):
        assert torch.allclose(part, log_probs, atol=1e-5)
        assert torch.allclose(entropy, entropies, atol=1e-5)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1e-3)
            assert (gradient[key] - parameter.grad).abs().max() <= 1e-4 * scale, key


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_sequence_changes_nothing(attention: str) -> None:
    model = build(MODELS["qwen3"], attention)
    ids = some_ids()
    before = PackedModel(model, window=64)(**padded(ids), fused_lm_head=True).log_probs
    ids[0][3] = (ids[0][3] + 1) % VOCABULARY
    after = PackedModel(model, window=64)(**padded(ids), fused_lm_head=True).log_probs
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_padding_is_known_by_the_mask_not_by_the_token() -> None:
    """Pad = eos = 0: completions [5, 7, 0] and [9, 0], and one that was cut, [5, 7, 8, 6]."""
    model = build(MODELS["llama"])
    ids = torch.tensor([[3, 5, 7, 0, 0], [3, 9, 0, 0, 0], [3, 5, 7, 8, 6]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, 0] = IGNORED
    counted = []
    out = PackedModel(model, window=64, count=lambda *given: counted.append(given))(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    assert counted[0][0] == 12  # 9 scored tokens and 3 prompts
    assert int((out.log_probs != 0).sum()) == 9
    for row, length in enumerate((4, 3, 5)):
        one = ids[row : row + 1, :length]
        single = model(input_ids=one, labels=one, fused_lm_head=True).log_probs[0]
        assert torch.allclose(out.log_probs[row, : length - 1], single, atol=1e-5)


def test_the_temperature_divides_the_logits() -> None:
    model = build(MODELS["gpt2, absolute positions"], temperature=0.7)
    ids = some_ids()
    out = PackedModel(model, window=64)(**padded(ids), fused_lm_head=True)
    for found, tokens, (prompt, _) in zip(of_completions(out.log_probs), ids, ROWS, strict=True):
        row = torch.tensor([tokens])
        expected = (model(input_ids=row).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = expected.gather(1, row[0, 1:, None])[prompt - 1 :, 0]
        assert torch.allclose(found, expected, atol=1e-5)


def test_one_sequence_with_trailing_padding_and_rows_without_a_label() -> None:
    model = build(MODELS["qwen3"])
    ids = torch.tensor([[1, 2, 3, 0, 0, 0, 0], [4, 5, 6, 7, 8, 9, 1]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[1] = IGNORED  # a row that is there for the shape only
    counted = []
    out = PackedModel(model, window=64, count=lambda *given: counted.append(given))(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    assert counted == [(3, 3)]
    one = model(input_ids=ids[:1, :3], labels=ids[:1, :3], fused_lm_head=True).log_probs
    assert torch.allclose(out.log_probs[:1, :2], one, atol=1e-5)
    assert (out.log_probs[1] == 0).all()
    nothing = PackedModel(model, window=64)(
        input_ids=ids, attention_mask=mask, labels=torch.full_like(ids, IGNORED), fused_lm_head=True
    )
    nothing.log_probs.sum().backward()  # connected, and zero
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_almost_every_token_is_a_real_one() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 0.6, 64), 300).astype(int)
    mask = torch.from_numpy(np.arange(300) < lengths[:, None])
    rows, width = Layout.of(mask, window=64, hidden=4096).shape
    assert mask.sum() / mask.numel() < 0.35
    assert mask.sum() / (rows * width) > 0.97


@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_does_not_keep_sequences_apart_is_found_out(name: str) -> None:
    leak = packed.deviation(build(LEAKING[name]), vocabulary=VOCABULARY, device="cpu")
    assert leak > 100 * packed.tolerance(torch.float32)
    right = packed.deviation(build(MODELS["llama"]), vocabulary=VOCABULARY, device="cpu")
    assert right < packed.tolerance(torch.float32) / 5


def test_the_trainer_falls_back_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.OPTConfig(
        **{**SIZES, "vocab_size": 13}, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        watch = watched(trainer(tmp_path, model=model, packing="varlen"))
    assert not watch.trainer._packs
    assert "OPTForCausalLM" in caplog.text
    assert "bucket" in caplog.text


def test_a_model_that_cannot_be_called_packed_is_told_with_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> float:
        raise RuntimeError("no positions here")

    monkeypatch.setattr(packed, "deviation", refuse)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        watched(trainer(tmp_path, packing="varlen")).check()
    assert "RuntimeError: no positions here" in caplog.text


def test_the_auxiliary_loss_of_a_router_is_not_packed(tmp_path: Path) -> None:
    """It would count the tails of dense rows; also with pruning off."""
    config = transformers.MixtralConfig(
        **{**GATED, "vocab_size": 13}, num_local_experts=2, output_router_logits=True
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    off = {"completion_keep": 1.0, "model": model}
    trainer(tmp_path, packing="bucket", **off)
    with pytest.raises(ConfigurationError, match="packing='bucket'"):
        trainer(tmp_path, packing="varlen", **off)


def test_a_row_beyond_the_capacity_has_a_micro_batch_of_its_own(tmp_path: Path) -> None:
    script = Script(random_completions(8, seed=0))
    run = trainer(
        tmp_path,
        packing="varlen",
        packing_capacity=1,
        completion_keep=0.9,
        rollout_func=script,
        gradient_accumulation_steps=8,
        per_device_train_batch_size=1,
        max_steps=1,
    )
    watch = watched(run)
    decision = watch.decisions[0]
    length = decision.rows.prompt_tokens + decision.rows.completion_tokens
    batches = [b.rows_R for b in decision.micro_batches if b is not None]
    assert max(int(length[rows].sum()) for rows in batches) == length.max()
    assert any(len(rows) == 1 for rows in batches)


OPTIONS: dict[str, dict[str, Any]] = {
    "off": {"completion_keep": 1.0},
    "pruned": {"completion_keep": 0.5},
    "two passes": {"num_iterations": 2, "steps_per_generation": 4, "loss_type": "grpo"},
    "prompts": {"prompt_keep": 0.5, "allow_single_epoch": True, "loss_type": "dr_grpo"},
    "KL": {"beta": 0.05, "completion_keep": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_is_that_of_padded_rows(tmp_path: Path, name: str) -> None:
    """Parameters to 1e-5 after three steps of rate 1e-2: rounding, Adam's division damped."""
    options, model = OPTIONS[name], None
    if "beta" in options:
        tiny_model().save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    rows = 16 if "steps_per_generation" in options else 8
    ends = {}
    for packing in ("bucket", "varlen"):
        script = Script(*[random_completions(rows, seed=seed) for seed in range(3)])
        run = trainer(
            tmp_path,
            model=model,
            packing=packing,
            rollout_func=script,
            adam_epsilon=1e-3,
            **options,
        )
        run.train()
        assert run._packs == (packing == "varlen")
        ends[packing] = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        densities = [log.get("dppo/tokens/density") for log in run.state.log_history]
        assert (packing == "varlen" or run.args.prunes) == any(densities)
    assert (ends["varlen"] - ends["bucket"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options", [{"packing": "dense"}, {"packing_window": 0}, {"packing_capacity": 0}]
)
def test_packings_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        trainer(tmp_path, **options)
