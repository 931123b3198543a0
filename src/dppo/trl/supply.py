"""Whether the data set has prompts enough; known before weights are loaded."""

import logging
from typing import Any

from datasets import Dataset, IterableDataset

from dppo._supply import check_choice, check_prompts, check_window
from dppo.errors import ConfigurationError
from dppo.estimator.weights import loss_denominator
from dppo.trl.config import DPPOConfig
from dppo.trl.prompt_ids import believed_rates, dataset_ids

logger = logging.getLogger(__name__)

IMAGES = {"image", "images"}
FEW_PROMPTS = 16
"""Prompts per generation below which an estimated token total is a warning."""


def check_supply(dataset: Any, args: DPPOConfig) -> None:
    """Refuse a data set on which nothing would be trained; say what will be rolled out of it.

    Raises:
        ConfigurationError: Too few prompts for a generation or a window, too few passes for a
            history, or a stream without `max_steps`.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        return
    if isinstance(dataset, IterableDataset):
        _check_stream(args)
    elif args.prunes_prompts:
        _check_window(len(dataset), args)
    else:
        _check_prompts(len(dataset), args)
    if args.prunes_prompts:
        _check_columns(dataset, args)
        _remark_on_losses(args)


def _check_columns(dataset: Dataset | IterableDataset, args: DPPOConfig) -> None:
    """The columns that prompt pruning reads; of a stream only their names, where it knows them."""
    columns = set(dataset.column_names or ())
    if args.prompt_id_column is None and IMAGES & columns:
        raise ConfigurationError(
            "prompts with images are not told apart by their text: give prompt_id_column, or set "
            "prompt_keep=1.0"
        )
    for option in ("prompt_id_column", "prompt_prior_column"):
        name = getattr(args, option)
        if columns and name is not None and name not in columns:
            found = ", ".join(map(repr, sorted(columns)))
            raise ConfigurationError(f"{option}={name!r} is none of the columns {found}")
    if isinstance(dataset, Dataset):
        if args.prompt_id_column is not None:
            dataset_ids(dataset, args.prompt_id_column)
        if args.prompt_prior_column is not None:
            believed_rates(dataset, args.prompt_prior_column)


def _remark_on_losses(args: DPPOConfig) -> None:
    """What keeps the gradient from being unbiased over the draw of prompts, and how far."""
    if args.scale_rewards == "batch" or args.multi_objective_aggregation == "normalize_then_sum":
        logger.warning(
            "advantages are scaled over the batch, hence over the prompts that were drawn: with "
            "prompt_keep < 1 the gradient is consistent, not unbiased"
        )
    if loss_denominator(args.loss_type).kind == "generation tokens":
        _remark_on_tokens(args)


def _check_stream(args: DPPOConfig) -> None:
    if args.max_steps <= 0:
        raise ConfigurationError(
            f"max_steps={args.max_steps}: a streaming data set has no length, so give the number "
            "of optimizer steps"
        )
    if args.prunes_prompts:
        check_choice(
            args.prompt_keep,
            rolled_out=args.prompts_per_generation,
            candidates=args.candidates_per_generation,
        )
        logger.warning(
            "prompt pruning of a stream: windows of %d prompts, %d of them rolled out (effective "
            "keep %.3f), pass after pass. Nothing is known of a prompt before its second visit; "
            "observations reach a window %d generations late",
            *(args.candidates_per_generation, args.prompts_per_generation),
            *(_effective_keep(args), args.lag(0)),  # the host reads streams without workers
        )


def _check_prompts(count: int, args: DPPOConfig) -> None:
    needed = args.prompts_per_generation
    check_prompts(count, rolled_out=needed)
    if count % needed:
        logger.warning(
            "%d of %d prompts unused per epoch (less than one generation of %d)",
            *(count % needed, count, needed),
        )


def _check_window(count: int, args: DPPOConfig) -> None:
    rolled_out, candidates = args.prompts_per_generation, args.candidates_per_generation
    generations = count // candidates
    check_window(
        count,
        prompt_keep=args.prompt_keep,
        rolled_out=rolled_out,
        candidates=candidates,
        passes=_passes(generations, args),
        known=args.prompt_prior_column is not None or args.allow_single_epoch,
    )
    logger.warning(
        "prompt pruning: M=%d candidates, K=%d rolled out, effective keep %.3f; %d generations per "
        "epoch, %d of %d prompts unused per epoch; observations reach a window %d generations late",
        *(candidates, rolled_out, _effective_keep(args), generations),
        *(count - generations * candidates, count, args.observation_lag),
    )
    if args.prune_warmup_steps or args.prune_until < 1:
        logger.warning(
            "where nothing is pruned, a window is its first %d prompts; the other %d are left to "
            "another epoch's order",
            *(rolled_out, candidates - rolled_out),
        )


def _passes(generations: int, args: DPPOConfig) -> float:
    """Passes over the data that the run makes."""
    if args.max_steps <= 0 or generations == 0:
        return args.num_train_epochs
    batches = generations * args.batches_per_generation
    return args.max_steps / -(-batches // args.gradient_accumulation_steps)


def _effective_keep(args: DPPOConfig) -> float:
    return args.prompts_per_generation / args.candidates_per_generation


def _remark_on_tokens(args: DPPOConfig) -> None:
    count = args.prompts_per_generation
    message = (
        "loss_type=%s divides by the tokens of the batch, which are estimated from the %d prompts "
        "that are rolled out: a bias of order 1/K (in a prototype 11 %% rms at K=4, 1 %% at 32)"
    )
    if count < FEW_PROMPTS:
        message += ". Raise the number of prompts per generation, or use loss_type='dr_grpo'"
        logger.warning(message, args.loss_type, count)
    else:
        logger.info(message, args.loss_type, count)
