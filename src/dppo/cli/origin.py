"""Of what code and machine numbers are."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from dppo.cli.summary import package_versions

NAMES = ("commit", "machine", "versions")


def origin() -> dict[str, Any]:
    """Commit of the checkout that the package runs from, if it does; machine; versions."""
    return {"commit": _commit(), "machine": _machine(), "versions": package_versions()}


def _machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return {"processor": name, "cores": os.cpu_count(), "system": platform.system()}


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return found.stdout.strip() or None
