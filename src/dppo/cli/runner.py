"""Carries out a checked job: model, training, two evaluations, files and the printed summary."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from dppo._rewards import callable_name
from dppo.cli.callback import RunCallback
from dppo.cli.evaluate import Evaluation, evaluate
from dppo.cli.files import MetricsFile, write_json
from dppo.cli.job import Job, checkpoint_step
from dppo.cli.progress import ProgressReporter
from dppo.cli.summary import make_summary, summary_lines
from dppo.errors import ConfigurationError
from dppo.tasks.models import trainer_model
from dppo.trl import DPPOConfig, DPPOTrainer
from dppo.trl.resume import restore
from dppo.trl.reward_contract import checked

INTERRUPTED = 130


@dataclass
class _Outcome:
    """What a run has come to so far."""

    before: Evaluation | None = None
    after: Evaluation | None = None
    interrupted: bool = False


def train(job: Job) -> int:
    """Trains, evaluates before and after, and writes the results to the output directory.

    Args:
        job: The checked job.

    Returns:
        The exit code: 0, or 130 after an interrupt.
    """
    with readable_output():
        return _train(job)


def _train(job: Job) -> int:
    started = time.monotonic()
    config = make_config(job.config)
    trainer = _make_trainer(job, config)
    outcome = _Outcome()
    _carry_out(job, trainer, outcome)
    summary = make_summary(
        trainer.totals(),
        before=outcome.before,
        after=outcome.after,
        steps=trainer.state.global_step,
        wall_seconds=time.monotonic() - started,
        interrupted=outcome.interrupted,
        resumed_from=checkpoint_step(config.resume_from_checkpoint),
        config={**changed_fields(config), **_run_options(job)},
    )
    if trainer.is_world_process_zero():
        folder = Path(str(config.output_dir))
        write_json(folder / "summary.json", summary)
        print("\n".join([*summary_lines(summary), f"files    {folder}"]))
    return INTERRUPTED if outcome.interrupted else 0


def make_config(values: dict[str, Any]) -> DPPOConfig:
    """Builds the config.

    Args:
        values: Its fields.

    Returns:
        The config.

    Raises:
        ConfigurationError: If the config class refuses the values; with its words.
    """
    try:
        return DPPOConfig(**values)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def changed_fields(config: DPPOConfig) -> dict[str, Any]:
    """The fields of pruning, and those that differ from their defaults; no access tokens.

    Args:
        config: The config.

    Returns:
        Their values, fit for JSON.
    """
    values = config.to_dict()
    changed = {}
    for field in fields(config):
        default = field.default
        if callable(field.default_factory):
            default = field.default_factory()
        default = getattr(default, "value", default)
        shown = field.init and field.name in values and not field.name.endswith("_token")
        own = field.name in DPPOConfig.__annotations__
        if shown and (own or values[field.name] != default):
            changed[field.name] = values[field.name]
    return changed


def _make_trainer(job: Job, config: DPPOConfig) -> DPPOTrainer:
    model, tokenizer = trainer_model(job.run["model"])
    trainer = DPPOTrainer(
        model=model,
        reward_funcs=job.rewards,
        args=config,
        train_dataset=job.prompts.train,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _carry_out(job: Job, trainer: DPPOTrainer, outcome: _Outcome) -> None:
    config = trainer.args
    resume = config.resume_from_checkpoint
    is_main = trainer.is_world_process_zero()
    reporter = ProgressReporter(phase=lambda: trainer.phase, enabled=is_main)
    if resume:  # refused now, not after an evaluation
        restore(trainer, resume)
    path = Path(str(config.output_dir)) / "metrics.jsonl"
    open_metrics = partial(MetricsFile, path, keep_until=checkpoint_step(resume))
    trainer.add_callback(RunCallback(reporter, open_metrics if is_main else None))
    with reporter:
        try:
            outcome.before = _evaluate(job, trainer, reporter)
            trainer.train(resume_from_checkpoint=resume)
            outcome.after = _evaluate(job, trainer, reporter)
            trainer.save_model(config.output_dir)
        except KeyboardInterrupt:
            outcome.interrupted = True


def _evaluate(job: Job, trainer: DPPOTrainer, reporter: ProgressReporter) -> Evaluation | None:
    rows = job.prompts.held_out
    if rows is None:
        return None
    share = len(rows.shard(trainer.args.world_size, trainer.args.process_index))
    reporter.start_stage("held-out prompt", total=share, phase="evaluate")
    try:
        return evaluate(
            trainer,
            rows,
            rewards=[checked(reward) for reward in job.rewards],
            seed=trainer.args.seed,
            advance=reporter.advance,
        )
    finally:
        reporter.finish_stage()


def _run_options(job: Job) -> dict[str, Any]:
    return {**job.run, "reward": [callable_name(reward) for reward in job.rewards]}


@contextmanager
def readable_output() -> Iterator[None]:
    """Shows the library's notices, such as the choice of float32, and no bars in a log file."""
    log, handler = logging.getLogger("dppo"), logging.StreamHandler()
    level, bars = log.level, is_progress_bar_enabled()
    handler.setFormatter(logging.Formatter("note: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Of the host's own default values, which nobody here has set.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading and saving weights
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        if bars:
            enable_progress_bar()
