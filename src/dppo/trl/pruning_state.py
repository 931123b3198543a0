"""The pruning state beside the host's checkpoint: JSON, written atomically, never pickle."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from dppo.errors import ConfigurationError
from dppo.pruner import Pruner

logger = logging.getLogger(__name__)

FILE = "dppo_state.json"


def save(folder: str | Path, *, pruner: Pruner, generation: int, shadow: bool = False) -> None:
    """Write the state of `pruner` and the generation counter."""
    target = Path(folder) / FILE
    partial = target.with_suffix(".tmp")
    state = {"generation": generation, "shadow": shadow, "pruner": pruner.state_dict()}
    with partial.open("w") as file:
        json.dump(state, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def load(folder: str | Path, *, pruner: Pruner, shadow: bool = False) -> int:
    """Check the saved state against `pruner`; return the generation counter.

    Without a saved state (pruning was off until then) counting starts at 0, and a warning says so.
    From or to shadow mode any options go: nothing was, or will be, trained by them.

    Raises:
        ConfigurationError: The state is unreadable or belongs to another configuration.
    """
    target = Path(folder) / FILE
    if not target.exists():
        logger.warning(
            "%s has no pruning state: the run was not pruned until here, or by an older version. "
            "Draws start at generation 0",
            folder,
        )
        return 0
    try:
        state: dict[str, Any] = json.loads(target.read_text())
        generation = int(state["generation"])
        saved, switched = state["pruner"], shadow != state["shadow"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{target} cannot be read ({error}); resume from another checkpoint, or remove the "
            "file to start the draws at generation 0"
        ) from error
    if switched:
        logger.info("pruning was %s until here", "in shadow mode" if not shadow else "on")
    else:
        pruner.load_state_dict(saved)
    return generation
