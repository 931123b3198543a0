"""What verl 0.9.1 needs on a machine without an accelerator, beyond its registries."""

from typing import Any


def apply() -> None:
    """Register engine and rollout for the CPU, and patch two lines that take one for granted."""
    _gloo_once()
    _no_pinned_memory()
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if "cpu" not in EngineRegistry._engines["language_model"]["fsdp2"]:
        register = EngineRegistry.register(
            model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu"
        )
        register(FSDPEngineWithLMHead)
    _ROLLOUT_REGISTRY["hf_cpu", "async"] = "dppo.verl.cpu.rollout.ServerAdapter"
    RolloutReplicaRegistry.register("hf_cpu", _replica)


def _replica() -> Any:
    from dppo.verl.cpu.rollout import Replica

    return Replica


def _gloo_once() -> None:
    """Verl asks torch for "cpu:gloo,cpu:gloo", which names a device type twice."""
    from verl.utils import distributed

    start = distributed.initialize_global_process_group_ray

    def started(timeout_second: Any = None, backend: Any = None) -> Any:
        return start(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = started


def _no_pinned_memory() -> None:
    """The reference model is offloaded to pinned memory, which only an accelerator has."""
    from verl.workers.engine.fsdp import transformer_impl

    policy = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)
