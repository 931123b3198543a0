"""Where the time of a step goes. Time inside an inner phase is not counted in the outer one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES: tuple[str, ...] = ("rollout", "score", "train", "prune")


class PhaseClock:
    """Seconds per phase, and which phase is running (readable from another thread)."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.phase = "idle"
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._now = now
        self._since = 0.0
        self._flushed = dict(self.seconds)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Count the time of this block as `phase`."""
        outer = self.phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def enter(self, phase: str) -> None:
        """Count from now on as `phase`."""
        self._switch(phase)

    def since_last(self) -> dict[str, float]:
        """Seconds per phase since the previous call."""
        self._switch(self.phase)
        spent = {name: s - self._flushed[name] for name, s in self.seconds.items()}
        self._flushed = dict(self.seconds)
        return spent

    def _switch(self, phase: str) -> None:
        now = self._now()
        if self.phase != "idle":
            self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
