"""The packed forward: the log-probs and gradients of each row alone, or it is not used."""

import copy
import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from dppo.errors import ConfigurationError
from dppo.trl import packed, self_check
from dppo.trl.packed import IGNORED, Form, PackedModel

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
ROWS = [(2, 5), (4, 1), (1, 3), (3, 6), (2, 2), (3, 1), (3, 4)]
"""Prompt and completion tokens; prompts of equal length are equal."""
LEFT, RIGHT = (max(row[side] for row in ROWS) for side in (0, 1))


def packing(model: Any, *, hidden: int = 1, **options: Any) -> PackedModel:
    """Packed as the configuration of the model suggests; a wide one prefers few tokens."""
    form = Form.of(model.config)
    price = dataclasses.replace(form.price, hidden=hidden, scores=0)
    options.setdefault("completion", RIGHT)
    return PackedModel(model, form=dataclasses.replace(form, price=price), **options)


class Seen:
    """What a packed model has counted."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    def __call__(self, counts: dict[str, int]) -> None:
        self.counts.append(counts)


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
    left = LEFT
    batch = np.full((len(ROWS), left + RIGHT), pad)
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
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in range(LEFT + 1)]
    return [prompts[p] + rng.integers(0, VOCABULARY, c).tolist() for p, c in ROWS]


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
    return [row[LEFT - 1 : LEFT - 1 + c] for row, (_, c) in zip(values, ROWS, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("attention", "hidden"), [("sdpa", 1), ("sdpa", 9999), ("eager", 9999)])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_each_row_alone(
    name: str, attention: str, hidden: int, dtype: torch.dtype
) -> None:
    """Log-probs and gradients to rounding: the host's head returns float32 in any case.

    A leak, a wrong position or a wrong label is off by 0.1 and more. The sliding windows are
    shorter than the sequences, so there no prompt is shared.
    """
    seen = Seen()
    model = build(MODELS[name], attention).to(dtype)
    ids = some_ids()
    weight = torch.linspace(0.5, 2.0, len(ROWS))
    out = packing(model, hidden=hidden, count=seen)(**padded(ids), fused_lm_head=True)
    (counts,) = seen.counts
    assert counts["real"] == sum(map(sum, ROWS))
    if hidden > 1:
        shared = counts["computed"] < counts["real"]
        assert shared == ("sliding" not in name)
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
    packed_model = packing(model, hidden=9999)
    before = packed_model(**padded(ids), fused_lm_head=True).log_probs
    ids[0][3] = (ids[0][3] + 1) % VOCABULARY
    after = packed_model(**padded(ids), fused_lm_head=True).log_probs
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_padding_is_known_by_the_mask_not_by_the_token() -> None:
    """Pad = eos = 0: completions [5, 7, 0] and [9, 0], and one that was cut, [5, 7, 8, 6]."""
    model = build(MODELS["llama"])
    ids = torch.tensor([[3, 5, 7, 0, 0], [3, 9, 0, 0, 0], [3, 5, 7, 8, 6]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, 0] = IGNORED
    seen = Seen()
    out = packing(model, completion=4, count=seen)(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    assert seen.counts[0]["real"] == 12  # 9 scored tokens and 3 prompts
    assert int((out.log_probs != 0).sum()) == 9
    for row, length in enumerate((4, 3, 5)):
        one = ids[row : row + 1, :length]
        single = model(input_ids=one, labels=one, fused_lm_head=True).log_probs[0]
        assert torch.allclose(out.log_probs[row, : length - 1], single, atol=1e-5)


def test_the_temperature_divides_the_logits() -> None:
    model = build(MODELS["gpt2, absolute positions"], temperature=0.7)
    ids = some_ids()
    out = packing(model, hidden=9999)(**padded(ids), fused_lm_head=True)
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
    seen = Seen()
    out = packing(model, completion=6, count=seen)(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    assert seen.counts == [{"real": 3, "computed": 3, "pairs": 6, "attended": 9}]
    one = model(input_ids=ids[:1, :3], labels=ids[:1, :3], fused_lm_head=True).log_probs
    assert torch.allclose(out.log_probs[:1, :2], one, atol=1e-5)
    assert (out.log_probs[1] == 0).all()
    nothing = packing(model, completion=6)(
        input_ids=ids, attention_mask=mask, labels=torch.full_like(ids, IGNORED), fused_lm_head=True
    )
    nothing.log_probs.sum().backward()  # connected, and zero
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def told(model: Any, *, shares: bool = False, **options: Any) -> str | None:
    """What the self-check says of it."""
    form = dataclasses.replace(Form.of(model.config), shares=shares)
    return self_check.problem(model, form, vocabulary=VOCABULARY, device="cpu", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_does_not_keep_sequences_apart_is_found_out(
    name: str, scale: float, dtype: torch.dtype
) -> None:
    """Also where weights are as small as at the start, and rounding is as large as the leak."""
    model = build(LEAKING[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    said = told(model.to(dtype))
    assert said is not None
    assert "moves the log-probs of other sequences" in said


@pytest.mark.parametrize("name", MODELS)
def test_the_self_check_passes_where_packing_is_right(name: str) -> None:
    model = build(MODELS[name])
    for shares in (False, "sliding" not in name):
        assert told(model, shares=shares) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_in_a_deep_model_with_large_logits_is_not_taken_for_a_fault(
    dtype: torch.dtype,
) -> None:
    """It is some hundred times that of a small one, and padded rows have it too."""
    deep = {**GATED, "hidden_size": 128, "num_hidden_layers": 16}
    model = build(transformers.LlamaConfig(**deep), "sdpa").to(dtype)
    probe = self_check.Probe.drawn(VOCABULARY, "cpu")
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
        assert float(probe.alone(model).min()) < -20
    for shares in (False, True):
        assert told(model, shares=shares) is None


def test_a_wrong_position_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart, but in the places of the row."""
    model = build(MODELS["gpt2, absolute positions"])
    dense = packed.Tokens.dense

    def shifted(self: Any, values: Tensor, fill: int) -> Tensor:
        return dense(self, values, fill) + (values is self.position_BL)

    monkeypatch.setattr(packed.Tokens, "dense", shifted)
    assert "log-probs are off by" in str(told(model))


def test_the_self_check_sees_a_wrong_gradient() -> None:
    """Log-probs are right, and one layer's values are cut off from the gradient."""
    model = build(MODELS["llama"])
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(
        lambda module, given, out: out.detach() if out.shape[0] < 4 and out.shape[1] > 9 else out
    )
    assert "a gradient is off by" in str(told(model))
    assert told(model, gradient=False) is None


def test_an_adapter_that_is_zero_at_first_has_its_gradient_checked() -> None:
    model = build(MODELS["llama"])
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    form = Form.of(model.config)
    check = {"vocabulary": VOCABULARY, "device": "cpu"}
    assert self_check.problem(adapted, form, **check) is None
    layer = model.model.layers[1].self_attn.v_proj
    layer.register_forward_hook(
        lambda module, given, out: out.detach() if out.shape[0] < 4 and out.shape[1] > 9 else out
    )
    assert "a gradient is off by" in str(self_check.problem(adapted, form, **check))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.Phi3Config(
                **{**GATED, "vocab_size": 13, "pad_token_id": 0},
                original_max_position_embeddings=16,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
            ),
            "follow the longest sequence",
        ),
        (
            transformers.FalconConfig(
                **{"vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "alibi": True},
            ),
            "alibi",
        ),
    ],
    ids=["longrope", "alibi"],
)
def test_positions_that_depend_on_the_row_are_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, reason: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    run = trainer(tmp_path, model=model, packing="varlen", max_steps=1)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        assert self_check.form_of(run) is None
    assert reason in caplog.text
    if reason.startswith("follow"):
        batch = {"prompt_mask": torch.ones(2, 3), "completion_mask": torch.zeros(2, 4)}
        assert run._trimmed(batch) is batch


def test_another_attention_of_the_reference_is_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    run = trainer(tmp_path, model=str(tmp_path / "model"), packing="varlen", beta=0.1)
    run.ref_model.set_attn_implementation("eager")
    with caplog.at_level(logging.WARNING, logger="dppo"):
        assert self_check.form_of(run) is None
    assert "the reference model has eager attention" in caplog.text


def test_a_buffer_as_wide_as_the_context_bounds_the_rows() -> None:
    """GPT-Neo's causal mask; and its local layers look back 4 tokens, so no prompt is shared."""
    config = transformers.GPTNeoConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
        max_position_embeddings=12,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    model = build(config)
    form = Form.of(model.config)
    assert (form.widest, form.reach) == (12, 4)
    seen = Seen()
    called = packing(model, hidden=9999, count=seen)
    out = called(**padded(some_ids()), fused_lm_head=True)
    assert seen.counts[0]["attended"] <= 12 * seen.counts[0]["computed"]
    expected = alone(model, some_ids())
    for part, (log_probs, _) in zip(of_completions(out.log_probs), expected, strict=True):
        assert torch.allclose(part, log_probs, atol=1e-5)


def test_the_trainer_falls_back_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.OPTConfig(
        **{**SIZES, "vocab_size": 13}, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        watch = watched(trainer(tmp_path, model=model, packing="varlen"))
    assert watch.trainer._form is None
    assert "OPTForCausalLM" in caplog.text
    assert "bucket" in caplog.text


def test_a_model_that_cannot_be_called_packed_is_told_with_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> str:
        raise RuntimeError("no positions here")

    monkeypatch.setattr(self_check, "problem", refuse)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        watched(trainer(tmp_path, packing="varlen")).check()
    assert "RuntimeError: no positions here" in caplog.text


def test_the_auxiliary_loss_of_a_router_is_not_packed(tmp_path: Path) -> None:
    """Nor are its micro-batches made anew by "auto", though nothing is pruned."""
    config = transformers.MixtralConfig(
        **{**GATED, "vocab_size": 13}, num_local_experts=2, output_router_logits=True
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    off = {"completion_keep": 1.0, "model": model}
    assert not trainer(tmp_path, packing="auto", **off)._plans
    for packing in ("varlen", "bucket"):
        with pytest.raises(ConfigurationError, match="packing='none'"):
            trainer(tmp_path, packing=packing, **off)


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
    for packing in ("none", "bucket", "varlen"):
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
        assert (run._form is not None) == (packing == "varlen")
        ends[packing] = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        densities = [log.get("dppo/tokens/density") for log in run.state.log_history]
        assert (packing != "none" or run.args.prunes) == any(densities)
    assert (ends["varlen"] - ends["none"]).abs().max() < 1e-5
    assert (ends["bucket"] - ends["none"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options", [{"packing": "dense"}, {"packing_window": 0}, {"packing_capacity": 0}]
)
def test_packings_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        trainer(tmp_path, **options)


# -- attention that takes lengths ------------------------------------------------------------------


def varlen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What flash attention computes from the lengths it is given; it sees no mask."""
    assert mask is None or mask.dim() == 2  # as for a padded batch
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    ends = options.get("cu_seq_lens_q")
    ends = [0, query.shape[2]] if ends is None else ends.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, begin:end] for x in (query, key, value)), is_causal=True
        )
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


@pytest.fixture
def flash() -> str:
    """Name of an attention that is called as flash attention is."""
    name = "flash_stand_in"
    transformers.AttentionInterface.register(name, varlen_attention)
    transformers.masking_utils.AttentionMaskInterface.register(
        name, transformers.masking_utils.flash_attention_mask
    )
    return name


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_flash_attention_gets_one_row_and_the_lengths(name: str, flash: str) -> None:
    ids, seen = some_ids(), Seen()
    expected = alone(build(MODELS[name], "eager"), ids)
    model = build(copy.deepcopy(MODELS[name]), "eager")
    model.config._attn_implementation_internal = flash
    form = Form.of(model.config)
    assert form.flat
    assert not form.shares
    out = PackedModel(model, form=form, completion=RIGHT, count=seen)(
        **padded(ids), fused_lm_head=True
    )
    tokens = sum(map(sum, ROWS))
    (counts,) = seen.counts
    assert counts["computed"] == counts["real"] == tokens
    assert counts["attended"] == counts["pairs"]
    for part, (log_probs, _) in zip(of_completions(out.log_probs), expected, strict=True):
        assert torch.allclose(part, log_probs, atol=1e-5)
    # Padded rows are beyond the stand-in; alone, they are what it computes.
    probe = self_check.Probe.drawn(VOCABULARY, "cpu")
    called = PackedModel(model, form=form, completion=probe.completion)
    assert torch.allclose(probe.packed(called), probe.alone(model), atol=1e-5)
    wrong = dataclasses.replace(form, flat=False)  # positions alone do not reach such a kernel
    called = PackedModel(model, form=wrong, completion=probe.completion)
    assert not torch.allclose(probe.packed(called), probe.alone(model), atol=0.1)


# -- what else is not packed -----------------------------------------------------------------------


def test_an_adapter_of_virtual_tokens_is_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt_tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run = trainer(tmp_path, packing="varlen", peft_config=prompt_tuning, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        assert self_check.form_of(run) is None
    assert "virtual tokens" in caplog.text


def test_a_model_that_takes_no_mask_of_ours_shares_no_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, packing="varlen")

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            raise ValueError("a mask of two dimensions, please")

    run.model.register_forward_pre_hook(refuse, with_kwargs=True)
    with caplog.at_level(logging.WARNING, logger="dppo"):
        form = self_check.form_of(run)
    assert form is not None
    assert not form.shares
    assert "two dimensions, please" in caplog.text


# -- memory ----------------------------------------------------------------------------------------


def memory(call: Any) -> np.ndarray:
    """Bytes in tensors after each allocation and release of a call, beyond those before it."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # the only place that has them in order
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return np.cumsum([0, *(change for _, change in changes)])


def training_pass(called: Any, batch: dict[str, Tensor]) -> Any:
    return lambda: called(**batch, fused_lm_head=True).log_probs.sum().backward()


def lengths_batch(prompt_B: Any, completion_B: Any, *, vocabulary: int) -> dict[str, Tensor]:
    """Random rows; every prompt is its own."""
    rng, left, right = np.random.default_rng(0), max(prompt_B), max(completion_B)
    ids = torch.from_numpy(rng.integers(0, vocabulary, (len(prompt_B), left + right)))
    place = torch.arange(left + right)[None]
    starts, ends = (torch.as_tensor(x)[:, None] for x in (left - prompt_B, left + completion_B))
    mask = ((place >= starts) & (place < ends)).long()
    labels = ids.masked_fill((mask == 0) | (place < left), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_a_large_vocabulary_is_never_laid_out_in_full() -> None:
    """2,048 packed tokens of a vocabulary of 50,257: logits would be 412 MB, and twice, as float32.

    The peak is a quarter of that of whole logits at most, and log-probs and gradients are equal.
    """
    vocabulary = 50_257
    small = {**GATED, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**{**small, "vocab_size": vocabulary})
    config.max_position_embeddings = 2048
    model = build(config, "sdpa")
    rng = np.random.default_rng(0)
    completion_B = rng.integers(20, 100, 33)
    prompt_B = np.full(33, 4)
    batch = lengths_batch(prompt_B, completion_B, vocabulary=vocabulary)
    tokens = int((prompt_B + completion_B).sum())
    assert tokens > 2048

    def whole() -> None:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:, None]
        scored = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0))
        scored[labels != IGNORED].sum().backward()

    called = packing(model, completion=int(completion_B.max()), vocabulary=vocabulary)
    model.zero_grad(set_to_none=False)
    chunked = memory(training_pass(called, batch)).max()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    unchunked = memory(whole).max()
    assert unchunked > 2 * 4 * tokens * vocabulary
    assert chunked <= 0.25 * unchunked
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=1e-3)
        assert (found[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_the_peak_is_not_above_that_of_padded_rows(attention: str, spread: float) -> None:
    """Whatever the lengths are, nearly equal ones too, and with scores of all heads kept.

    Of its own a packed token takes about 100 bytes of indices, and rotary angles, which are no
    longer the same in every row; once for all layers. A model of width 32 would see them.
    """
    wide = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    model = build(transformers.LlamaConfig(**{**GATED, **wide}), attention)
    model.zero_grad(set_to_none=False)
    rng = np.random.default_rng(0)
    completion_B = np.clip(rng.normal(100 * (1 - spread), 100 * spread, 32), 5, 100).astype(int)
    completion_B[0] = 100
    batch = lengths_batch(np.full(32, 20), completion_B, vocabulary=VOCABULARY)
    form = Form.of(model.config)
    packed_model = PackedModel(model, form=form, completion=100, vocabulary=VOCABULARY)
    training_pass(model, batch)()  # gradients exist
    with packed.small_tiles(VOCABULARY, 32 * 120):  # else padded rows take 0.5 GB for these alone
        as_padded = memory(training_pass(model, batch)).max()
    as_packed = memory(training_pass(packed_model, batch)).max()
    assert as_packed <= as_padded * (1.005 if spread < 0.1 else 0.8)


def test_memory_does_not_creep_up() -> None:
    """200 batches of mixed lengths: what is alive after each does not grow."""
    model, rng = build(MODELS["qwen3"], "sdpa"), np.random.default_rng(0)
    model.zero_grad(set_to_none=False)

    def some_batches(count: int) -> None:
        for _ in range(count):
            completion_B = rng.integers(1, 30, 6)
            batch = lengths_batch(np.full(6, 5), completion_B, vocabulary=VOCABULARY)
            called = packing(model, completion=int(completion_B.max()), hidden=64)
            training_pass(called, batch)()

    some_batches(20)
    left = memory(lambda: some_batches(180))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert left[-1] <= 0.02 * (2 * parameters + left.max())
