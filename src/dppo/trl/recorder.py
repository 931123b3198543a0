"""Records the log-probability of every sampled token during `model.generate`.

transformers can return the scores of all steps, batch x steps x vocabulary; the estimator needs
one number per token. So a logits processor looks at each step's logits as they pass, keeps that one
step, and reads the sampled token off the next step's input.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList


class SampledLogProbs(LogitsProcessor):
    """Log-probabilities of the sampled tokens under softmax(logits / temperature).

    Top-k, top-p and the like come after it, so these are the policy's, as in training.
    """

    def __init__(self, temperature: float) -> None:
        self.calls = 0
        self._temperature = temperature
        self._pending: tuple[Tensor, Tensor] | None = None
        self._steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the log-prob of the previous step's token; pass the scores on untouched."""
        if self._pending is not None:
            self._settle(input_ids[:, -1])
        self._pending = (scores, torch.logsumexp(scores.float() / self._temperature, dim=-1))
        return scores

    def finish(self, sequences: Tensor) -> None:
        """Note the last token, once generation has returned `sequences`, shape (B, P + T)."""
        if self._pending is not None:
            self._settle(sequences[:, -1])
            self._pending = None

    def log_probs(self) -> Tensor:
        """Shape (B, T); what follows a sequence's end is meaningless."""
        return torch.stack(self._steps, dim=1) if self._steps else torch.empty(0, 0)

    def _settle(self, token: Tensor) -> None:
        assert self._pending is not None  # both callers have checked
        scores, log_normalizer = self._pending
        chosen = scores.gather(1, token.to(scores.device)[:, None])[:, 0].float()
        self._steps.append(chosen / self._temperature - log_normalizer)


@contextmanager
def record_generation(model: Any, temperature: float) -> Iterator[SampledLogProbs]:
    """While open, the call of `model.generate` is recorded.

    `calls` counts the calls: after more than one (turns of a conversation with tools) the
    log-probs belong to no single completion and must not be used.
    """
    recorder = SampledLogProbs(temperature)
    generate = model.generate
    patched_before = "generate" in vars(model)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder.calls += 1
        given = kwargs.pop("logits_processor", None) or []
        output = generate(*args, logits_processor=LogitsProcessorList([*given, recorder]), **kwargs)
        recorder.finish(output if isinstance(output, Tensor) else output.sequences)
        return output

    model.generate = recorded  # an attribute of the instance, taken back below
    try:
        yield recorder
    finally:
        if patched_before:
            model.generate = generate
        else:
            del model.generate
