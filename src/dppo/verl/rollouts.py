"""What a step rolled out, read from verl's TransferQueue before anything is left out.

Suffixes: `_B` rows as they came, `_PG` prompts x group.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from dppo.estimator.advantages import constant_groups
from dppo.estimator.sizes import surprisal_norm
from dppo.types import Selection
from dppo.verl.plan import Rollouts


@dataclass(frozen=True)
class Submitted:
    """The prompts of a step that are rolled out."""

    uids: list[str]
    """verl's, of this step."""
    ids: NDArray[np.int64]
    """The same at every visit; empty where all candidates are rolled out."""
    window: Selection | None
    """Over the candidates that they were drawn from."""


def read(
    batch: KVBatchMeta, place_B: NDArray[np.int64], submitted: Submitted, *, config: Any
) -> Rollouts:
    """Scores, advantages as verl computes them, and sizes; 0 or NaN where a rollout failed.

    Args:
        batch: All rows of the step.
        place_B: As `rows.places` gives it.
        submitted: Their prompts.
        config: verl's.
    """
    fields = ["response_mask", "rm_scores"]
    log_probs = bool(config.actor_rollout_ref.rollout.calculate_log_probs)
    if log_probs:
        fields.append("rollout_log_probs")
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    padded = data.to_padded_tensor()
    mask_BT = padded["response_mask"].bool()
    shape = (len(submitted.uids), config.actor_rollout_ref.rollout.n)

    def spread(values_B: Any, empty: float) -> NDArray[Any]:
        values = np.asarray(values_B)
        table = np.full(shape[0] * shape[1], empty, dtype=values.dtype)
        table[place_B] = values
        return table.reshape(shape)

    scores_B = padded["rm_scores"].sum(-1).float().numpy()
    scores_PG = spread(scores_B, np.nan)
    advantages_PG = spread(_advantages(padded, mask_BT, batch.keys, config), 0.0)
    # Float dust is no signal. A completion that is alone in its group is trained on by verl.
    several = (~np.isnan(scores_PG)).sum(axis=1) > 1
    advantages_PG[constant_groups(scores_PG) & several] = 0.0
    surprisal = None
    if log_probs:
        per = (
            "sequence"
            if config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
            else "token"
        )
        known = padded["rollout_log_probs"].double().numpy()
        surprisal = spread(surprisal_norm(known, mask_BT.numpy(), per=per), 0.0)
    return Rollouts(
        scores=scores_PG.astype(np.float64),
        advantages=advantages_PG.astype(np.float64),
        prompt_tokens=spread([int(tag["prompt_len"]) for tag in batch.tags], 0),
        response_tokens=spread([int(tag["response_len"]) for tag in batch.tags], 0),
        loss_tokens=spread(mask_BT.sum(-1).numpy(), 0),
        surprisal=surprisal,
        window=submitted.window,
    )


def _advantages(
    padded: TensorDict, mask_BT: Tensor, keys: list[str], config: Any
) -> NDArray[np.float32]:
    """Shape (B,). Of all rows, frozen before any is left out."""
    tensors = {"response_mask": padded["response_mask"], "token_level_rewards": padded["rm_scores"]}
    data = DataProto(batch=TensorDict(tensors, batch_size=len(keys)))
    uids = [key.rsplit("_", 2)[0] for key in keys]
    data.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    algorithm = config.algorithm
    found = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    ).batch["advantages"]
    first = mask_BT.int().argmax(dim=1)
    return found[torch.arange(len(keys)), first].float().numpy()
