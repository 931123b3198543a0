"""Where a run begins, or goes on: its generations lined up with the batches of the loader.

A generation serves R = steps_per_generation * num_iterations micro-steps, one for every batch of
the loader. So the position in the epoch, which the host restores, says which window is due and
how far into its generation the run is; a checkpoint has the rest.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import has_length
from trl.trainer.utils import RepeatSampler

from dppo.errors import ConfigurationError
from dppo.pruner import Pruner
from dppo.trl import full_batch, pruning_state, self_check

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """That training goes on from a checkpoint, and the generation that is under way there."""

    checkpoint: str
    under_way: pruning_state.UnderWay | None
    place: list[int] | None
    """Epoch, and rows of it that were handed out when it was saved."""


class LineUp(TrainerCallback):
    """Tells the trainer where it is, when training and when an epoch begins."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.epoch = trainer, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what an interrupted training left half done."""
        trainer = self.trainer
        trainer._window_position, trainer._window_loss = 0, 0.0
        trainer._averages = full_batch.StepAverages()
        trainer._density.clear()
        if trainer._auto is not None:
            trainer._auto.begin()
        if trainer._audit is not None:
            trainer._audit.begin(trainer)
        packs = trainer._plans and args.packing in {"auto", "varlen"}
        trainer._form = self_check.form_of(trainer) if packs else None
        self.epoch = 0
        if trainer._resumed is None and trainer._generation == 0:
            # Whoever has looked at the loader has drawn windows.
            fresh = Pruner(trainer.pruner.config, seed=trainer.pruner.seed)
            trainer.pruner.load_state_dict(fresh.state_dict())
            trainer._windows.clear()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number the epoch's generations, before the loader asks for their prompts."""
        trainer, resumed = self.trainer, self.trainer._resumed
        trainer._resumed = None
        if not trainer._plans:
            return
        loader = trainer.callback_handler.train_dataloader
        steps_done, batches_done = 0, 0
        if resumed is not None:
            self.epoch, steps_done = divmod(state.global_step, steps_per_epoch(loader, trainer))
            batches_done = steps_done * args.gradient_accumulation_steps
            _catch_up(trainer, self.epoch)
        under_way = None if resumed is None else resumed.under_way
        rows = pruning_state.rows_of_micro_step(trainer)
        if resumed is None or not _in_place(resumed, loader, [self.epoch, batches_done], rows):
            under_way = None
            _pass_over(trainer)
        batches = trainer._geometry().micro_steps
        index = batches_done // batches
        trainer._step, trainer._rolled_out_at = batches_done, -1
        trainer._buffered_inputs = trainer._decision = trainer._basis = None
        first = trainer._generation - index - (under_way is not None)
        trainer._windows.begin_epoch(
            self.epoch,
            first=first,
            skipped=index,
            keep_at=_rates(args, state, state.global_step - steps_done, batches),
        )
        if under_way is not None:
            _go_on(trainer, under_way)
        self.epoch += 1


def restore(trainer: Any, checkpoint: str) -> None:
    """Take over the state of pruning that is in a checkpoint, weights and optimizer being loaded.

    Raises:
        ConfigurationError: It belongs to another run, on whichever rank; all ranks raise.
    """
    if trainer._resumed is not None and trainer._resumed.checkpoint == checkpoint:
        return  # checked before, to refuse it early
    under_way, place, problem = None, None, None
    try:
        found = pruning_state.load(checkpoint, trainer)
        place = found.place
        if found.goes_on:
            under_way = pruning_state.load_under_way(checkpoint, trainer, found)
    except ConfigurationError as error:
        problem = error
    refused = torch.tensor([problem is not None], device=trainer.accelerator.device)
    if trainer.accelerator.gather(refused).any():
        raise problem or ConfigurationError(f"another process cannot resume from {checkpoint}")
    trainer._resumed = Resumed(checkpoint, under_way, place)


def steps_per_epoch(loader: Any, trainer: Any) -> int:
    """Optimizer steps of an epoch, as the host counts them."""
    if not has_length(loader):  # a stream
        return trainer.state.max_steps
    return max(-(-len(loader) // trainer.args.gradient_accumulation_steps), 1)


def _in_place(resumed: Resumed, loader: Any, host: list[int], rows: int) -> bool:
    """Whether the host goes on where the checkpoint was saved; `rows` are those of a batch.

    It does not if a callback cut an epoch short: it then counts the steps as if none was.
    """
    if resumed.place is None:
        return True
    epoch, batches = resumed.place[0], resumed.place[1] // rows
    at_end = has_length(loader) and batches >= len(loader)
    if ([epoch + 1, 0] if at_end else [epoch, batches]) == host:
        return True
    logger.warning(
        "an epoch before the checkpoint was cut short, and the host goes on elsewhere: after %d "
        "batches of epoch %d, not %d of epoch %d",
        *(host[1], host[0], batches, epoch),
    )
    return False


def _pass_over(trainer: Any) -> None:
    """Windows that were drawn ahead but will not be rolled out keep their numbers to themselves."""
    last = trainer._windows.clear()
    ahead = last + 1 - trainer._generation
    if ahead > 0:
        logger.warning(
            "the epoch was cut short: %d window%s of prompts drawn ahead will not be rolled out",
            *(ahead, "s" * (ahead > 1)),
        )
        trainer._generation = last + 1


def _rates(args: Any, state: Any, first_step: int, batches: int) -> Any:
    """Rate that replaces `prompt_keep` for the window with a given place in the epoch."""

    def keep_at(index: int) -> float | None:
        step = first_step + index * batches // args.gradient_accumulation_steps
        return args.keep_at(step, state.max_steps)

    return keep_at


def _go_on(trainer: Any, under_way: pruning_state.UnderWay) -> None:
    """Restore the generation under way; its decision follows from what it was made from."""
    basis, window = under_way.basis, None
    trainer._buffered_inputs, trainer._held = under_way.batch, under_way.rows
    if trainer.args.prunes_prompts:
        window = trainer._windows.get(basis.generation)
    trainer._decision = trainer._decision_on(basis, window)


def _catch_up(trainer: Any, epochs: int) -> None:
    """Let the host's sampler be where it is after `epochs`; it would start with its first order."""
    sampler = trainer._sampler
    if isinstance(sampler, RepeatSampler) and sampler.shuffle:
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
