"""The gate: multiplies the gradient of each row where log-probs leave the model.

    x -> x.detach() + c * (x - x.detach())

has the value of x and c times its gradient. Every term of the host's loss reaches the parameters
through the log-probs and entropies, so one gate weights policy term, clip and KL alike, and the
host's loss code stays as it is.

Suffixes: `_R` rows of a micro-batch.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dppo.estimator.weights import Kind, gradient_factor
from dppo.trl.full_batch import Scores
from dppo.trl.schedule import MicroBatch


@dataclass
class Gate:
    """Gradient factors of one micro-batch, float64 on the CPU until used, and its forward pass."""

    KEY = "dppo_gate"

    weight_R: Tensor
    factor_R: Tensor
    """Of the log-probs."""
    entropy_factor_R: Tensor
    """Of the entropies, whose bonus is a mean over the tokens of the micro-batch."""
    scores: Scores | None = field(default=None)
    replayed: Scores | None = field(default=None)
    """Set while the loss is evaluated again without a forward pass."""

    @property
    def forward(self) -> Scores:
        """What the forward pass returned; there is one before anything asks."""
        assert self.scores is not None
        return self.scores

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        *,
        kind: Kind,
        full_rows: int,
        loss_tokens: int,
        prompt_factor: float = 1.0,
    ) -> "Gate":
        """Factors that turn the host's loss on these rows into their share of the full batch's."""

        def factor(of: Kind) -> Tensor:
            values = gradient_factor(
                micro_batch.weight_R,
                of,
                rows=len(micro_batch.rows_R),
                full_rows=full_rows,
                tokens=loss_tokens,
                full_tokens_N=micro_batch.full_tokens_R,
            )
            return torch.from_numpy(values)

        weight_R = torch.from_numpy(micro_batch.weight_R)
        # With prompts pruned there is no entropy bonus.
        return cls(weight_R, factor(kind) * prompt_factor, factor("micro-batch tokens"))


def scale_gradient(value_RT: Tensor, factor_R: Tensor) -> Tensor:
    """The same values, row gradients times `factor_R`."""
    fixed = value_RT.detach()
    return fixed + factor_R.to(value_RT)[:, None] * (value_RT - fixed)
