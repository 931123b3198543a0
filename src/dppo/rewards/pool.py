"""Processes that judge completions, each item within a time limit that kills.

Not `multiprocessing`: its spawned processes run the user's script once more, and forked ones
inherit locks of torch's threads. No signals, so it works from any thread and from asyncio.
"""

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dppo.errors import RewardError

__all__ = ["TIMEOUT", "JudgeError", "Pool"]

TIMEOUT = "timeout"
START_LIMIT = 120.0
"""Seconds until a process is ready; importing sympy takes some."""

Item = tuple[str, str]


class JudgeError(RewardError):
    """A judging process failed on an item, twice."""


class Pool:
    """Judges items, several at once; processes start when they are first needed and are reused.

    Args:
        workers: Processes; None: one for each core, at most 4.
        time_limit: Seconds for one item.
        command: Of a process.
    """

    def __init__(
        self, *, workers: int | None, time_limit: float, command: Sequence[str] | None = None
    ) -> None:
        self.workers = workers or min(os.cpu_count() or 1, 4)
        self.time_limit = time_limit
        self._command = list(command or (sys.executable, "-m", "dppo.rewards.worker"))
        self._lock, self._owner = threading.Lock(), 0
        self._idle: queue.SimpleQueue[_Judge] = queue.SimpleQueue()
        self._all: list[_Judge] = []
        atexit.register(self.close)

    def judge(self, items: Sequence[Item]) -> list[str]:
        """Verdicts of pairs (gold, completion), in order; `TIMEOUT` for one that took too long.

        Raises:
            JudgeError: A process died or failed on an item, and again when it was tried once more.
        """
        self._fill()
        with ThreadPoolExecutor(max_workers=self.workers) as threads:
            return list(threads.map(self._judge_one, items))

    def close(self) -> None:
        """End the processes; they start again when needed."""
        if self._owner == os.getpid():
            for judge in self._all:
                judge.stop()

    def _fill(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                return
            # Also after a fork: pipes of another process must not be used.
            self._owner, self._idle = os.getpid(), queue.SimpleQueue()
            self._all = [_Judge(self._command) for _ in range(self.workers)]
            for judge in self._all:
                self._idle.put(judge)

    def _judge_one(self, item: Item) -> str:
        judge = self._idle.get()
        try:
            for last in (False, True):
                answer = judge.ask(item, limit=self.time_limit)
                if "verdict" in answer:
                    return answer["verdict"]
                if last:
                    gold, completion = item
                    raise JudgeError(
                        f"judging failed ({answer['error']}) on gold {gold!r:.80}, completion "
                        f"{completion[-200:]!r}"
                    )
            raise AssertionError  # one of the two has returned or raised
        finally:
            self._idle.put(judge)


class _Judge:
    """One process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, item: Item, *, limit: float) -> dict[str, Any]:
        process = self._started()
        late = threading.Event()
        timer = threading.Timer(limit, lambda: (late.set(), process.kill()))
        try:
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            process.stdin.write(json.dumps(item) + "\n")
            process.stdin.flush()
            timer.start()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        self.stop()
        if late.is_set():
            return {"verdict": TIMEOUT}
        return {"error": f"the process ended with {process.returncode}"}

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes, and waits
                pass

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        # The package may have been found by a path that only this process knows.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        timer = threading.Timer(START_LIMIT, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() == "ready":
                return process
        finally:
            timer.cancel()
        self.stop()
        raise JudgeError(
            f"a judging process did not start ({' '.join(self._command)}); what it said is above"
        )
