"""verl's own loss with the gradient of each row multiplied where log-probs leave the model.

    x -> x.detach() + c (x - x.detach())

has the value of x and c times its gradient. Policy term, KL and entropy reach the parameters
through log-probs and entropies alone, so one factor weights them alike, whichever policy loss verl
has registered; its code stays as it is. verl then divides by D', the survivors of the mini-batch or
their tokens; with c = (w / D) D' the gradient of a row is w / D times that of its loss, and the
values that verl logs are means over survivors.

Suffix: `_R` rows of a micro-batch.
"""

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

FACTOR = "prune_factor"
"""Field of w / D, one value for every response token of a row."""
KEPT = "prune_kept"
"""Field of the survivors in a row's mini-batch, over all ranks, in the same form."""


def weighted_ppo_loss(
    config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """`verl.workers.utils.losses.ppo_loss`, each row's gradient weighted.

    Args:
        config: verl's `ActorConfig`.
        model_output: Log-probs, and entropies where asked for, nested by row.
        data: Micro-batch with the fields `FACTOR` and `KEPT`.
        dp_group: As for verl.

    Returns:
        The loss, whose value is that of the rows at hand, and verl's metrics of them.
    """
    factor = data[FACTOR]
    factor_R = factor.values()[factor.offsets()[:-1]]
    # A mini-batch of which nothing is left has no tokens.
    tokens = max(float(data["batch_num_tokens"]), 1.0)
    rows = max(int(data[KEPT].values()[0]), 1)  # without padding, which only evens out the ranks
    tu.assign_non_tensor(data, batch_num_tokens=tokens, global_batch_size=rows)
    divided_by = tokens if config.loss_agg_mode == "token-mean" else rows
    scaled = {
        key: scale_gradient(model_output[key], factor_R * divided_by)
        for key in ("log_probs", "entropy")
        if model_output.get(key) is not None
    }
    return ppo_loss(config, {**model_output, **scaled}, data, dp_group)


def scale_gradient(nested: Tensor, factor_R: Tensor) -> Tensor:
    """The same values, jagged, with the gradients of each row multiplied."""
    values, offsets = nested.values(), nested.offsets()
    factor = torch.repeat_interleave(factor_R.to(values), offsets.diff())
    fixed = values.detach()
    scaled = fixed + factor * (values - fixed)
    return torch.nested.nested_tensor_from_jagged(scaled, offsets)
