"""The built-in model of the sorting task: a tiny Qwen3, shipped with the package.

It was warm-started on noisy demonstrations (``scripts/warm_start.py``): its most likely answer is
usually right, but its samples err, which leaves reinforcement learning something to sharpen.
Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


def builtin_path() -> Path:
    """Return the directory of the built-in model and its tokenizer.

    Returns:
        A directory that ``AutoModelForCausalLM.from_pretrained`` and
        ``AutoTokenizer.from_pretrained`` load, and that TRL's trainers take as ``model``.

    Example:
        >>> from dppo.tasks import builtin_path
        >>> (builtin_path() / "config.json").is_file()
        True
    """
    return Path(__file__).parent / "assets" / "sorter"


def load_builtin_model() -> Qwen3ForCausalLM:
    """Load the built-in model.

    Returns:
        A ``Qwen3ForCausalLM`` in float32 on the CPU, in evaluation mode, with fresh copies of
        the shipped weights: training it changes nothing on disk.

    Raises:
        OSError: If the files of the model are missing from the installation.

    Example:
        >>> from dppo.tasks import load_builtin_model
        >>> load_builtin_model().config.model_type
        'qwen3'
    """
    # Imported here because importing dppo.tasks must stay cheap.
    import torch  # noqa: PLC0415
    from transformers import Qwen3ForCausalLM  # noqa: PLC0415

    return Qwen3ForCausalLM.from_pretrained(
        builtin_path(), dtype=torch.float32, local_files_only=True
    )


def load_builtin_tokenizer() -> PreTrainedTokenizerFast:
    """Load the character-level tokenizer of the built-in model.

    Its 13 tokens are ``<pad>``, ``<eos>``, ``=`` and the ten digits. It pads on the left, adds
    no special tokens, and raises on any other character. Its chat template writes a user
    message as it stands, so that plain and conversational prompts are the same tokens.

    Returns:
        A ``PreTrainedTokenizerFast``.

    Raises:
        OSError: If the files of the tokenizer are missing from the installation.

    Example:
        >>> from dppo.tasks import load_builtin_tokenizer
        >>> tokenizer = load_builtin_tokenizer()
        >>> tokenizer.decode(tokenizer("3141=")["input_ids"])
        '3141='
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    return PreTrainedTokenizerFast.from_pretrained(builtin_path(), local_files_only=True)
