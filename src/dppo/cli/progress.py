"""Progress that also works without a terminal: phase, step, reward, time left, and a heartbeat.

A thread looks at the state at a fixed pace, so that a long rollout is visible while it lasts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_RECENT = 20


class TimeLeft:
    """Seconds left, from a moving average of recent steps.

    Between two calls the estimate never grows by more than the slowest recent step, so that one
    slow step does not throw it; and the first step, which warms things up, counts only while it
    is the only one.
    """

    def __init__(self, *, total: int, done: int, now: float):
        self._total, self._done, self._since = total, done, now
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._first_is_in = False
        self._at_step: float | None = None

    def advance(self, done: int, now: float) -> None:
        """Records a step.

        Args:
            done: How many steps are done.
            now: The time.
        """
        steps = done - self._done
        if steps <= 0:
            return
        if self._first_is_in:
            self._durations.clear()
        self._first_is_in = not self._durations and self._at_step is None
        before = self.seconds(now)
        self._durations.append((now - self._since) / steps)
        self._done, self._since = done, now
        estimate = (self._total - done) * sum(self._durations) / len(self._durations)
        limit = float("inf") if before is None else before + max(self._durations)
        self._at_step = min(estimate, limit)

    def seconds(self, now: float) -> float | None:
        """The estimate.

        Args:
            now: The time.

        Returns:
            Seconds left; None before the first step is done.
        """
        if self._at_step is None:
            return None
        return max(0.0, self._at_step - (now - self._since))


class ProgressReporter:
    """Prints where a run is; a context manager whose thread ends with the block.

    On a terminal one line is rewritten. Elsewhere a line is printed for the first and the last
    step and, when there is news, every `interval` seconds; after `quiet` seconds without news a
    heartbeat line names the phase.
    """

    def __init__(
        self,
        *,
        phase: Callable[[], str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = 10.0,
        quiet: float = 30.0,
        poll: float = 0.5,
        enabled: bool = True,
    ):
        """Prepares a reporter.

        Args:
            phase: What the run is doing now; called from the thread.
            stream: Where to print; standard output by default.
            clock: Seconds, never going back.
            interval: Seconds between two lines.
            quiet: Seconds without news until a heartbeat, and between two.
            poll: Seconds between two looks of the thread.
            enabled: Whether to print at all; one process of several does.
        """
        self._run_phase, self._clock, self._enabled = phase, clock, enabled
        self._stream = sys.stdout if stream is None else stream
        self._interval, self._quiet, self._poll = interval, quiet, poll
        self._terminal = self._stream.isatty()
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._stage: str | None = None
        self._stage_phase: str | None = None
        self._width = 0

    def __enter__(self) -> ProgressReporter:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._watch, name="dppo-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the thread and ends an open line."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.finish_stage()

    def start_stage(
        self, name: str, *, total: int, done: int = 0, phase: str | None = None
    ) -> None:
        """Begins a stage, such as the training.

        Args:
            name: Of one of its steps.
            total: How many steps there are.
            done: How many are already done.
            phase: Shown in place of the run's own phase.
        """
        with self._lock:
            self.finish_stage()
            now = self._clock()
            self._stage, self._stage_phase = name, phase
            self._total, self._done = total, done
            self._time_left = TimeLeft(total=total, done=done, now=now)
            self._reward: float | None = None
            self._first, self._due = done + 1, False
            self._printed_at = self._heartbeat_at = self._news_at = now
            self._seen: tuple[str, int] = (self._phase(), done)
            self._printed = self._seen

    def advance(self, done: int) -> None:
        """Records a step.

        Args:
            done: How many steps of the stage are done.
        """
        with self._lock:
            if self._stage is None:
                return
            self._time_left.advance(done, self._clock())
            self._due = self._due or self._done < self._first <= done or done >= self._total
            self._done = done

    def show_reward(self, reward: float) -> None:
        """Sets the reward to show."""
        with self._lock:
            self._reward = reward

    def finish_stage(self) -> None:
        """Prints what is still due and ends the stage."""
        with self._lock:
            if self._stage is None:
                return
            if self._due or (self._terminal and self._width):
                self._print(self._clock())
            if self._terminal and self._width:
                self._stream.write("\n")
                self._stream.flush()
            self._stage, self._width = None, 0

    def tick(self) -> None:
        """Prints what is due now; the thread's work."""
        with self._lock:
            if self._stage is None:
                return
            now, state = self._clock(), (self._phase(), self._done)
            if state != self._seen:
                self._seen, self._news_at, self._heartbeat_at = state, now, now
            news = state != self._printed and now - self._printed_at >= self._interval
            if self._terminal or self._due or news:
                self._print(now)
            elif now - self._heartbeat_at >= self._quiet:
                self._heartbeat_at = now
                self._print(now, f" | no news for {now - self._news_at:.0f} s")

    def _phase(self) -> str:
        return self._stage_phase or self._run_phase()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll):
            self.tick()

    def _print(self, now: float, suffix: str = "") -> None:
        if not self._enabled:
            return
        line = self._line(now) + suffix
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._printed, self._printed_at, self._due = (self._phase(), self._done), now, False

    def _line(self, now: float) -> str:
        phase = self._phase()
        between = self._due and phase == "idle"  # a step has just ended
        parts = [
            f"{self._stage} {self._done}/{self._total}",
            "step done" if between else f"phase {phase}",
        ]
        if self._reward is not None:
            parts.append(f"reward {self._reward:.3f}")
        left = self._time_left.seconds(now)
        if left is not None:
            parts.append(f"ETA {duration(left)}")
        return " | ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a reader says them.

    Example:
        >>> duration(42), duration(200), duration(7260)
        ('42 s', '3 min 20 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
