"""What cannot work, or cannot be exact, is refused before any work, in a sentence."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from dppo.errors import (
    ConfigurationError,
    InvalidInputError,
    UnsupportedHostError,
    UnsupportedLossError,
)
from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer, config_checks, contract, full_batch, prompts, startup
from dppo.trl.reward_contract import check_signature, checked

from .conftest import (
    OPTIONS,
    Script,
    alternating_reward,
    config,
    tiny_model,
    trainer,
    watched,
)

# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_entropy_quantile": 0.8}, "top_entropy_quantile=0.8"),
        (
            {"use_adaptive_entropy": True, "entropy_coef_max": 1.0, "entropy_target": 0.5},
            "use_adaptive_entropy",
        ),
        ({"completion_keep": "auto", "auto_cost": "x"}, "auto_cost='x'"),
        ({"completion_keep_replay": "metrics.jsonl"}, "completion_keep_replay='metrics.jsonl'"),
        (
            {"completion_keep": "auto", "completion_keep_replay": "/nowhere/metrics.jsonl"},
            "/nowhere/metrics.jsonl' is no file",
        ),
        ({"completion_keep": 0}, "completion_keep"),
        ({"completion_keep": 1.5}, "completion_keep"),
        ({"completion_keep": -0.5}, "completion_keep"),
        ({"completion_keep": float("nan")}, "completion_keep"),
        ({"completion_keep": "x"}, "'x'"),
        ({"completion_keep": True}, "True"),
        ({"completion_keep": None}, "None"),
        ({"completion_rule": "best"}, "completion_rule"),
        ({"completion_prune_rate": 1.0}, "completion_prune_rate"),
        ({"sampling_design": "x"}, "sampling_design"),
        ({"packing": "x"}, "packing='x'"),
        ({"overlong_prompts": "truncate"}, "overlong_prompts='truncate'"),
        ({"max_prompt_length": 0}, "max_prompt_length=0"),
    ],
)
def test_impossible_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config(tmp_path, **options)
    assert message in str(caught.value)


def test_inexact_losses_are_allowed_when_nothing_is_pruned(tmp_path: Path) -> None:
    for keep in (1.0, "shadow"):
        given = config(tmp_path, completion_keep=keep, top_entropy_quantile=0.8, packing="auto")
        assert given.decides == (keep == "shadow")
    auto = config(tmp_path, completion_keep=1.0, top_entropy_quantile=0.8, packing="auto")
    assert not auto.packs_unpruned  # it would change what is trained
    with pytest.raises(ConfigurationError, match="packing='none'"):
        config(tmp_path, completion_keep=1.0, top_entropy_quantile=0.8, packing="varlen")


def test_an_unknown_loss_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLossError, match=r"'gmpo'.*known: grpo"):
        config(tmp_path, loss_type="gmpo")


def test_rates_may_come_as_text(tmp_path: Path) -> None:
    assert config(tmp_path, completion_keep="0.25").completion_keep == 0.25
    assert config(tmp_path, completion_keep=1).decides is False
    assert config(tmp_path, completion_keep="shadow").prunes is False


def test_another_configuration_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="DPPOConfig, got GRPOConfig"):
        DPPOTrainer(
            tiny_model(),
            alternating_reward,
            GRPOConfig(output_dir=str(tmp_path), **OPTIONS),
            sorting_dataset(8, seed=0),
            processing_class=load_builtin_tokenizer(),
        )


# -- model -----------------------------------------------------------------------------------------


def test_a_frozen_adapter(tmp_path: Path) -> None:
    adapter = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    get_peft_model(tiny_model(), adapter).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match=r"0 trainable parameters.*is_trainable=True"):
        trainer(tmp_path, model=frozen)


def gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=13,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_dropout_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"dropout is active in .*attn_pdrop.*disable_dropout"):
        trainer(tmp_path, model=gpt2())


def test_without_dropout_nothing_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    trainer(tmp_path, model=gpt2(0.0))
    trainer(tmp_path)
    assert not [w for w in recwarn if "dropout" in str(w.message)]


@pytest.mark.parametrize("make", [gpt2, tiny_model])
def test_the_first_ratio_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Old, reference and new log-probs of a model at temperature 0.7 agree before any update.

    1e-5: float32 log-softmax in batches of different shapes.
    """
    make().save_pretrained(tmp_path / "model")
    model = type(make()).from_pretrained(tmp_path / "model")
    seen: list[tuple[int, float]] = []
    log_ratio = full_batch.log_ratio

    def noted(inputs: Any, scores: Any, *, level: str) -> Any:
        gap = log_ratio(inputs, scores, level=level)
        largest = (gap * full_batch.loss_mask(inputs)).abs().max().item()
        seen.append((run.state.global_step, largest))
        return gap

    monkeypatch.setattr(full_batch, "log_ratio", noted)
    run = trainer(
        tmp_path,
        model=model,
        disable_dropout=True,
        num_iterations=2,
        temperature=0.7,
        beta=0.04,
        max_steps=2,
        learning_rate=0.05,
    )
    watch = watched(run)
    assert max(gap for step, gap in seen if step == 0) < 1e-5
    assert max(gap for step, gap in seen if step == 1) > 1e-3
    first = watch.logs[0]
    assert first["clip_ratio/region_mean"] == 0
    assert abs(first["kl"]) < 1e-8
    assert watch.logs[1]["kl"] > 0


# -- data ------------------------------------------------------------------------------------------


def test_a_missing_prompt_column_is_shown_what_is_there(tmp_path: Path) -> None:
    data = Dataset.from_dict({"question": ["1="], "answer": ["1"]})
    with pytest.raises(ConfigurationError, match=r"no column 'prompt'.*'question', 'answer'"):
        trainer(tmp_path, train_dataset=data)


def test_a_missing_prompt_column_under_a_rollout_function(tmp_path: Path) -> None:
    """The host hands prompts to it; only an environment may do without."""
    data = Dataset.from_dict({"question": ["1="], "answer": ["1"]})
    with pytest.raises(ConfigurationError, match="no column 'prompt'"):
        trainer(tmp_path, train_dataset=data, rollout_func=Script([[3, 1]] * 8))


def test_text_about_images_does_not_switch_the_length_check_off(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["1" * 80 + "="], "image_caption": ["a cat"]})
    with pytest.raises(ConfigurationError, match="longer than 64 tokens"):
        trainer(tmp_path, train_dataset=data, max_prompt_length=64)


def test_before_weights_are_loaded(tmp_path: Path) -> None:
    """The check needs a model's config only: here its weights do not even exist."""
    tiny_model().config.save_pretrained(tmp_path / "model")
    data = Dataset.from_dict({"question": ["1="]})
    with pytest.raises(ConfigurationError, match="no column 'prompt'"):
        trainer(tmp_path, model=str(tmp_path / "model"), train_dataset=data)
    with pytest.raises(ConfigurationError, match="are longer than 2 tokens"):
        trainer(tmp_path, model=str(tmp_path / "model"), max_prompt_length=2)


def test_a_reward_that_needs_an_absent_column(tmp_path: Path) -> None:
    def by_solution(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        raise AssertionError("never called")

    with pytest.raises(ConfigurationError, match=r"'by_solution' needs solution.*answer"):
        trainer(tmp_path, reward=by_solution)


LENGTHS = [5, 64, 65, 5000]


def prompts_of(lengths: list[int]) -> Dataset:
    """Every digit and the equals sign is a token of the built-in tokenizer."""
    return Dataset.from_dict({"prompt": ["1" * (n - 1) + "=" for n in lengths]})


def test_overlong_prompts_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(
        tmp_path,
        train_dataset=prompts_of(LENGTHS),
        max_prompt_length=64,
        overlong_prompts="drop",
    )
    assert [len(p) for p in run.train_dataset["prompt"]] == [5, 64]
    assert "2 of 4 prompts are longer than 64 tokens and left out: 2, 3" in caplog.text


def test_overlong_prompts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"2 of 4 .* first is prompt 2 with 65"):
        trainer(tmp_path, train_dataset=prompts_of(LENGTHS), max_prompt_length=64)


def test_nothing_left_of_the_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"all 4 prompts are longer than 4 .*has 5"):
        trainer(
            tmp_path,
            train_dataset=prompts_of(LENGTHS),
            max_prompt_length=4,
            overlong_prompts="drop",
        )


def test_the_context_limits_prompts_by_itself(tmp_path: Path) -> None:
    """The tiny model has 128 positions, 6 of them for the completion."""
    with pytest.raises(ConfigurationError, match="1 of 2 prompts are longer than 122 tokens"):
        trainer(tmp_path, train_dataset=prompts_of([122, 123]))


@pytest.mark.parametrize("options", [{"max_prompt_length": 123}, {"max_completion_length": 128}])
def test_a_context_overflow_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="the model's context of 128 tokens has no room"):
        trainer(tmp_path, **options)


def test_prompts_are_measured_with_their_template() -> None:
    tokenizer = load_builtin_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}000{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}99{% endif %}"
    )
    data = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "12="}], [{"role": "user", "content": "1"}]]}
    )
    assert prompts.prompt_lengths(data, tokenizer, {"tools": None}) == [8, 6]


# -- rewards ---------------------------------------------------------------------------------------

CALL = {"prompts": ["1="] * 4, "completions": ["1"] * 4, "completion_ids": [[3]] * 4}


def as_async(func: Any) -> Any:
    async def wrapped(**kwargs: Any) -> Any:
        return func(**kwargs)

    wrapped.__name__ = func.__name__
    return wrapped


def outcome(result: Any, *, asynchronous: bool) -> Any:
    """What the checked reward function makes of a result."""

    def my_reward(**kwargs: Any) -> Any:
        return result

    if not asynchronous:
        return checked(my_reward)(**CALL)
    return asyncio.run(checked(as_async(my_reward))(**CALL))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("result", "count"),
    [
        ([1.0], 1),
        (1.0, 1),
        ([1.0] * 5, 5),
        ([], 0),
        (np.ones(5), 5),
        (torch.tensor(1.0), 1),
        (["good"] * 4, 4),
        ("good", 1),
        ([1.0, 2.0, "3", 4.0], 4),
        (np.ones((4, 1)), 4),
    ],
)
def test_rewards_that_are_not_one_number_each(
    result: Any, count: int, *, asynchronous: bool
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        outcome(result, asynchronous=asynchronous)
    message = str(caught.value)
    assert "'my_reward'" in message
    assert f"returned {count} values" in message
    assert "each of 4 completions" in message


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.array([1, 0, 0, 1]), [1, 0, 0, 1]),
        (np.array([0.5, 0, 0, 1], np.float32), [0.5, 0, 0, 1]),
        (torch.tensor([1.0, 0.0, 0.25, 1.0], requires_grad=True), [1, 0, 0.25, 1]),
        ((1, 0, True, False), [1, 0, 1, 0]),
        ([None, 1.0, torch.tensor(2.0), np.float64(3)], [None, 1, 2, 3]),
        ((float(i) for i in range(4)), [0, 1, 2, 3]),
    ],
)
def test_rewards_in_any_container(result: Any, expected: list[Any], *, asynchronous: bool) -> None:
    if asynchronous and not isinstance(result, list | tuple | np.ndarray | torch.Tensor):
        result = [0, 1, 2, 3]  # the generator was used up by the other case
    assert outcome(result, asynchronous=asynchronous) == expected


@pytest.mark.parametrize("result", [[1.0], ["good"] * 8])
def test_the_early_scoring_is_checked_too(tmp_path: Path, result: Any) -> None:
    def my_reward(completions: list[str], **kwargs: Any) -> Any:
        return result

    with pytest.raises(InvalidInputError, match=r"'my_reward' returned .* each of 8 completions"):
        trainer(tmp_path, reward=my_reward).train()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_without_kwargs_is_told_what_is_passed(
    tmp_path: Path, *, asynchronous: bool
) -> None:
    def narrow(completions: list[str]) -> list[float]:
        raise AssertionError("never called")

    async def narrow_async(completions: list[str]) -> list[float]:
        raise AssertionError("never called")

    with pytest.raises(ConfigurationError) as caught:
        trainer(tmp_path, reward=narrow_async if asynchronous else narrow)
    message = str(caught.value)
    assert "**kwargs" in message
    for name in ("prompts", "completion_ids", "answer", "trainer_state", "log_metric"):
        assert name in message


def test_a_reward_that_names_everything_is_taken() -> None:
    def full(  # noqa: PLR0917 - called by name
        prompts: Any,
        completions: Any,
        completion_ids: Any,
        trainer_state: Any,
        log_extra: Any,
        log_metric: Any,
        answer: Any,
    ) -> list[float]:
        return []

    check_signature(full, ["prompt", "answer"])
    check_signature(dict, ["prompt"])
    with pytest.raises(ConfigurationError, match="level"):
        check_signature(full, ["prompt", "answer", "level"])


def test_a_callable_object_keeps_its_name(tmp_path: Path) -> None:
    class Judge:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [float(len(c) % 2) for c in completions]

    run = trainer(tmp_path, reward=Judge(), max_steps=1)
    run.train()
    assert "rewards/Judge/mean" in run.state.log_history[0]


# -- machine ---------------------------------------------------------------------------------------


def test_without_an_accelerator_training_is_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dppo")
    monkeypatch.setattr(config_checks, "has_accelerator", lambda: False)
    made = DPPOConfig(str(tmp_path), report_to=[])
    assert made.bf16 is False
    assert "training in float32" in caplog.text


def test_no_configuration_at_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = DPPOTrainer(
        tiny_model(positions=1024),  # the host's default completion takes 512
        alternating_reward,
        train_dataset=sorting_dataset(8, seed=0),
        processing_class=load_builtin_tokenizer(),
    )
    assert run.args.completion_keep == "auto"
    assert run.args.prunes


def test_explicit_bf16_is_honoured_on_a_cpu(tmp_path: Path) -> None:
    run = trainer(tmp_path, bf16=True, max_steps=1)
    assert run.args.bf16 is True
    watched(run).check()


def test_explicit_bf16_without_a_device_is_refused_in_words(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ValueError, match="bf16"):
        DPPOConfig(str(tmp_path), bf16=True, use_cpu=False, report_to=[])


# -- host ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.15.9", "1.17.0", "0.9", "2.0", "1.17.0.dev0"])
def test_other_versions_of_the_host(version: str) -> None:
    with pytest.raises(UnsupportedHostError) as caught:
        contract.check_version(version)
    assert version in str(caught.value)
    assert "trl>=1.16,<1.17" in str(caught.value)


@pytest.mark.parametrize("version", ["1.16", "1.16.0", "1.16.3", "1.16.1.dev0", "1.16.0+local"])
def test_tested_versions_of_the_host(version: str) -> None:
    contract.check_version(version)


def test_a_method_that_is_gone_or_takes_something_else() -> None:
    contract.check_signatures(GRPOTrainer)

    class Gone(GRPOTrainer):
        _calculate_rewards = None  # type: ignore[assignment]

    class Renamed(GRPOTrainer):
        def _prepare_inputs(self, batch: Any) -> Any:
            raise NotImplementedError

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            raise NotImplementedError

    with pytest.raises(UnsupportedHostError, match="_calculate_rewards is missing"):
        contract.check_signatures(Gone)
    with pytest.raises(UnsupportedHostError) as caught:
        contract.check_signatures(Renamed)
    message = str(caught.value)
    assert "_prepare_inputs takes (batch), expected (generation_batch)" in message
    assert "compute_loss takes (model, inputs, return_outputs)" in message


def test_an_attribute_that_is_gone(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    contract.check_attributes(run)
    del run.scale_rewards
    with pytest.raises(UnsupportedHostError, match="no attribute scale_rewards"):
        contract.check_attributes(run)


def test_the_import_is_refused_under_another_host() -> None:
    """In a process of its own; the version is checked before the host is imported."""
    code = (
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '1.17.0' if name == 'trl' else real(name)\n"
        "import sys\n"
        "try:\n"
        "    import dppo.trl\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error, 'trl' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("UnsupportedHostError dppo.trl is tested with trl>=1.16,<1.17")
    assert "1.17.0 is installed" in done.stdout
    assert "pip install" in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_a_tokenizer_without_pad_and_end_is_refused(tmp_path: Path) -> None:
    tokenizer = load_builtin_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="neither a pad nor an end-of-sequence token"):
        DPPOTrainer(
            tiny_model(),
            alternating_reward,
            config(tmp_path),
            sorting_dataset(16, seed=0),
            processing_class=tokenizer,
        )


def test_the_reference_and_its_first_kl_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    run = trainer(
        tmp_path, model=str(tmp_path / "model"), beta=0.1, completion_keep=0.9, max_steps=1
    )
    with caplog.at_level(logging.INFO, logger="dppo"):
        startup.check_model(run)
        run.train()
    assert "KL reference: a copy of" in caplog.text
    assert "first KL to the reference: 0" in caplog.text
