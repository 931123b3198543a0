"""Connects a transformers trainer to the progress line and to metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dppo.cli.files import MetricsFile
from dppo.cli.progress import ProgressReporter
from dppo.cli.step_times import StepTimes


class RunCallback(TrainerCallback):
    """Tells the reporter of every step and writes every log call to the metrics file, if any."""

    def __init__(self, reporter: ProgressReporter, open_metrics: Callable[[], MetricsFile] | None):
        self._reporter, self._open_metrics = reporter, open_metrics
        self._metrics: MetricsFile | None = None
        self._times = StepTimes()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begins the stage, at the checkpoint's step after a resume, and the metrics file."""
        if self._open_metrics is not None:
            self._metrics = self._open_metrics()
        self._reporter.start_stage("step", total=state.max_steps, done=state.global_step)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Times the step."""
        self._times.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Counts the step."""
        self._times.stop()
        self._reporter.advance(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the reward and writes the metrics."""
        logs = logs or {}
        if logs.get("reward") is not None:
            self._reporter.show_reward(float(logs["reward"]))
        self._reporter.tick()
        if self._metrics is not None:
            logs = {**logs, **self._times.record()}
            self._metrics.write(step=state.global_step, max_steps=state.max_steps, logs=logs)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Ends the stage."""
        self._reporter.finish_stage()
