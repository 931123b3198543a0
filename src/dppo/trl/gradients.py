"""Gradients of parts of a generation at the parameters at hand, sketched; for small models.

Each goes the trainer's own way: a `MicroBatch`, its inputs with their gate, `compute_loss`. So the
gradients of all rows add up to the full batch's, whatever the loss. None leaves a trace in
training (`undisturbed`).

Suffixes: `_N` rows of the generation, `_PG` prompts x group, `_K` sketch.
"""

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid

from dppo.errors import ConfigurationError
from dppo.trl import full_batch, passes
from dppo.trl.schedule import MicroBatch

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
LONG = 10.0
"""Seconds after which a recorded generation is remarked on."""

RESTORED = (
    *("_decision", "_gate", "_averages", "_density"),
    *("entropy_coef", "_last_world_entropy", "_entropy_window_stats"),
)
"""What a pass through the loss may set on the trainer; of the host: adaptive entropy."""


class Sketch:
    """Signed hashing of all trainable parameters: linear, and keeps inner products on average.

    Args:
        parameters: By name. The bucket and sign of an entry follow from name, place and seed.
        size: Numbers in a sketch, K.
        seed: Of the run.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, size: int, seed: int) -> None:
        self.size = size
        self._parameters = list(parameters.values())
        self._places = [
            _places(f"dppo/sketch/{seed}/{name}", p.numel(), size).to(p.device)
            for name, p in parameters.items()
        ]

    @classmethod
    def of(cls, trainer: Any, *, size: int) -> "Sketch":
        """Of the trainer's model."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        return cls(trained, size=size, seed=trainer.args.seed)

    def gradient(self, loss: Tensor) -> Floats:
        """Shape (K,). Sketch of the gradient of a scalar; leaves `.grad` alone."""
        return self.reduced(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def reduced(self, values: Iterable[Tensor | None]) -> Floats:
        """Shape (K,). Sketch of one tensor for each parameter; None is 0."""
        total = np.zeros(2 * self.size)
        for place, value in zip(self._places, values, strict=True):
            if value is not None:
                part = torch.zeros(2 * self.size, dtype=torch.float64, device=place.device)
                part.index_add_(0, place, value.detach().reshape(-1).to(part))
                total += part.cpu().numpy()
        return total[: self.size] - total[self.size :]


def _places(key: str, count: int, size: int) -> Tensor:
    """Shape (count,). Bucket in [0, 2 size); the upper half is subtracted."""
    digest = int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "little")
    # The raw stream is fixed by the algorithm; numpy may change what it makes of it.
    raw = np.random.Philox(key=digest).random_raw(count) % np.uint64(2 * size)
    return torch.from_numpy(raw.astype(np.int32))


@contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """What runs in this block changes nothing of training, is not logged, and takes no time."""
    began, logged = time.perf_counter(), trainer._metrics["train"]
    kept = {name: getattr(trainer, name) for name in RESTORED if hasattr(trainer, name)}
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's rewards may
    trainer._metrics["train"] = defaultdict(list)
    trainer._averages, trainer._density = full_batch.StepAverages(), Counter()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), trainer.clock.running("idle"):
            yield
    finally:
        trainer._metrics["train"] = logged
        for name, value in kept.items():
            setattr(trainer, name, value)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        trainer._current_train_step_time -= time.perf_counter() - began  # the host's `step_time`


def gradient(
    trainer: Any, sketch: Sketch, micro_batches: Iterable[MicroBatch], generation: dict[str, Any]
) -> Floats:
    """Shape (K,). Sketch of what training on the micro-batches would accumulate."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()  # float16 would lose small gradients
    total = np.zeros(sketch.size)
    for micro_batch in micro_batches:
        inputs = trainer._inputs_of(micro_batch, generation)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model_wrapped, inputs)
        total += sketch.gradient(loss * scale) / scale
    return total


def unpruned_batch(
    trainer: Any, rows: NDArray[np.int64], weight_N: Floats | None = None
) -> MicroBatch:
    """A micro-batch of some rows of the generation in hand, weights 1 where not given."""
    decision = trainer._plan
    weight_R = np.ones(len(rows)) if weight_N is None else weight_N[rows]
    return MicroBatch(rows, weight_R, decision.full_tokens_N[rows], decision.segments[0])


class RowGradients:
    """`record_gradients`: of every completion, before a generation is trained on.

    Args:
        size: Numbers in a sketch, K.
    """

    def __init__(self, size: int) -> None:
        self._size, self._said = size, False
        self._sketch: Sketch | None = None

    def of(self, trainer: Any, generation: dict[str, Any]) -> NDArray[np.float32]:
        """Shape (P, G, K). Contribution of each completion to the loss of its first pass."""
        began = time.perf_counter()
        live = trainer._plan.choices[0].live
        found = np.zeros((live.size, self._size), dtype=np.float32)
        with undisturbed(trainer):
            self._sketch = self._sketch or Sketch.of(trainer, size=self._size)
            whole = passes.filled(trainer, split_pixel_values_by_grid(generation))
            for row in np.flatnonzero(live):
                one = unpruned_batch(trainer, np.array([row]))
                found[row] = gradient(trainer, self._sketch, [one], whole)
        seconds = time.perf_counter() - began
        if seconds > LONG and not self._said:
            self._said = True
            logger.info(
                "record_gradients: those of %d completions took %.0f s, in every generation",
                *(int(live.sum()), seconds),
            )
        return found.reshape(*live.shape, self._size)


def check_start(trainer: Any) -> None:
    """Refuse to look at single gradients where they are not at hand, or do not add up.

    Raises:
        ConfigurationError: Names what and the remedy.
    """
    args = trainer.args
    names = [n for n in ("record_gradients", "audit_step") if getattr(args, n) is not None]
    kind = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"
    processes = trainer.accelerator.num_processes
    for wrong, why in (
        (processes > 1, f"works in one process only, and there are {processes}; start one"),
        (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            f"needs whole gradients, which {kind} does not leave with a process; switch it off",
        ),
        (
            trainer.use_vllm and trainer.vllm_importance_sampling_correction,
            "cannot know the sampler's ratio of completions that are not trained on; set "
            "vllm_importance_sampling_correction=False",
        ),
        (
            trainer.aux_loss_enabled,
            "sums over completions, which the router's auxiliary loss does not: switch that off",
        ),
    ):
        if wrong and names:
            value = getattr(args, names[0])
            raise ConfigurationError(f"{names[0]}={value} {why}, or set {names[0]} to None")
