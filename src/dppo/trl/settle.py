"""The host's advantages, settled with the decision that was made before the host computed them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dppo.errors import HostDriftError
from dppo.trl.decision import Decision
from dppo.trl.notices import Notices


def settle(advantages_B: Tensor, decision: Decision, *, rank: int, notices: Notices) -> Tensor:
    """Set the advantages of dead groups to exactly 0; check that the rest is what was assumed.

    A difference only makes the probabilities less than the best; an advantage on a row that was
    taken for inert would be a gradient lost.

    Args:
        advantages_B: Shape (B,). The host's, of this rank.
        decision: What was decided, of all ranks.
        rank: Whose advantages these are.
        notices: Told of differences.

    Raises:
        HostDriftError: A row that was taken for inert has an advantage.
    """
    host = advantages_B.detach().cpu().numpy()
    mine = slice(len(host) * rank, len(host) * (rank + 1))
    choice, dead = decision.choices[0], decision.dead_N[mine]
    settled = np.where(dead, host.dtype.type(0), host)
    inert = ~choice.live.ravel()[mine] & (decision.rows.loss_tokens[mine] > 0)
    if settled[inert].any():
        raise HostDriftError(
            "the host gave an advantage to a completion that pruning took for inert; its gradient "
            "would be lost. Set completion_keep=1.0 and packing='none', "
            "and report this"
        )
    difference = np.abs(settled - choice.advantages.ravel()[mine]).max()
    notices.drift(float(difference), float(np.abs(settled).max()))
    return torch.from_numpy(settled).to(advantages_B.device)


def without(advantages_B: Tensor, dead_N: NDArray[np.bool_], rank: int) -> Tensor:
    """The advantages of a rank, exactly 0 where `dead_N`, which is of all ranks."""
    mine = dead_N[len(advantages_B) * rank : len(advantages_B) * (rank + 1)]
    return advantages_B.masked_fill(torch.tensor(mine, device=advantages_B.device), 0)
