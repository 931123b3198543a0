"""What of a run's pruning is in verl's checkpoints, and whether it belongs to the run that resumes.

`global_step_N/dppo_state.json` and `.npz`, written before verl writes which step is the latest.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dppo import _state_files as state_files
from dppo.errors import ConfigurationError

STATE = "dppo_state"
LOOKED_AT = 1000
"""Prompts of a data set that its fingerprint is made of."""


def prompt_id(row: Any) -> int:
    """Of a prompt's messages, below 2^63: the same at every visit, unlike verl's uid.

    Raises:
        ConfigurationError: Something in it has no content that could be compared.
    """
    text = json.dumps(_plain(row), sort_keys=True, ensure_ascii=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _plain(value: Any) -> Any:
    """Messages as JSON has them, whatever they came in."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, bytes | bytearray):
        return blake2b(value).hexdigest()
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of PIL
        return [value.mode, list(value.size), blake2b(value.tobytes()).hexdigest()]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise ConfigurationError(
        f"a prompt holds a {type(value).__module__}.{type(value).__qualname__}, by which it cannot "
        "be known again at its next visit; set prune.prompt_keep=1.0, or give text, bytes, images "
        "or arrays"
    )


def fingerprint(dataset: Any, key: str) -> str:
    """Rows and the first prompts of a data set."""
    rows = getattr(dataset, "dataframe", dataset)
    state = blake2b(digest_size=8)
    for number in range(min(len(rows), LOOKED_AT)):
        state.update(f"{prompt_id(rows[number].get(key))}".encode())
    return f"{len(rows)} rows, {state.hexdigest()}"


def save(folder: str | Path, *, pruner: Any, auto: Any, settings: dict[str, Any]) -> None:
    """Write the state of a step that is over."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tree = {
        "pruner": pruner.state_dict(),
        "auto": None if auto is None else auto.state_dict(),
        "settings": settings,
    }
    state_files.write(path / STATE, tree)


def load(folder: str | Path, *, pruner: Any, auto: Any, settings: dict[str, Any]) -> bool:
    """Take a state over; False if the checkpoint has none.

    Raises:
        ConfigurationError: It is unreadable, or of other data or another configuration.
    """
    stem = Path(folder) / STATE
    if not stem.with_suffix(".json").exists():
        return False
    saved = state_files.read(stem)
    before = saved.get("settings", {})
    changed = [
        f"{name} {before.get(name)!r} -> {value!r}"
        for name, value in settings.items()
        if before.get(name) != value
    ]
    if changed:
        raise ConfigurationError(
            f"{folder} belongs to another run: {'; '.join(changed)}. Restore what changed, or "
            f"remove {STATE}.json from it to go on without what was known of the prompts"
        )
    pruner.load_state_dict(saved["pruner"])
    if auto is not None and saved.get("auto") is not None:
        auto.load_state_dict(saved["auto"])
    return True
