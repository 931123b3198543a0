"""Writes a Qwen3 of random weights, a tokenizer of made-up words, and prompts of them.

With near-uniform samples, a share of the vocabulary declared to end a completion makes lengths
geometric, about as ragged as those of a real policy. Nothing is downloaded.

    python benchmarks/gpu_model.py FOLDER --size 0.6b
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, dict[str, int]] = {
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "toy": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
}


def odd(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs within nearly every group."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def write_model(folder: Path, size: str, mean_length: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[size], max_position_embeddings=32768, tie_word_embeddings=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    ends = max(config.vocab_size // mean_length, 1)
    model.generation_config.eos_token_id = list(range(1, 1 + ends))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", padding_side="left"
    )
    fast.save_pretrained(folder)


def write_prompts(folder: Path, size: str, count: int, length: int) -> None:
    rng, vocabulary = np.random.default_rng(0), SIZES[size]["vocab_size"]
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = rng.integers(vocabulary // 2, vocabulary, rng.integers(length // 2, length * 2))
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in words)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--mean-length", type=int, default=300, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--prompt-length", type=int, default=150)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write_model(args.folder, args.size, args.mean_length)
    write_prompts(args.folder, args.size, args.prompts, args.prompt_length)


if __name__ == "__main__":
    main()
