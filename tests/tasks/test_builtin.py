"""The built-in model and tokenizer: shipped whole, small, and as good as they should be."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dppo.tasks import (
    builtin_path,
    load_builtin_model,
    load_builtin_tokenizer,
    sorting_dataset,
    sorting_reward,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_builtin_tokenizer()


@pytest.fixture(scope="module")
def model():
    return load_builtin_model()


def generate(model, tokenizer, rows, *, seed=0, **decoding):
    """Return the generated ids of one completion per row, each at most 17 tokens."""
    batch = tokenizer(list(rows["prompt"]), padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # generate() takes no generator of its own
        output = model.generate(**batch, max_new_tokens=17, **decoding)
    return output[:, batch["input_ids"].shape[1] :]


def rewards(tokenizer, rows, ids):
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return torch.tensor(sorting_reward(texts, list(rows["answer"])))


def test_assets_are_complete_and_below_1_mb():
    files = {path.name: path.stat().st_size for path in builtin_path().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= files.keys()
    assert sum(files.values()) < 1_000_000


def test_config_says_qwen3():
    config = json.loads((builtin_path() / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "float32"  # what a load without a dtype gives


def test_import_is_cheap():
    code = (
        "import sys, dppo.tasks\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tokenizer_round_trip(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    text = "0123456789="
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_tokenizer_special_tokens(tokenizer):
    assert len(tokenizer) == 13
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token is None
    assert tokenizer.padding_side == "left"
    batch = tokenizer(["12=", "1234="], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert batch["input_ids"][0][:2] == [tokenizer.pad_token_id] * 2


def test_tokenizer_raises_on_a_foreign_character(tokenizer):
    with pytest.raises(Exception, match="UNK"):  # tokenizers raises a bare Exception
        tokenizer("12a=")


def test_chat_template_reproduces_the_raw_prompt(tokenizer):
    for prompt in sorting_dataset(50, seed=0, split="test")["prompt"]:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == prompt
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert ids["input_ids"] == tokenizer(prompt)["input_ids"]


def test_chat_template_ends_an_answer(tokenizer):
    messages = [{"role": "user", "content": "21="}, {"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "21=12<eos>"


def test_plain_transformers_loads_the_same_model(model, tokenizer):
    plain = AutoModelForCausalLM.from_pretrained(builtin_path(), dtype=torch.float32)
    assert type(plain) is type(model)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model.training
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    text = "3141="
    assert AutoTokenizer.from_pretrained(builtin_path())(text) == tokenizer(text)


def test_model_fits_the_tokenizer(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
    assert 200_000 < model.num_parameters() < 600_000


def test_loaded_models_share_no_weights(model):
    other = load_builtin_model()
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert model.model.norm.weight.abs().sum() > 0


def test_left_padding_does_not_change_the_logits(model, tokenizer):
    alone = tokenizer(["3141="], return_tensors="pt")
    padded = tokenizer(["3141=", "3141592653589793="], padding=True, return_tensors="pt")
    positions = (padded["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(**alone).logits[0, -1]
        actual = model(**padded, position_ids=positions).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_samples_are_vocabulary_tokens_and_err_as_intended(model, tokenizer):
    rows = sorting_dataset(128, seed=0, split="test")
    ids = generate(model, tokenizer, rows, do_sample=True, temperature=1.0, top_k=0)
    assert ids.min() >= 0
    assert ids.max() < len(tokenizer)
    # The mean of the shipped model is about 0.45. On 128 prompts its standard error is
    # sqrt(0.45 * 0.55 / 128) = 0.044, so 0.25 and 0.65 are more than 4 standard errors away.
    assert 0.25 < rewards(tokenizer, rows, ids).mean().item() < 0.65


def test_default_generation_samples_the_policy(model):
    defaults = model.generation_config
    assert defaults.do_sample is True
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 0, 1.0)


def test_mode_is_right_so_that_reinforcement_can_find_it(model, tokenizer):
    rows = sorting_dataset(128, seed=0, split="test")
    ids = generate(model, tokenizer, rows, do_sample=False)
    # Measured: 0.996 on 512 prompts. Falling to 0.9 takes 12 more errors in 128.
    assert rewards(tokenizer, rows, ids).mean().item() > 0.9
