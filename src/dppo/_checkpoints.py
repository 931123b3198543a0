"""Which checkpoint a run goes on from. Shared by the command line and the trainer; no torch."""

import json
import logging
from pathlib import Path

from dppo.errors import ConfigurationError

logger = logging.getLogger(__name__)

PREFIX = "checkpoint-"


def checkpoint_path(given: str | Path | bool | None, output_dir: str) -> str | None:
    """Path of the checkpoint to resume from, None for none.

    Args:
        given: A path, or True (or "true") for the latest in `output_dir` that was saved to its end.
        output_dir: Of the run.

    Raises:
        ConfigurationError: There is none, or it was not saved to its end.
    """
    if given is None or str(given).lower() in {"", "false"}:
        return None
    given = str(given)
    if given.lower() == "true":
        return last_complete(output_dir)
    if not Path(given).is_dir():
        raise ConfigurationError(f"resume_from_checkpoint: there is no directory {given}")
    if not is_complete(given):
        raise ConfigurationError(
            f"resume_from_checkpoint: {given} has no complete trainer_state.json; it is no "
            "checkpoint, or was not saved to its end"
        )
    return given


def last_complete(folder: str | Path) -> str:
    """The latest checkpoint in `folder` that was saved to its end.

    Raises:
        ConfigurationError: There is none.
    """
    found = {
        int(path.name.removeprefix(PREFIX)): path
        for path in Path(folder).glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdigit()
    }
    for _, path in sorted(found.items(), reverse=True):
        if is_complete(path):
            return str(path)
        logger.warning("%s was not saved to its end and is passed over", path)
    raise ConfigurationError(f"there is no checkpoint to resume from in {folder}")


def is_complete(checkpoint: str | Path) -> bool:
    """Whether the host wrote its state, which it does last."""
    try:
        json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
