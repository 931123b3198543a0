"""The platform "cpu" of verl: what it asks of an accelerator, answered by a CPU."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
NOTHING = (
    *("empty_cache", "ipc_collect", "reset_peak_memory_stats"),
    *("manual_seed", "manual_seed_all"),
)
ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ZERO, lambda *args, **kwargs: 0),
    **dict.fromkeys(NOTHING, lambda *args, **kwargs: None),
    "mem_get_info": lambda *args, **kwargs: (1 << 33, 1 << 34),
    "get_device_name": lambda *args, **kwargs: "CPU",  # known to verl's table of FLOP/s
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
}


class _Device(types.ModuleType):
    """Stands in for `torch.cuda`: what `torch.cpu` has, then harmless answers."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in ANSWERS:
            return ANSWERS[name]
        raise AttributeError(name)


_DEVICE = _Device("dppo_cpu_device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """CPU cores under the name of GPUs: Ray's resources are only counted."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        """Always."""
        return True

    def current_device(self) -> str:
        """What tensors are sent to."""
        return "cpu"

    def device_count(self) -> int:
        """One for every process."""
        return 1

    def set_device(self, device_index: Any) -> None:
        """There is one."""

    def synchronize(self, device_index: Any = None) -> None:
        """Nothing runs ahead."""

    def manual_seed(self, seed: int) -> None:
        """Of torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Of torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """None that is known."""
        return None, None

    def communication_backend_name(self) -> str:
        """Of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets it; nobody reads it."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """`ray_kwargs.ray_init.num_gpus` says how many."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """No memory is shared between devices."""
        return False

    def profiler_start(self) -> None:
        """There is none."""

    def profiler_stop(self) -> None:
        """There is none."""

    def cudart(self) -> None:
        """There is none."""

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Not recorded."""
        yield
