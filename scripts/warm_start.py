"""Reproduce the weights of the built-in sorting model by supervised learning.

The demonstrations are deliberately noisy: a share of their digits is random. The trained policy
then has the right answer as its mode, yet its samples err, as those of a base model do, and
reinforcement learning can sharpen it. Only prompts of the train split are used.

    PYTHONPATH=src python scripts/warm_start.py --output /tmp/sorter

The same arguments on the same machine give the same bytes of ``model.safetensors``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dppo.tasks import builtin_path, sorting_dataset, sorting_reward
from dppo.tasks.sorting import MAX_DIGITS

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = [PAD, EOS, "=", *"0123456789"]
THREADS = 2  # the order of floating-point sums, hence the bytes, depends on the thread count
BATCH = 256
IGNORED = -100  # the label that transformers leaves out of the loss
# A message is its content and no more, so that a chat prompt is the plain prompt.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{%- endfor -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character-level tokenizer; a character outside the vocabulary is an error."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model; its weights follow torch's global seed."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def noisy_batch(
    rows: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    noise: float,
    generator: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Encode demonstrations, with a share ``noise`` of their answers' digits drawn at random."""
    sequences = []
    for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True):
        digits = np.array(list(answer))
        random_digits = generator.integers(0, 10, size=len(digits)).astype(str)
        digits = np.where(generator.random(len(digits)) < noise, random_digits, digits)
        sequences.append(prompt + "".join(digits.tolist()) + EOS)
    batch = tokenizer(sequences, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    # Only what follows the "=" is learned: the digits of a prompt are random.
    is_equals = ids == tokenizer.convert_tokens_to_ids("=")
    after_equals = is_equals.cumsum(dim=1).bool() & ~is_equals
    labels = ids.masked_fill(~(after_equals & mask.bool()), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    noise: float,
    seed: int,
) -> None:
    """Train ``model`` in place on ``steps`` batches of fresh noisy demonstrations."""
    rows = sorting_dataset(steps * BATCH, seed=seed, split="train")
    generator = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1
    )
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        part = rows[step * BATCH : (step + 1) * BATCH]
        batch = noisy_batch(part, tokenizer, noise=noise, generator=generator)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            elapsed = time.perf_counter() - started
            eta = elapsed / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  "
                f"elapsed {elapsed:.0f} s  ETA {eta:.0f} s",
                flush=True,
            )


@torch.no_grad()
def sampled_rewards(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    prompts: int,
    seed: int,
    sample: bool,
) -> np.ndarray:
    """Return one reward per held-out prompt, of a sample at temperature 1 or of the mode."""
    model.eval()
    rows = sorting_dataset(prompts, seed=seed, split="test")
    batch = tokenizer(list(rows["prompt"]), padding=True, return_tensors="pt")
    output = model.generate(
        **batch,
        generation_config=GenerationConfig(
            max_new_tokens=MAX_DIGITS + 1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            do_sample=sample,  # said in both cases: what is unset comes from the model's own
            temperature=1.0,
            top_k=0 if sample else 50,  # 50 is "unset" to transformers, which otherwise warns
            top_p=1.0,
        ),
    )
    texts = tokenizer.batch_decode(
        output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return np.array(sorting_reward(texts, list(rows["answer"])))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the weights in float16, for size, under a config that asks for float32."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        max_new_tokens=MAX_DIGITS + 1,
        do_sample=True,  # plain generate() then samples from the policy itself
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.half().save_pretrained(directory)
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # safetensors leaves it to the owner alone


def report(name: str, rewards: np.ndarray) -> None:
    """Print a mean reward with its standard error."""
    error = rewards.std(ddof=1) / np.sqrt(len(rewards))
    print(f"{name} reward on {len(rewards)} held-out prompts: {rewards.mean():.3f} ± {error:.3f}")


def main() -> None:
    """Train, measure and save the built-in model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="supervised steps")
    parser.add_argument("--noise", type=float, default=0.09, help="share of random digits")
    parser.add_argument("--output", type=Path, default=builtin_path(), help="asset directory")
    arguments = parser.parse_args()

    torch.set_num_threads(THREADS)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    train(
        model,
        tokenizer,
        steps=arguments.steps,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    save(model, tokenizer, arguments.output)
    # Measured as shipped: with weights that have been through float16.
    shipped = Qwen3ForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    for name, sample in (("greedy", False), ("sampled", True)):
        report(
            name,
            sampled_rewards(shipped, tokenizer, prompts=512, seed=arguments.seed, sample=sample),
        )


if __name__ == "__main__":
    main()
