"""A process that carries out the runs of one method, a step at a time, when told to.

It reads a job as one line of JSON, and then one line for every step; it answers each with one line.
Whoever asks lets one worker run at a time. What the libraries print goes to the error stream.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl.trainer.grpo_trainer import GRPOTrainer

from dppo.cli.compare.trainers import Watched, make_trainer
from dppo.cli.data import Prompts, load_prompts, prompt_options
from dppo.cli.evaluate import Evaluation, evaluate
from dppo.cli.files import MetricsFile, write_json
from dppo.cli.rewards import load_rewards
from dppo.cli.step_times import StepTimes
from dppo.cli.summary import make_summary
from dppo.trl.reward_contract import checked


class Channel:
    """Lines of JSON on what were standard input and output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # prints must not get among the answers

    def read(self) -> dict[str, Any]:
        """The next line; ends the process if there is none, for nobody is asking any more."""
        line = sys.stdin.readline()
        if not line:
            os._exit(1)
        return json.loads(line)

    def say(self, event: str, **values: Any) -> None:
        """Answer."""
        self._out.write(json.dumps({"event": event, **values}) + "\n")
        self._out.flush()


class Wait(TrainerCallback):
    """Begins a step when told to. Comes before whatever takes the time."""

    def __init__(self, channel: Channel, clock: StepTimes) -> None:
        self.channel, self.clock = channel, clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answers for what has been done, and waits."""
        self.channel.say("step", step=state.global_step, max_steps=state.max_steps)
        self.channel.read()
        self.clock.start()


class Record(TrainerCallback):
    """Evaluates after a step, and writes it down. Comes after whatever takes the time."""

    def __init__(
        self, watched: Watched, clock: StepTimes, metrics: MetricsFile, held_out: HeldOut
    ) -> None:
        self.watched, self.clock, self.metrics, self.held_out = watched, clock, metrics, held_out
        self._evaluated: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluates where that is due."""
        self.clock.stop()
        if state.global_step % self.held_out.every == 0 or state.global_step == state.max_steps:
            self._evaluated = self.held_out.evaluate(samples=1).mean

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Writes the record of a step; not that of the whole training."""
        if not logs or "loss" not in logs:
            return
        record = {**logs, **self.watched.since_last(), **self.clock.record()}
        if self._evaluated is not None:
            record["eval_reward"], self._evaluated = self._evaluated, None
        self.metrics.write(step=state.global_step, max_steps=state.max_steps, logs=record)


class HeldOut:
    """The evaluations of a run."""

    def __init__(self, trainer: GRPOTrainer, prompts: Prompts, job: dict[str, Any]) -> None:
        self._trainer, self._rows = trainer, prompts.held_out
        self._rewards = [checked(reward) for reward in load_rewards(job["run"]["reward"])]
        self.every = job["eval_every"]

    def evaluate(self, *, samples: int) -> Evaluation:
        """One completion for every held-out prompt, `samples` times; the same seeds for all."""
        assert self._rows is not None  # a comparison without held-out prompts is refused
        found = [
            evaluate(
                self._trainer,
                self._rows,
                rewards=self._rewards,
                seed=1000 + number,
                advance=lambda done: None,
            )
            for number in range(samples)
        ]
        mean = sum(e.mean for e in found) / samples
        error = found[0].standard_error / samples**0.5
        unscored = sum(e.unscored for e in found)
        return Evaluation(mean, error, sum(e.count for e in found), unscored)


def carry_out(job: dict[str, Any], channel: Channel) -> None:
    """One run, to its end."""
    began, folder = time.monotonic(), Path(job["folder"])
    run = job["run"]
    prompts = load_prompts(
        run["dataset"],
        **prompt_options(run),
        seed=job["data_seed"],
    )
    trainer = make_trainer(job, prompts.train, load_rewards(run["reward"]))
    trainer.remove_callback(PrinterCallback)
    watched, clock = Watched(trainer), StepTimes()
    held_out = HeldOut(trainer, prompts, job)
    metrics = MetricsFile(folder / "metrics.jsonl", keep_until=None)
    trainer.add_callback(Record(watched, clock, metrics, held_out))
    trainer.callback_handler.callbacks.insert(0, Wait(channel, clock))
    before = held_out.evaluate(samples=1)
    metrics.write(step=0, max_steps=trainer.args.max_steps, logs={"eval_reward": before.mean})
    trainer.train()
    after = held_out.evaluate(samples=job["final_samples"])
    summary = make_summary(
        watched.totals(),
        before=before,
        after=after,
        steps=trainer.state.global_step,
        wall_seconds=time.monotonic() - began,
        interrupted=False,
        resumed_from=None,
        config={**job["config"], **job["options"], **run},
    )
    write_json(folder / "summary.json", {**summary, "job": job})


def main() -> None:
    """Carries out jobs until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides
    channel = Channel()
    disable_progress_bar()
    while True:
        job = channel.read()
        try:
            carry_out(job, channel)
        except Exception:  # of one run; the others go on
            channel.say("failed", error=traceback.format_exc())
        else:
            channel.say("done")


if __name__ == "__main__":
    main()
