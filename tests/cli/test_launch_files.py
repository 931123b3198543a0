"""The files of `configs/accelerate`: what accelerate makes of them, and what `dppo plan` does."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dppo.cli.launch_file import launched_processes
from dppo.cli.main import main
from dppo.errors import ConfigurationError

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "accelerate").glob("*.yaml"))


def commented(path: Path, command: str) -> list[str]:
    """The words of a command in a file's comments."""
    lines = [line[1:] for line in path.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(lines)
    found = re.search(rf"{command}(?:[^\n]|(?<=\\)\n)*", text)
    return shlex.split(found[0].replace("\\\n", " ")) if found else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == launched_processes(path, {})
    assert "--config_file" in commented(path, "accelerate launch")


@pytest.mark.parametrize(
    "path", [p for p in FILES if "cpu" not in p.stem], ids=lambda path: path.stem
)
def test_its_plan_has_the_papers_batch(path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    assert main([*commented(path, "dppo plan")[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["num_processes"] == launched_processes(path, {})
    assert plan["prompts_per_generation"] == 1024
    assert plan["prompts_per_step"] == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_machines: 1", "num_processes must be a positive number"),
        ("num_processes: 9\nnum_machines: 2", "multiple of num_machines"),
        ("num_processes: 2\nuse_cpu: true", "starts one process whatever"),
        (
            "num_processes: 2\ndeepspeed_config:\n  gradient_accumulation_steps: 4",
            "gradient_accumulation_steps of the run is 1",
        ),
    ],
)
def test_what_contradicts_the_run_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        launched_processes(path, {})


def test_processes_are_given_once(capsys) -> None:
    given = ["--num-processes", "2", "--accelerate-config", str(FILES[0])]
    assert main(["plan", "--num-prompts", "64", *given]) == 2
    assert "only one of num_processes" in capsys.readouterr().err


FAILING = """
import os

calls = [0]


def failing(completions, **kwargs):
    calls[0] += 1
    if os.environ.get("RANK") == "1" and calls[0] > 1:
        raise ConnectionError("the judge is down")
    return [float(len(c) % 2) for c in completions]
"""


def test_launched_processes_end_when_one_of_them_fails(tmp_path: Path) -> None:
    """By themselves, with the reason of the one on both, and not by the launcher's patience."""
    pytest.importorskip("accelerate")
    (tmp_path / "failing.py").write_text(FAILING)
    options = {
        "use-cpu": "true",
        "max-steps": "3",
        "eval-prompts": "0",
        "reward": "failing:failing",
        "output-dir": str(tmp_path / "run"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    file = str(CONFIGS / "accelerate" / "ddp-2-cpu.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
    done = subprocess.run(
        [*launcher, "--main_process_port", port, "-m", "dppo.cli", "train", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "dppo train: error: reward function 'failing' failed" in done.stderr
    assert "dppo train: error: rank 1 failed, so all stop: RewardError" in done.stderr
