"""The trainers of a comparison, and what is watched of them without changing what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from dppo.cli.rewards import Reward
from dppo.tasks.models import trainer_model
from dppo.trl import DPPOConfig, DPPOTrainer
from dppo.trl.clock import PhaseClock
from dppo.trl.peers import PeerConfig, PeerTrainer
from dppo.trl.startup import StepClock

CLASSES: dict[str, tuple[type[GRPOTrainer], type[GRPOConfig]]] = {
    "trl": (GRPOTrainer, GRPOConfig),
    "dppo": (DPPOTrainer, DPPOConfig),
    "peer": (PeerTrainer, PeerConfig),
}


def make_config(job: dict[str, Any]) -> GRPOConfig:
    """The config of a run; what the host's class does not know is not of this method."""
    kind = CLASSES[job["trainer"]][1]
    names = {field.name for field in fields(kind) if field.init}
    given = {name: value for name, value in job["config"].items() if name in names}
    if not torch.cuda.is_available() and kind is GRPOConfig:  # ours sees to it itself
        given = {"bf16": False, "dataloader_pin_memory": False, **given}
    return kind(**{**given, **job["options"], "output_dir": job["folder"]})


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """What of the config differs from the defaults of its class."""
    kind = CLASSES[job["trainer"]][1]
    off: dict[str, Any] = (
        {} if torch.cuda.is_available() else {"bf16": False, "dataloader_pin_memory": False}
    )
    default, values = kind("x", **off).to_dict(), make_config(job).to_dict()
    hidden = {"output_dir", "logging_dir", *job["options"]}
    changed = {n: v for n, v in values.items() if v != default.get(n) and n not in hidden}
    return {**job["options"], **changed}


def make_trainer(job: dict[str, Any], data: Dataset, rewards: list[Reward]) -> GRPOTrainer:
    """The trainer of a run."""
    model, tokenizer = trainer_model(job["run"]["model"])
    return CLASSES[job["trainer"]][0](
        model=model,
        reward_funcs=rewards,  # type: ignore[arg-type] - the host's type is narrower
        args=make_config(job),
        train_dataset=data,
        processing_class=tokenizer,
    )


class Watched:
    """Tokens and seconds of a trainer, ours or the host's, in the same words."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._tokens, self._generated = {"generated": 0, "trained": 0}, 0
        self._clock: PhaseClock | None = None
        if not isinstance(trainer, DPPOTrainer):
            self._watch_host(trainer)

    def totals(self) -> dict[str, Any]:
        """As `DPPOTrainer.totals`; only what is known of the host."""
        trainer = self._trainer
        if isinstance(trainer, DPPOTrainer):
            totals = trainer.totals()
            rejected = getattr(trainer, "rejected_tokens", 0)
            totals["completion_tokens_generated"] += rejected
            if rejected:
                totals["completion_tokens_skipped"]["thrown_away"] = rejected
            return totals
        assert self._clock is not None
        return {
            "completion_tokens_generated": self._generated,
            "completion_tokens_trained": self._generated,
            "completion_tokens_skipped": {},
            "prompts_candidates": 0,
            "prompts_rolled_out": 0,
            "seconds": dict(self._clock.seconds),
        }

    def since_last(self) -> dict[str, float]:
        """Tokens since the last call, and the host's seconds by phase."""
        totals, before = self.totals(), self._tokens
        self._tokens = {name: totals[f"completion_tokens_{name}"] for name in before}
        found = {f"tokens_{name}": value - before[name] for name, value in self._tokens.items()}
        if self._clock is not None:
            seconds = self._clock.since_last()
            found |= {f"dppo/time/{phase}": spent for phase, spent in seconds.items()}
        return found

    def _watch_host(self, trainer: GRPOTrainer) -> None:
        """Times two of its methods; what they do and return is left alone."""
        clock = self._clock = PhaseClock()
        trainer.add_callback(StepClock(clock, when_over=lambda: None))

        def timed(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with clock.running(phase):
                    return method(*args, **kwargs)

            return call

        def generate(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
            with clock.running("rollout"):
                generated = host_generate(prompts, *args, **kwargs)
            if model.training:
                self._generated += sum(len(ids) for ids in generated[1])
            return generated

        model: Any = trainer.model
        host_generate: Callable[..., Any] = trainer._generate
        watched: Any = trainer
        watched._generate = generate
        watched._calculate_rewards = timed(trainer._calculate_rewards, "score")
