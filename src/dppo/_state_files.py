"""Nested state in two files, JSON and npz; never pickle, written atomically.

Arrays and tensors of the tree go to the npz, and their numbers into their places in the JSON.
"""

import json
import os
import zipfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dppo.errors import ConfigurationError, HostDriftError

Arrays = dict[str, np.ndarray]
BELONGS_TO = "belongs_to"
ARRAY, TENSOR = "<array>", "<tensor>"


def write(stem: Path, tree: dict[str, Any]) -> None:
    """Write `tree` to `stem`.npz and `stem`.json; the JSON last, so that it vouches for the npz.

    Raises:
        HostDriftError: The tree holds something else than numbers, texts, arrays and tensors.
    """
    arrays: Arrays = {}
    text = json.dumps(_encode(tree, "", arrays), indent=1)
    arrays[BELONGS_TO] = np.array(_digest(text))
    _replace(stem.with_suffix(".npz"), lambda file: np.savez(file, allow_pickle=False, **arrays))
    _replace(stem.with_suffix(".json"), lambda file: file.write(text.encode()))


def read(stem: Path) -> dict[str, Any]:
    """The tree that `write` has written.

    Raises:
        ConfigurationError: A file is missing or damaged, or they do not belong together.
    """
    path = stem.with_suffix(".json")
    try:
        text = path.read_text()
        with np.load(stem.with_suffix(".npz"), allow_pickle=False) as arrays:
            if str(arrays[BELONGS_TO]) != _digest(text):
                raise ValueError("its .npz is of another moment")
            tree = _decode(json.loads(text), arrays)
        if not isinstance(tree, dict):
            raise TypeError("not a state")
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}); resume from another checkpoint, or remove "
            "dppo_state.json from this one to go on without what was known: the draws then start "
            "at generation 0"
        ) from error
    return tree


def _encode(value: Any, name: str, arrays: Arrays) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, f"{name}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{name}/{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray) and value.dtype != object:
        place = str(len(arrays))
        arrays[place] = value
        return {ARRAY: place}
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        if plain.dtype == torch.bfloat16:  # unknown to numpy
            plain = plain.view(torch.int16)
        place = str(len(arrays))
        arrays[place] = plain.numpy()
        return {TENSOR: place, "dtype": dtype}
    keys = " with keys that are no texts" if isinstance(value, dict) else ""
    raise HostDriftError(
        f"{name.strip('/')} is a {type(value).__name__}{keys}, which cannot be saved"
    )


def _decode(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return arrays[value[ARRAY]]
    if value.keys() == {TENSOR, "dtype"}:
        tensor = torch.from_numpy(arrays[value[TENSOR]])
        dtype = getattr(torch, value["dtype"])
        return tensor.view(dtype) if dtype == torch.bfloat16 else tensor
    return {key: _decode(item, arrays) for key, item in value.items()}


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _replace(path: Path, write_to: Callable[[IO[bytes]], Any]) -> None:
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        write_to(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
