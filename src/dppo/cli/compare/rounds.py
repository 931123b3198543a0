"""Lets the methods take turns, one optimizer step each, so that a noisy machine hits all alike.

One process for each method; one of them runs at a time. A seed is a round: all methods begin it and
end it together. A method that fails in a round is left out of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Job = dict[str, Any]


class Worker:
    """The process of a method."""

    def __init__(self, log: Path, command: Sequence[str]) -> None:
        self._log, self._command = log, list(command)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Returns:
            The answer; the event "failed" if the process ended instead.
        """
        process = self._running()
        try:
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = process.wait()  # it has closed its side
        self.stop()
        return {"event": "failed", "error": f"its process ended with {code}; see {self._log}"}

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes its pipes, and waits
                process.kill()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                )
        return self._process


class Workers:
    """One process for each method, ended with the block."""

    def __init__(
        self, names: Sequence[str], folder: Path, command: Sequence[str] | None = None
    ) -> None:
        command = command or [sys.executable, "-m", "dppo.cli.compare.worker"]
        self._workers = {name: Worker(folder / name / "log.txt", command) for name in names}

    def __enter__(self) -> Workers:
        """The processes start when they are asked."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """All end."""
        for worker in self._workers.values():
            worker.stop()

    def run_round(self, jobs: dict[str, Job], *, advance: Callable[[str], None]) -> dict[str, str]:
        """Carry out one job of each method, in turns.

        Args:
            jobs: By method.
            advance: Called with the method after each of its steps.

        Returns:
            What went wrong, by method; its error is also in error.txt of the job's folder.
        """
        failed: dict[str, str] = {}
        messages: dict[str, dict[str, Any]] = dict(jobs)
        while messages:
            for name in list(messages):
                answer = self._workers[name].ask(messages[name])
                if answer["event"] == "step":
                    if answer["step"]:
                        advance(name)
                    messages[name] = {}
                    continue
                del messages[name]
                if answer["event"] == "failed":
                    failed[name] = answer["error"]
                    folder = Path(jobs[name]["folder"])
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / "error.txt").write_text(answer["error"], encoding="utf-8")
                else:
                    advance(name)
        return failed
