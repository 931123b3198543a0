"""The host's advantages, settled with the decision that was made before the host computed them."""

import torch
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
    start = len(advantages_B) * rank
    mine = slice(start, start + len(advantages_B))
    choice, device = decision.choices[0], advantages_B.device
    settled = advantages_B.masked_fill(torch.tensor(decision.dead_N[mine], device=device), 0)
    inert = ~choice.live.ravel()[mine] & (decision.rows.loss_tokens[mine] > 0)
    if (settled[torch.tensor(inert, device=device)] != 0).any():
        raise HostDriftError(
            "the host gave an advantage to a completion that pruning took for inert; its gradient "
            "would be lost. Set completion_keep=1.0 and report this"
        )
    assumed = torch.tensor(choice.advantages.ravel()[mine]).to(settled)
    notices.drift((settled - assumed).abs().max().item(), settled.abs().max().item())
    return settled
