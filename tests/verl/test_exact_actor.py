"""E[pruned gradient] = full gradient through verl's own actor: two ranks, FSDP2, packed rows.

Every outcome of Poisson sampling over five rows is enumerated. Gradients are float32 sums over two
ranks, so equality is to 1e-6 of the norm; what a wrong estimator is off by is above 0.1.
"""

import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dppo.tasks import builtin_path

LENGTHS = [4, 9, 3, 7, 1]
PROMPT = 5
PI = [0.3, 0.8, 0.5, 1.0, 0.6]
CLOSE, SEEN = 1e-6, 0.1
MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean")


class Actor:
    """verl's worker group, and a batch."""

    def __init__(self) -> None:
        import ray
        import verl
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )

        from .grad_worker import GradWorker

        folder = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
        with initialize_config_dir(folder, version_base=None):
            config: Any = compose("ppo_trainer", overrides=OVERRIDES)
        OmegaConf.resolve(config)
        self.config = config.actor_rollout_ref
        ray.init(
            num_cpus=8,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
        )
        self.group = RayWorkerGroup(
            resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(GradWorker), config=self.config, role="actor"
            ),
            device_name="cpu",
        )
        self.group.init_model()
        torch.manual_seed(1)
        rows = range(len(LENGTHS))
        self.prompts = [torch.randint(3, 13, (PROMPT,)) for _ in rows]
        self.responses = [torch.randint(3, 13, (length,)) for length in LENGTHS]
        self.advantages = torch.randn(len(LENGTHS))
        self.old = [-2.0 + 0.3 * torch.randn(length) for length in LENGTHS]
        self.ref = [old + 0.3 * torch.randn_like(old) for old in self.old]

    def use(self, mode: str, **changes: Any) -> None:
        """The loss: ours over verl's."""
        from omegaconf import OmegaConf
        from verl.utils.config import omega_conf_to_dataclass

        from dppo.verl.loss import weighted_ppo_loss

        actor = OmegaConf.merge(self.config.actor, {"loss_agg_mode": mode, **changes})
        self.entropy = bool(changes.get("entropy_coeff"))
        self.group.set_loss_fn(partial(weighted_ppo_loss, config=omega_conf_to_dataclass(actor)))

    def gradient(self, rows: list[int], factors: list[float]) -> Tensor:
        """Accumulated on some rows, each with its factor; padded to two ranks."""
        from verl.utils import tensordict_utils as tu

        from dppo.verl.loss import FACTOR, KEPT

        count = max(2, -(-len(rows) // 2) * 2)
        padding = count - len(rows)
        one = torch.ones(1, dtype=torch.long)

        def nested(values: list[Tensor], pad: Tensor) -> Tensor:
            return torch.nested.as_nested_tensor(values + [pad] * padding, layout=torch.jagged)

        def per_token(values: list[float]) -> Tensor:
            each = [torch.full((LENGTHS[i],), v) for i, v in zip(rows, values, strict=True)]
            return nested(each, torch.zeros(1))

        whole = [torch.cat([self.prompts[i], self.responses[i]]) for i in rows]
        mask = nested([torch.ones(LENGTHS[i], dtype=torch.long) for i in rows], 0 * one)
        data = tu.get_tensordict(
            {
                "prompts": nested([self.prompts[i] for i in rows], one),
                "responses": nested([self.responses[i] for i in rows], one),
                "input_ids": nested(whole, torch.cat([one, one])),
                "position_ids": nested([torch.arange(len(w)) for w in whole], torch.arange(2)),
                "response_mask": mask,
                "loss_mask": mask,
                "old_log_probs": nested([self.old[i] for i in rows], torch.zeros(1)),
                "ref_log_prob": nested([self.ref[i] for i in rows], torch.zeros(1)),
                "advantages": per_token([float(self.advantages[i]) for i in rows]),
                FACTOR: per_token(factors),
                KEPT: per_token([float(len(rows))] * len(rows)),
            }
        )
        tu.assign_non_tensor(
            data,
            temperature=1.0,
            calculate_entropy=self.entropy,
            compute_loss=True,
            global_batch_size=count,
            mini_batch_size=count,
        )
        return self.group.gradient(data)["gradient"][0]


OVERRIDES = f"""
algorithm.adv_estimator=grpo actor_rollout_ref.model.path={builtin_path()}
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.5
actor_rollout_ref.actor.loss_scale_factor=16
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.actor.optim.total_training_steps=10
actor_rollout_ref.rollout.name=hf_cpu actor_rollout_ref.rollout.n=1
""".split()


@pytest.fixture(scope="module")
def actor() -> Iterator[Actor]:
    import ray

    yield Actor()
    ray.shutdown()


def outcomes() -> Iterator[tuple[float, list[int]]]:
    for kept in itertools.product([False, True], repeat=len(PI)):
        probability = 1.0
        for flag, pi in zip(kept, PI, strict=True):
            probability *= pi if flag else 1 - pi
        if probability > 0:
            yield probability, [row for row, flag in enumerate(kept) if flag]


def off(estimate: Any, truth: Tensor) -> float:
    return float((estimate - truth).norm() / truth.norm())


@pytest.mark.parametrize("terms", [{}, {"entropy_coeff": 0.1}], ids=["kl", "kl and entropy"])
@pytest.mark.parametrize("mode", MODES)
def test_the_expected_gradient_is_the_full_batchs(
    actor: Actor, mode: str, terms: dict[str, float]
) -> None:
    actor.use(mode, **terms)
    rows = list(range(len(PI)))
    size = float(sum(LENGTHS) if mode == "token-mean" else len(PI))
    full = actor.gradient(rows, [1 / size] * len(rows))
    expected: Any = 0
    for probability, kept in outcomes():
        expected = expected + probability * actor.gradient(kept, [1 / PI[i] / size for i in kept])
    assert off(expected, full) < CLOSE


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
def test_controls_are_seen(actor: Actor, mode: str) -> None:
    """Divided by what was kept, or without weights."""
    actor.use(mode)
    tokens = mode == "token-mean"
    rows = list(range(len(PI)))
    size = float(sum(LENGTHS) if tokens else len(PI))
    full = actor.gradient(rows, [1 / size] * len(rows))
    by_kept: Any = 0
    unweighted: Any = 0
    for probability, kept in outcomes():
        left = max(float(sum(LENGTHS[i] for i in kept) if tokens else len(kept)), 1.0)
        of_kept = [1 / PI[i] / left for i in kept]
        by_kept = by_kept + probability * actor.gradient(kept, of_kept)
        unweighted = unweighted + probability * actor.gradient(kept, [1 / size] * len(kept))
    assert off(by_kept, full) > SEEN
    assert off(unweighted, full) > SEEN


def test_without_pruning_it_is_verls_own_gradient(actor: Actor) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    rows = list(range(len(PI) - 1))  # as many as two ranks take without padding
    for mode in MODES:
        actor.use(mode)
        tokens = float(sum(LENGTHS[i] for i in rows))
        ours = actor.gradient(rows, [1 / (tokens if mode == "token-mean" else len(rows))] * 4)
        config = OmegaConf.merge(actor.config.actor, {"loss_agg_mode": mode})
        actor.group.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config)))
        assert off(ours, actor.gradient(rows, [0.0] * 4)) < CLOSE, mode
