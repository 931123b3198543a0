"""What of a run's pruning is in its checkpoints, and whether it belongs to the run that resumes.

* `dppo_state.json`, `.npz`: generation counter, options, history of the prompts, windows;
* `dppo_generation_<rank>.json`, `.npz`: the generation under way, when a step ended inside it: the
  rows that the rank was to run.

Nothing depends on how many ranks share a batch, so that a run can go on with another number of
them, if the rows of an optimizer step and of a generation stay as many.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dppo import _state_files as state_files
from dppo.errors import ConfigurationError
from dppo.trl.decision import Basis
from dppo.trl.prompt_ids import dataset_digest

logger = logging.getLogger(__name__)

STATE = "dppo_state"
COMPLETION_OPTIONS = (
    *("completion_keep", "completion_rule", "completion_prune_rate", "sampling_design"),
)
PROMPT_OPTIONS = (
    *("prompt_keep", "prompt_rule", "prompt_prune_rate", "advantage_scale", "observation_lag"),
)

NAMES = {
    "advantage_scale": "scale_rewards",
    "observation_lag": "lag (dataloader_num_workers, dataloader_prefetch_factor)",
}
"""What an option of the pruner follows from."""


@dataclass(frozen=True)
class UnderWay:
    """A generation of which some micro-steps are still to run, on one rank."""

    batch: dict[str, Any]
    basis: Basis
    rows: NDArray[np.int64]
    """Global rows that the batch holds, in order."""


STEP_ROWS = (
    "completions of an optimizer step (processes x per_device_train_batch_size x "
    "gradient_accumulation_steps)"
)
GENERATION_ROWS = (
    "completions of a generation (processes x per_device_train_batch_size x steps_per_generation)"
)


def rows_of_micro_step(trainer: Any) -> int:
    """Of all ranks."""
    return trainer.accelerator.num_processes * trainer.args.per_device_train_batch_size


def under_way(trainer: Any) -> UnderWay | None:
    """The generation of which micro-steps are still to run, if there is one."""
    batch, basis = trainer._buffered_inputs, trainer._basis
    if not trainer._plans or batch is None or basis is None or trainer._position == 0:
        return None
    return UnderWay(batch, basis, trainer._held)


def settings(trainer: Any) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes from it."""
    args, data = trainer.args, trainer.train_dataset
    streamed = not hasattr(data, "__len__")
    annealed = streamed and args.prunes_prompts and args.prune_until < 1
    return {
        STEP_ROWS: rows_of_micro_step(trainer) * args.gradient_accumulation_steps,
        GENERATION_ROWS: rows_of_micro_step(trainer) * args.generation_steps,
        "num_iterations": args.num_iterations,
        "num_generations": args.num_generations,
        "order of the prompts (data_seed, or seed)": args.order_seed,
        "shuffle_dataset": args.shuffle_dataset,
        "prompt_id_column": args.prompt_id_column,
        "train_dataset": "streamed" if streamed else dataset_digest(data),
        # Where windows shrink says how far a stream was read.
        **({"max_steps": trainer.state.max_steps} if annealed else {}),
    }


def save(folder: str | Path, trainer: Any) -> None:
    """Write what all ranks share."""
    number = trainer._generation - (under_way(trainer) is not None)
    epoch, batches = trainer._windows.place(number, trainer._position)
    tree = {
        "generation": trainer._generation,
        "phases": _phases(trainer),
        "pruner": trainer.pruner.state_dict(),
        "settings": settings(trainer) if trainer._plans else {},
        "windows": trainer._windows.state(number),
        "completion_keep": _rate(trainer.args),
        "auto": None if trainer._auto is None else trainer._auto.controller.state_dict(),
        "under_way": under_way(trainer) is not None,
        "place": [epoch, batches * rows_of_micro_step(trainer)],
        "ranks": trainer.accelerator.num_processes,
        "micro_step_rows": rows_of_micro_step(trainer),
    }
    state_files.write(Path(folder) / STATE, tree)


@dataclass(frozen=True)
class Found:
    """What a checkpoint says of where it was saved."""

    goes_on: bool
    """Whether a generation is under way and can be gone on with."""
    place: list[int] | None
    """Epoch, and rows of it that were handed out; None if that is not known or does not matter."""
    ranks: int = 1
    micro_step_rows: int = 1


def load(folder: str | Path, trainer: Any) -> Found:
    """Check a saved state against the run, and take it over.

    Raises:
        ConfigurationError: The state is unreadable, or of another data set or configuration; the
            message names what changed. A phase that is switched on or off is not a change.
    """
    stem, now = Path(folder) / STATE, _phases(trainer)
    if not stem.with_suffix(".json").exists():
        if trainer.args.decides:
            logger.warning(
                "%s has no pruning state: the run was not pruned until here, or its files were "
                "left behind. Draws start at generation 0, and nothing is known of any prompt",
                folder,
            )
        return Found(False, None)
    saved = state_files.read(stem)
    try:
        generation, before = int(saved["generation"]), saved["phases"]
        both = {phase for phase in now if now[phase] == before[phase] == "on"}
        changes = _changes(saved, trainer, both)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{stem}.json cannot be read (it lacks {error}); resume from another checkpoint"
        ) from error
    if changes:
        raise ConfigurationError(
            f"{folder} belongs to another run: {'; '.join(changes)}. Restore what changed, or "
            f"remove {STATE}.json from it to go on without what was known of the draws"
        )
    trainer._generation = generation
    changed = [phase for phase in now if now[phase] != before[phase]]
    for phase in changed:
        if phase != MICRO_BATCHES or changed == [MICRO_BATCHES]:
            what = phase if phase == MICRO_BATCHES else f"pruning of {phase}"
            logger.warning("%s: %s until here, %s now", what, before[phase], now[phase])
    if trainer._auto is not None and saved.get("auto") is not None:
        trainer._auto.controller.load_state_dict(saved["auto"])
    if "prompts" in both:
        trainer.pruner.load_state_dict(
            {**saved["pruner"], "config": trainer.pruner.config.to_dict()}
        )
        trainer._windows.load(saved["windows"])
    elif now["prompts"] == "on":
        logger.warning("nothing is known of any prompt yet: the first draws are uniform")
    if now != before and "prompts" in both:
        # The generation under way is dropped; windows drawn ahead have numbers that follow it.
        trainer._generation = max(generation, trainer._windows.clear() + 1)
    return Found(
        saved["under_way"] and now == before,
        saved["place"] if both else None,
        saved["ranks"],
        saved["micro_step_rows"],
    )


def save_under_way(folder: str | Path, rank: int, generation: UnderWay) -> None:
    """Write a rank's part of the generation under way."""
    tree = {
        "batch": generation.batch,
        "basis": generation.basis.to_dict(),
        "rows": generation.rows,
    }
    state_files.write(Path(folder) / f"dppo_generation_{rank}", tree)


def load_under_way(folder: str | Path, trainer: Any, found: Found) -> UnderWay:
    """Read a rank's part of it; of all ranks, where there were not as many, or with other rows.

    Raises:
        ConfigurationError: A file is missing or damaged.
    """
    now = (trainer.accelerator.num_processes, rows_of_micro_step(trainer))
    alike = (found.ranks, found.micro_step_rows) == now
    ranks = [trainer.accelerator.process_index] if alike else range(found.ranks)
    trees = [state_files.read(Path(folder) / f"dppo_generation_{rank}") for rank in ranks]
    basis = Basis(**trees[0]["basis"])
    if not alike:
        left = basis.window_left * found.micro_step_rows // rows_of_micro_step(trainer)
        basis = replace(basis, window_left=left)
    batch, held = trees[0]["batch"], trees[0]["rows"]
    if len(trees) > 1:
        batch, held = _together([t["batch"] for t in trees], [t["rows"] for t in trees])
    return UnderWay(_to(batch, trainer.accelerator.device), basis, held)


def _together(
    batches: list[dict[str, Any]], held: list[NDArray[np.int64]]
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """The rows of all ranks, each once; they have the same width on all."""
    rows, first = np.unique(np.concatenate(held), return_index=True)
    index = torch.from_numpy(first)
    whole = {
        key: torch.cat([batch[key] for batch in batches])[index]
        if isinstance(value, Tensor) and value.ndim
        else value
        for key, value in batches[0].items()
    }
    return whole, rows


MICRO_BATCHES = "micro-batches of our own"
"""The phase that is on with pruning, and where rows are packed without it."""


def _phases(trainer: Any) -> dict[str, str]:
    args = trainer.args
    shadow = args.shadows
    completions = "in shadow mode" if shadow else "on" if args.prunes_completions else "off"
    return {
        "prompts": "on" if args.prunes_prompts else "off",
        "completions": completions,
        MICRO_BATCHES: "on" if trainer._plans else "off",
    }


def _rate(args: Any) -> float | str:
    """`completion_keep`, and what it is chosen by."""
    return f"auto by {args.auto_cost}" if args.chooses_keep else args.completion_keep


def _changes(saved: dict[str, Any], trainer: Any, both: set[str]) -> list[str]:
    """What differs, of that which matters to phases that are on before and after."""
    if not both:
        return []
    then, config = saved["pruner"], trainer.pruner.config.to_dict()
    names = COMPLETION_OPTIONS * ("completions" in both) + PROMPT_OPTIONS * ("prompts" in both)
    before: dict[str, Any] = {"seed": then["seed"], **{n: then["config"].get(n) for n in names}}
    after: dict[str, Any] = {"seed": trainer.pruner.seed, **{n: config[n] for n in names}}
    before, after = {**before, **saved["settings"]}, {**after, **settings(trainer)}
    if "completions" in both:
        before["completion_keep"], after["completion_keep"] = (
            *(saved["completion_keep"], _rate(trainer.args)),
        )
    changed = [name for name in after if before.get(name) != after[name]]
    if len(changed) > 1 and "observation_lag" in changed:
        changed.remove("observation_lag")  # it follows from the others
    return [f"{NAMES.get(n, n)} {before.get(n)!r} -> {after[n]!r}" for n in changed]


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
