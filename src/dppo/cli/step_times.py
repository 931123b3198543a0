"""How long optimizer steps take, without what is between them: evaluations, saving, logging."""

from __future__ import annotations

import time


class StepTimes:
    """Wall and CPU seconds inside optimizer steps."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """A step begins."""
        self._started = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        """It is over."""
        self.wall += time.perf_counter() - self._started[0]
        self.cpu += time.process_time() - self._started[1]

    def take(self) -> tuple[float, float]:
        """Since the last call."""
        spent, self.wall, self.cpu = (self.wall, self.cpu), 0.0, 0.0
        return spent

    def record(self) -> dict[str, float]:
        """The same, as it is written to metrics.jsonl."""
        wall, cpu = self.take()
        return {"step_seconds": wall, "step_cpu_seconds": cpu}
