"""Real runs of a tiny transformer with pruning on, and its gradient averaged over every outcome."""

import dataclasses
import importlib.resources
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dppo.packing.layout import Price
from dppo.tasks import load_builtin_tokenizer
from dppo.trl.self_check import form_of

from .conftest import (
    Script,
    Watch,
    alternating_reward,
    host_trainer,
    parameters,
    random_completions,
    tiny_model,
    trainer,
    watched,
)
from .test_exact import EveryOutcome


def scoring_passes(watch: Watch) -> list[int]:
    """Rows of each no-grad pass that the decisions ask for."""
    return [rows_WR.shape[1] for d in watch.decisions for rows_WR in d.scoring]


def union_kept(decision: Any) -> np.ndarray:
    return np.logical_or.reduce([choice.kept.ravel() for choice in decision.choices])


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 4},
        {"steps_per_generation": 3, "per_device_train_batch_size": 4},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 3},
        {"steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("packing", ["bucket", "none"])
def test_every_schedule(tmp_path: Path, options: dict[str, Any], packing: str) -> None:
    run = trainer(
        tmp_path, **{"max_steps": 4, "packing": packing, "completion_keep": 0.4, **options}
    )
    watch = watched(run)
    watch.check()
    args = run.args
    served = args.steps_per_generation * args.num_iterations
    micro_steps = args.max_steps * args.gradient_accumulation_steps
    assert len(watch.decisions) == -(-micro_steps // served)
    if args.steps_per_generation > 1:  # else every micro-step ends a generation and runs
        assert len(watch.gradient_rows) < micro_steps
    for decision in watch.decisions:
        kept = [np.flatnonzero(choice.kept) for choice in decision.choices]
        assert len(kept) == args.num_iterations
        ran: list[list[int]] = [[] for _ in kept]
        for micro_batch in filter(None, decision.micro_batches):
            rows_R = micro_batch.rows_R
            ran[micro_batch.segment.iteration] += rows_R[rows_R >= 0].tolist()
        assert [sorted(rows) for rows in ran] == [k.tolist() for k in kept]
    # Old log-probs are needed unless a generation ends with an optimizer step.
    needed = args.gradient_accumulation_steps % served != 0
    assert watch.scored_rows == (scoring_passes(watch) if needed else [])


def test_a_fresh_draw_for_every_pass_and_step(tmp_path: Path) -> None:
    """Passes over the same generation keep different rows (chance of equality all along: none)."""
    run = trainer(tmp_path, num_iterations=2, max_steps=6, completion_keep=0.4)
    watch = watched(run)
    passes = [d.choices for d in watch.decisions]
    assert any((first.kept != second.kept).any() for first, second in passes)
    for first, second in passes:
        np.testing.assert_allclose(first.pi, second.pi)


def test_an_epoch_that_ends_inside_an_accumulation_window(tmp_path: Path) -> None:
    """3 generations of 3 micro-steps in windows of 2: the fifth step of an epoch has one."""
    data = Dataset.from_dict(
        {"prompt": ["31=", "27=", "18=", "28=", "45=", "90=", "23=", "5=", "6="]}
    )
    run = trainer(
        tmp_path,
        train_dataset=data,
        steps_per_generation=3,
        max_steps=10,
        completion_keep=0.4,
    )
    watch = watched(run)
    watch.check()
    assert len(watch.decisions) == 6
    closing = [[s.closes for s in d.segments] for d in watch.decisions]
    assert all(of_generation[-1] for of_generation in closing)
    assert [len(c) for c in closing] == [2, 2, 2] * 2


# -- reference -------------------------------------------------------------------------------------


def test_a_reference_model_scores_kept_rows_only(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    run = trainer(tmp_path, model=str(tmp_path / "model"), beta=0.1, completion_keep=0.4)
    reference: list[int] = []
    run.ref_model.register_forward_pre_hook(
        lambda module, args, kwargs: reference.append(kwargs["input_ids"].shape[0]),
        with_kwargs=True,
    )
    watch = watched(run)
    watch.check()
    assert reference == scoring_passes(watch)
    assert sum(reference) < 3 * 8
    assert watch.scored_rows == []
    assert watch.logs[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert watch.logs[2]["kl"] > 0
    assert all(log["dppo/completions/live"] == 1 for log in watch.logs)  # KL acts on every row


LORA = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8, task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    "checkpointing", [{}, {"use_reentrant": True}, {"use_reentrant": False}], ids=str
)
def test_an_adapter_trains(tmp_path: Path, checkpointing: dict[str, bool]) -> None:
    run = trainer(
        tmp_path,
        peft_config=LORA,
        beta=0.1,
        gradient_checkpointing=bool(checkpointing),
        gradient_checkpointing_kwargs=checkpointing or None,
    )
    watch = watched(run)
    watch.check()
    after = parameters(run.model)
    adapter = [name for name in after if "lora_B" in name]
    assert adapter
    assert all(not torch.equal(after[name], watch.before[name]) for name in adapter)
    base = [name for name in after if "lora_" not in name]
    assert all(torch.equal(after[name], watch.before[name]) for name in base)
    assert all(log["grad_norm"] > 0 for log in watch.logs)
    assert watch.scored_rows == scoring_passes(watch)  # the reference: adapter switched off
    assert watch.logs[0]["kl"] == pytest.approx(0, abs=1e-6)


# -- old log-probs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["rotary", "absolute"])
def test_old_log_probs_of_kept_rows_only(tmp_path: Path, model: str) -> None:
    from .test_refusals import gpt2

    run = trainer(
        tmp_path,
        model=gpt2(0.0) if model == "absolute" else tiny_model(),
        num_iterations=2,
        completion_keep=0.3,
        max_steps=2,
        learning_rate=0.0,  # so that the old log-probs can be recomputed below
    )
    watch = Watch(run)
    run.train()
    (decision,) = watch.decisions
    kept = union_kept(decision)
    assert 0 < kept.sum() < 8
    assert sum(watch.scored_rows) == kept.sum()
    batch = run._buffered_inputs
    old = batch["old_per_token_logps"]
    assert torch.isnan(old[~kept]).all()
    assert torch.isfinite(old[kept]).all()
    # Those of the host, which scores all rows at the full width; 1e-5: float32 log-softmax.
    run._decision = None
    with torch.no_grad():
        full, _, _ = run._get_per_token_logps_and_entropies(
            run.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            batch["completion_ids"].shape[1],
        )
    mask = batch["completion_mask"].bool()
    mask[~kept] = False
    torch.testing.assert_close(old[mask], full[mask], rtol=1e-5, atol=1e-5)


def test_truncated_completions_are_neither_kept_nor_scored(tmp_path: Path) -> None:
    generations = [random_completions(8, seed=seed, ended=0.5) for seed in range(3)]
    run = trainer(
        tmp_path,
        rollout_func=Script(*generations),
        mask_truncated_completions=True,
        num_iterations=2,
        max_steps=6,
    )
    watch = watched(run)
    watch.check()
    for completions, decision in zip(generations, watch.decisions, strict=True):
        truncated = np.array([ids[-1] != 1 for ids in completions])
        assert truncated.any()
        assert not union_kept(decision)[truncated].any()
        assert (decision.rows.loss_tokens == 0).tolist() == truncated.tolist()
        assert decision.choices[0].dropped["masked"] == truncated.sum()


# -- other rollouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True], ids=["in kwargs", "by name"])
def test_a_rollout_function_with_masks_log_probs_and_fields(tmp_path: Path, *, named: bool) -> None:
    completions = random_completions(8, seed=1)
    masks = [[1] * len(ids) for ids in completions]
    masks[2][0] = masks[5][1] = 0
    log_probs = [[-0.5 - 0.1 * i] * len(ids) for i, ids in enumerate(completions)]
    bonus = [0.0, 1.0] * 4
    script = Script(completions, env_mask=masks, logprobs=log_probs, bonus=bonus, flavour="sweet")
    seen: list[Any] = []

    def in_kwargs(completions: list[str], **kwargs: Any) -> list[float]:
        seen.append((kwargs["bonus"], kwargs["flavour"]))
        return list(kwargs["bonus"])

    def by_name(completions: list[str], bonus: list[float], **kwargs: Any) -> list[float]:
        return in_kwargs(completions, bonus=bonus, **kwargs)

    run = trainer(tmp_path, reward=by_name if named else in_kwargs, rollout_func=script)
    watch = watched(run)
    watch.check()
    assert seen == [(bonus, ["sweet"] * 8)] * 3  # scored once a generation
    for decision in watch.decisions:
        assert decision.rows.loss_tokens.tolist() == [sum(m) for m in masks]
        surprisal = np.sqrt(
            [sum(m) * (1 - np.exp(-0.5 - 0.1 * i)) ** 2 for i, m in enumerate(masks)]
        )
        np.testing.assert_allclose(decision.rows.surprisal, surprisal, rtol=1e-6)


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the special tokens of a chat template that can call tools; made here, offline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    names = ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    fast.add_special_tokens({"additional_special_tokens": names[:1]})
    fast.add_tokens(names[1:])
    template = importlib.resources.files("trl") / "chat_templates" / "qwen3.jinja"
    fast.chat_template = template.read_text()
    return fast


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


class Adder:
    """An environment with one tool, which owns its reward."""

    def reset(self, **row: Any) -> str:
        self.calls = 0
        return " please"

    def add(self, a: int, b: int) -> str:
        """
        Add two numbers.

        Args:
            a: One number.
            b: Another.
        """
        self.calls += 1
        return str(a + b)

    def get_reward(self) -> float:
        return float(self.calls)


@pytest.mark.parametrize("kind", ["tool", "environment"])
def test_tools_and_environments(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    """The model's turns are scripted: half of the rows call the tool, all of them answer."""

    def turn(prompt_ids: list[Any], *args: Any, **kwargs: Any) -> tuple[list[Any], None]:
        first = kwargs.get("num_generations") != 1
        texts = [CALL if first and i % 2 == 0 else f"{i}<|im_end|>" for i in range(len(prompt_ids))]
        return [byte_tokenizer(text)["input_ids"] for text in texts], None

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(messages) > 1) for messages in completions]

    data = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"1+2+{i}"}] for i in range(4)]}
    )
    given: dict[str, Any] = (
        {"reward": reward, "tools": [Adder().add]}
        if kind == "tool"
        else {"reward": None, "environment_factory": Adder}
    )
    run = trainer(
        tmp_path,
        model=tiny_model(vocab=len(byte_tokenizer), positions=2048),
        train_dataset=data,
        processing_class=byte_tokenizer,
        max_completion_length=256,
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=2,
        num_iterations=2,
        mask_truncated_completions=True,
        **given,
    )
    run._generate_single_turn = turn
    watch = watched(run)
    watch.check()
    assert watch.logs[0]["tools/call_frequency"] == 0.5
    (decision,) = watch.decisions
    called = np.array([True, False] * 2)
    tokens, in_loss = decision.rows.completion_tokens, decision.rows.loss_tokens
    assert (in_loss[called] < tokens[called]).all()  # the tool's answer is not in the loss
    assert (in_loss[~called] == tokens[~called]).all()
    assert decision.choices[0].live.all()
    assert run.tools


class Sampler:
    """Stands in for the vLLM engine: prepared completions, log-probs with holes."""

    def __init__(self, generations: list[list[list[int]]]) -> None:
        self.generations, self.calls, self.syncs = generations, 0, 0

    def sync_weights(self) -> None:
        self.syncs += 1

    def generate(self, prompts: list[Any], **kwargs: Any) -> tuple[Any, ...]:
        completions = self.generations[self.calls % len(self.generations)]
        self.calls += 1
        rng = np.random.default_rng(self.calls)
        log_probs: list[list[list[Any]]] = [
            [[float(v)] for v in -2.2 - 0.2 * rng.random(len(ids))] for ids in completions
        ]
        log_probs[1][0] = [None]
        log_probs[2][-1] = [float("nan")]
        log_probs[3] = [[None] for _ in log_probs[3]]
        return prompts, [list(ids) for ids in completions], log_probs, None


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_importance_correction_of_an_inference_engine(
    tmp_path: Path, mode: str, loss_type: str
) -> None:
    if loss_type == "vespo" and mode == "sequence_mask":
        mode = "token_mask"  # vespo takes token-level ratios only
    generations = [random_completions(8, seed=seed) for seed in range(3)]
    run = trainer(
        tmp_path,
        loss_type=loss_type,
        vllm_importance_sampling_mode=mode,
        completion_keep=0.4,
        num_iterations=2,
        max_steps=4,
    )
    run.use_vllm, run.vllm_generation = True, Sampler(generations)
    run._last_loaded_step = -1
    watch = Watch(run)
    run.train()
    watch.check()
    assert run.vllm_generation.syncs == len(watch.decisions) == 2
    assert watch.scored_rows == scoring_passes(watch)
    decision, batch = watch.decisions[-1], run._buffered_inputs
    kept = union_kept(decision)
    assert 0 < kept.sum() < 8
    ratio = batch["importance_sampling_ratio"]
    assert (ratio[~kept] == 1).all()
    assert torch.isfinite(ratio).all()
    assert (ratio[kept] != 1).any()
    assert torch.isnan(batch["old_per_token_logps"][~kept]).all()
    assert torch.isfinite(batch["old_per_token_logps"][kept]).all()
    known = np.isfinite(decision.rows.surprisal)
    assert known.tolist() == [True] * 3 + [False] + [True] * 4
    assert all(
        np.isfinite(log["sampling/sampling_logp_difference/mean"]) for log in watch.logs[::2]
    )


# -- rewards ---------------------------------------------------------------------------------------


async def slow_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return alternating_reward(completions)


def test_async_rewards_are_those_of_a_plain_function(tmp_path: Path) -> None:
    found = []
    for reward in (alternating_reward, slow_reward):
        run = trainer(tmp_path, reward=reward)
        watched(run).check()
        found.append(parameters(run.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def starts_low(completions: list[str], **kwargs: Any) -> list[float | None]:
    kwargs["log_metric"]("calls", 1.0)
    kwargs["log_extra"]("first", [c[:1] for c in completions])
    return [None if c.startswith("9") else float(c[:1] < "5") for c in completions]


def is_long(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if c.startswith("9") else float(len(c) > 3) for c in completions]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
    ],
    ids=str,
)
def test_several_rewards_with_holes(tmp_path: Path, options: dict[str, Any]) -> None:
    """A completion without any score is not trained on: it has no reward, rather than reward 0."""
    generations = [random_completions(8, seed=seed) for seed in (3, 4)]
    for ids in generations[0][0], generations[1][5]:
        ids[0] = 12  # the digit 9
    run = trainer(
        tmp_path,
        reward=[starts_low, is_long],
        reward_weights=[1.0, 0.5],
        rollout_func=Script(*generations),
        log_completions=True,
        num_completions_to_print=0,
        max_steps=2,
        num_iterations=1,
        **options,
    )
    watch = watched(run)
    watch.check()
    for completions, decision in zip(generations, watch.decisions, strict=True):
        unscored = np.array([ids[0] == 12 for ids in completions])
        (choice,) = decision.choices
        assert not choice.live.ravel()[unscored].any()
        assert not choice.kept.ravel()[unscored].any()
        assert choice.dropped["unscorable"] == unscored.sum() > 0
        assert choice.kept.any()
    assert all(log["calls"] == 1 for log in watch.logs)  # early and only once
    assert list(run._logs["extra"]["first"]) != []


# -- the gradient of a real transformer ------------------------------------------------------------


@contextmanager
def no_optimizer_step(run: Any) -> Iterator[None]:
    run.accelerator.gradient_state._set_sync_gradients(False)
    try:
        yield
    finally:
        run.accelerator.gradient_state._set_sync_gradients(True)


def gradient(run: Any, steps: int) -> dict[str, Tensor]:
    """What `steps` micro-steps on one generation accumulate."""
    run.model.zero_grad()
    run._step, run._buffered_inputs = 0, None
    run.current_gradient_accumulation_steps = steps
    if hasattr(run, "_rolled_out_at"):
        run._rolled_out_at, run._generation, run._window_position = -1, 0, 0
    inputs = [dict(row) for row in run.train_dataset.select(range(2)) for _ in range(4)]
    with no_optimizer_step(run):
        for _ in range(steps):
            run.training_step(run.model, inputs, None)
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone().double()
        for name, p in run.model.named_parameters()
        if p.requires_grad
    }


def prepared(run: Any) -> Any:
    run.create_optimizer_and_scheduler(1)
    if getattr(run.args, "packing", None) == "varlen":
        form = form_of(run)
        assert form is not None
        assert form.shares
        # Tokens are so dear that completions share their prompt.
        run._form = dataclasses.replace(form, price=Price(hidden=9999))
    run.model.train()
    return run


GRADIENTS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, unsorted": {"loss_type": "grpo", "packing": "none"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "sequence level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "truncation": {"mask_truncated_completions": True},
    "packed": {"packing": "varlen"},
    "packed, truncation": {"packing": "varlen", "mask_truncated_completions": True},
    "packed adapter with KL": {"packing": "varlen", "peft_config": LORA, "beta": 0.1},
    "packed, sequence level": {
        **{"packing": "varlen", "loss_type": "grpo", "importance_sampling_level": "sequence"}
    },
    "packed, checkpointing": {"packing": "varlen", "gradient_checkpointing": True},
    "adapter with KL": {"peft_config": LORA, "beta": 0.1, "packing": "none"},
    "checkpointing": {"gradient_checkpointing": True},
    "columns in multiples": {"pad_to_multiple_of": 4},
    "entropy bonus": {"entropy_coef": 0.1, "loss_type": "grpo", "rows": 8},
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("pad", ["own", "eos"])
def test_the_average_gradient_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pad: str
) -> None:
    """E[pruned gradient] over every outcome of the systematic draw = gradient of `GRPOTrainer`.

    1e-4 of the largest entry of each parameter tensor, plus 1e-6 of the largest of all: log-probs
    are float32 (1e-7), the sum runs over rows of mixed sign, and left padding that is cut away
    shifts rotary angles by rounding. A wrong weight or denominator shows as 1e-2 and more.

    With pad = eos nothing may be decided from ids: completions end in the padding token.
    """
    options = {"rows": 2, **GRADIENTS[name]}
    micro_batch = options.pop("rows")
    pruning = {"packing": options.pop("packing", "bucket"), "completion_keep": 0.4}
    completions = random_completions(8, seed=11)

    def tokenizer() -> Any:
        made = load_builtin_tokenizer()
        if pad == "eos":
            made.pad_token = made.eos_token
        return made

    def build(kind: Any, **extra: Any) -> Any:
        run = kind(
            tmp_path,
            rollout_func=Script(completions),
            reward=lambda completions, **kwargs: [1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 0.1, 0.9],
            processing_class=tokenizer(),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=8 // micro_batch,
            num_generations=4,
            **options,
            **extra,
        )
        return prepared(run)

    steps = 8 // micro_batch
    expected = gradient(build(host_trainer), steps)
    run = build(trainer, **pruning)
    every = EveryOutcome(monkeypatch, "systematic")
    found = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in expected.items()}
    outcomes, total = 0, 0.0
    for probability, grads in every.of(lambda: gradient(run, steps)):
        outcomes, total = outcomes + 1, total + probability
        for key, value in grads.items():
            found[key] += probability * value
    assert outcomes > 2
    assert total == pytest.approx(1)
    largest = max(value.abs().max().item() for value in expected.values())
    assert largest > 1e-2
    for key, value in expected.items():
        tolerance = 1e-4 * value.abs().max().item() + 1e-6 * largest
        assert (found[key] - value).abs().max().item() <= tolerance, key


def test_a_single_outcome_is_not_the_hosts_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the check above sees what an average over fewer outcomes would miss."""
    completions = random_completions(8, seed=11)
    runs = [
        prepared(
            kind(
                tmp_path,
                rollout_func=Script(completions),
                reward=lambda completions, **kwargs: [1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 0.1, 0.9],
                **extra,
            )
        )
        for kind, extra in ((host_trainer, {}), (trainer, {"completion_keep": 0.4}))
    ]
    expected, found = (gradient(run, 2) for run in runs)
    worst = max(
        ((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-9)).item()
        for k, v in expected.items()
    )
    assert worst > 1e-2


def test_runs_are_reproducible(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        run = trainer(tmp_path, completion_keep=0.4, num_iterations=2)
        logs.append([log["grad_norm"] for log in watched(run).logs])
    assert logs[0] == logs[1]
