"""verl has an environment of its own (`make test-verl`); elsewhere these tests are skipped."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Before verl is imported, and for Ray's processes, which inherit it.
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_USE_EXTERNAL_MODULES="dppo.verl.cpu",
    PYTHONPATH=str(ROOT),
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    GLOO_SOCKET_IFNAME="lo",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DISABLE_DOCKER_CPU_WARNING="1",
)


@pytest.fixture(scope="session", autouse=True)
def _needs_verl() -> None:
    if find_spec("verl") is None:
        pytest.skip("verl is not installed; `make test-verl` installs and tests it")
