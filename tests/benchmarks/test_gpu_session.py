"""The script for a GPU, at toy size on a CPU: that it runs to its end and writes its numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def test_the_gpu_script_at_toy_size(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path), "toy"],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    parity = json.loads((tmp_path / "gpu_parity.json").read_text())["found"]
    assert {item["attention"] for item in parity} == {"sdpa", "eager"}
    for item in parity:
        assert item["packed"], item
        # One step of SGD in float32: the gradients differ by rounding alone.
        assert item["update_difference"] < 1e-4, item
    rows = json.loads((tmp_path / "gpu_step.json").read_text())["rows"]
    assert list(rows) == ["grpo", "packing", "keep-50", "keep-25"]
    assert all(row["step_seconds"] > 0 for row in rows.values())
    assert rows["keep-25"]["over_bound"] > 0
