"""E[pruned gradient] = full gradient for every policy loss of verl that is taken, in every mode.

verl's own `ppo_loss` on one rank in float64: all outcomes of Poisson sampling over four rows, so
equality is to 1e-10 of the norm; verl's constants (1e-8 beside a token count) are the same on both
sides. What a wrong estimator is off by is above 0.1.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dppo.errors import UnsupportedLossError
from dppo.verl.options import PruneOptions
from dppo.verl.refusals import LOSS_AGG_MODES, LOSS_MODES, check_config

PROMPT, LENGTHS = 2, [4, 9, 3, 7]
PI = [0.3, 0.8, 0.5, 0.6]
EXACT, SEEN = 1e-10, 0.1


@pytest.fixture(scope="module")
def stock() -> Any:
    """verl's whole configuration."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(folder, version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf_cpu"),
                *("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.n=4"),
                *("actor_rollout_ref.actor.use_dynamic_bsz=True", "data.train_batch_size=256"),
            ],
        )


class Rows:
    """A batch, and the gradient of a loss with respect to its log-probs and entropies."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def values(length: int, mean: float) -> Tensor:
            return mean + 0.3 * torch.randn(length, generator=draw, dtype=torch.float64)

        self.log_probs = [values(PROMPT + length, -2.0) for length in LENGTHS]
        self.entropy = [values(PROMPT + length, 1.0) for length in LENGTHS]
        self.old = [values(length, -2.0) for length in LENGTHS]
        self.ref = [values(length, -2.0) for length in LENGTHS]
        self.advantages = torch.tensor([1.2, -0.7, 0.4, -0.9], dtype=torch.float64)

    def gradient(
        self, loss: Callable[..., Any], config: Any, rows: list[int], factor: list[float]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Of some rows and one of padding; with the metrics."""
        from verl.utils import tensordict_utils as tu

        from dppo.verl.loss import FACTOR, KEPT

        zero = torch.zeros(1, dtype=torch.float64)
        count = torch.ones(1, dtype=torch.long)

        def nested(of_row: Callable[[int], Tensor], padding: Tensor) -> Tensor:
            each = [of_row(row) for row in rows] + [padding]
            return torch.nested.as_nested_tensor(each, layout=torch.jagged)

        def constant(value: float, row: int) -> Tensor:
            return torch.full((LENGTHS[row],), value, dtype=torch.float64)

        weight = dict(zip(rows, factor, strict=True))
        two = torch.ones(2, dtype=torch.long)
        data = tu.get_tensordict(
            {
                "prompts": nested(lambda i: two, count),
                "responses": nested(lambda i: torch.ones(LENGTHS[i], dtype=torch.long), count),
                "input_ids": nested(
                    lambda i: torch.ones(PROMPT + LENGTHS[i], dtype=torch.long), two
                ),
                "response_mask": nested(
                    lambda i: torch.ones(LENGTHS[i], dtype=torch.long), 0 * count
                ),
                "old_log_probs": nested(lambda i: self.old[i], zero),
                "ref_log_prob": nested(lambda i: self.ref[i], zero),
                "advantages": nested(lambda i: constant(float(self.advantages[i]), i), zero),
                FACTOR: nested(lambda i: constant(weight[i], i), zero),
                KEPT: nested(lambda i: constant(len(rows), i), zero + len(rows)),
            }
        )
        padded = len(rows) + (loss.__name__ != "ppo_loss")
        tokens = float(sum(LENGTHS[row] for row in rows))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=padded)
        output, leaves = {}, []
        for name, of_rows in (("log_probs", self.log_probs), ("entropy", self.entropy)):
            each = [of_rows[row] for row in rows] + [torch.zeros(2, dtype=torch.float64)]
            leaf = torch.cat(each).requires_grad_()
            offsets = torch.tensor([0, *itertools.accumulate(len(row) for row in each)])
            output[name] = torch.nested.nested_tensor_from_jagged(leaf, offsets)
            leaves.append((leaf, offsets))
        value, metrics = loss(config, output, data)
        value.backward()
        found = torch.zeros(len(leaves), len(LENGTHS), PROMPT + max(LENGTHS), dtype=torch.float64)
        for kind, (leaf, offsets) in enumerate(leaves):
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for place, row in enumerate(rows):
                here = gradient[offsets[place] : offsets[place + 1]]
                found[kind, row, : here.numel()] = here
        return found, metrics


def actor(stock: Any, loss_mode: str, mode: str, **terms: Any) -> Any:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    scale = 16 if mode == "seq-mean-token-sum-norm" else None
    policy = {"loss_mode": loss_mode, "dro_beta": 0.1}
    changes = {"loss_agg_mode": mode, "policy_loss": policy, **terms}
    config = OmegaConf.merge(
        stock.actor_rollout_ref.actor, changes, {"loss_scale_factor": scale, "use_torch_compile": 0}
    )
    return omega_conf_to_dataclass(config)


def outcomes() -> Iterator[tuple[float, list[int]]]:
    for kept in itertools.product([False, True], repeat=len(PI)):
        probability = 1.0
        for flag, pi in zip(kept, PI, strict=True):
            probability *= pi if flag else 1 - pi
        yield probability, [row for row, flag in enumerate(kept) if flag]


def off(stock: Any, loss_mode: str, mode: str, weighted: bool = True, **terms: Any) -> float:
    """Of the expectation from the full batch's gradient, relative."""
    from verl.workers.utils.losses import ppo_loss

    from dppo.verl.loss import weighted_ppo_loss

    rows, config = Rows(), actor(stock, loss_mode, mode, **terms)
    every = list(range(len(PI)))
    full, _ = rows.gradient(ppo_loss, config, every, [0.0] * len(PI))
    size = float(sum(LENGTHS) if mode == "token-mean" else len(PI))
    expected: Any = 0
    for probability, kept in outcomes():
        factor = [(1 / PI[row] if weighted else 1.0) / size for row in kept]
        expected = (
            expected + probability * rows.gradient(weighted_ppo_loss, config, kept, factor)[0]
        )
    return float((expected - full).norm() / full.norm())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_every_loss_is_exact_or_refused(stock: Any, loss_mode: str, mode: str) -> None:
    from omegaconf import OmegaConf

    terms = {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.1}
    changes = {"loss_agg_mode": mode, "policy_loss": {"loss_mode": loss_mode}}
    changes |= {"loss_scale_factor": 16}
    whole = OmegaConf.merge(stock, {"actor_rollout_ref": {"actor": changes}})
    if (loss_mode, mode) == ("sapo", "token-mean"):
        with pytest.raises(UnsupportedLossError, match="divided by rows whatever"):
            check_config(whole, PruneOptions())
        assert off(stock, loss_mode, mode, **terms) > SEEN
        return
    check_config(whole, PruneOptions())
    assert off(stock, loss_mode, mode, **terms) < EXACT
    assert off(stock, loss_mode, mode, weighted=False, **terms) > SEEN


def test_what_verl_logs_is_a_mean_over_survivors(stock: Any) -> None:
    """Whatever the padding: the loss of one survivor is its own."""
    from verl.workers.utils.losses import ppo_loss

    from dppo.verl.loss import weighted_ppo_loss

    rows, config = Rows(), actor(stock, "vanilla", "seq-mean-token-mean")
    _, ours = rows.gradient(weighted_ppo_loss, config, [1], [1 / 0.8 / 4])
    _, alone = rows.gradient(ppo_loss, config, [1], [0.0])
    assert float(ours["actor/pg_loss"].values[0]) == pytest.approx(
        float(alone["actor/pg_loss"].values[0]), rel=1e-12
    )
