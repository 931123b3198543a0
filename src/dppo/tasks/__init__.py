"""A built-in verifiable task and a tiny model for it, to try DPPO offline on a CPU."""

from dppo.tasks.builtin import builtin_path, load_builtin_model, load_builtin_tokenizer
from dppo.tasks.sorting import sorting_dataset, sorting_reward

__all__ = [
    "builtin_path",
    "load_builtin_model",
    "load_builtin_tokenizer",
    "sorting_dataset",
    "sorting_reward",
]
