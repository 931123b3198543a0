import io
import threading
import time

import pytest

from dppo.cli.progress import ProgressReporter, TimeLeft, duration


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make(stream=None, **options):
    clock, phase, stream = Clock(), ["rollout"], stream or io.StringIO()
    reporter = ProgressReporter(phase=lambda: phase[0], stream=stream, clock=clock, **options)
    return reporter, clock, phase, stream


def wait(reporter, clock, seconds):
    """Lets the time pass with the thread's looks in between, one a second."""
    for _ in range(seconds):
        clock.now += 1
        reporter.tick()


def test_plain_lines_at_a_fixed_interval_with_first_and_last_step():
    reporter, clock, phase, stream = make()
    reporter.start_stage("step", total=6)
    times = []
    for step in range(1, 7):  # 6 steps of 5 s: 4 s of rollout, 1 s of training
        phase[0] = "rollout"
        wait(reporter, clock, 4)
        phase[0] = "train"
        wait(reporter, clock, 1)
        reporter.advance(step)
        reporter.show_reward(step / 10)
        before = stream.getvalue().count("\n")
        reporter.tick()
        times += [clock.now] * (stream.getvalue().count("\n") - before)
    reporter.finish_stage()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/6 | phase train | reward 0.100 | ETA 25 s"
    assert lines[-1] == "step 6/6 | phase train | reward 0.600 | ETA 0 s"
    assert len(lines) == 4  # the first step at 5 s, every 10 s after it, the last step at 30 s
    assert "\r" not in stream.getvalue()


def test_heartbeat_names_the_phase_while_blocked():
    reporter, clock, _phase, stream = make()
    reporter.start_stage("step", total=3)
    wait(reporter, clock, 65)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 0/3 | phase rollout | no news for 30 s",
        "step 0/3 | phase rollout | no news for 60 s",
    ]


def test_news_resets_the_heartbeat():
    reporter, clock, phase, stream = make()
    reporter.start_stage("step", total=3)
    wait(reporter, clock, 25)
    phase[0] = "train"
    wait(reporter, clock, 25)
    assert "no news" not in stream.getvalue()
    assert stream.getvalue().splitlines() == ["step 0/3 | phase train"]


def test_terminal_rewrites_one_line():
    reporter, clock, _phase, stream = make(Terminal())
    reporter.start_stage("step", total=2)
    wait(reporter, clock, 3)
    reporter.advance(1)
    reporter.advance(2)
    reporter.finish_stage()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.count("\r") >= 3


def test_stage_may_name_its_own_phase():
    reporter, clock, _phase, stream = make()
    reporter.start_stage("held-out prompt", total=512, phase="evaluate")
    wait(reporter, clock, 2)
    reporter.advance(64)
    reporter.tick()
    assert stream.getvalue() == "held-out prompt 64/512 | phase evaluate | ETA 14 s\n"


def test_between_two_steps_the_line_says_done():
    reporter, _clock, phase, stream = make()
    reporter.start_stage("step", total=2)
    phase[0] = "idle"
    reporter.advance(1)
    reporter.tick()
    assert stream.getvalue() == "step 1/2 | step done | ETA 0 s\n"


def test_disabled_prints_nothing():
    reporter, clock, _phase, stream = make(enabled=False)
    with reporter:
        reporter.start_stage("step", total=1)
        wait(reporter, clock, 40)
        reporter.advance(1)
    assert stream.getvalue() == ""


def test_thread_prints_and_stops_also_on_an_error():
    stream = io.StringIO()
    reporter = ProgressReporter(phase=lambda: "rollout", stream=stream, quiet=0.02, poll=0.005)

    def fail():
        with reporter:
            reporter.start_stage("step", total=1)
            time.sleep(0.2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "no news" in stream.getvalue()
    assert "dppo-progress" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "durations",
    [
        [5, 1, 2, 5, 1, 4, 3, 5],
        [60, 5, 5, 5, 5, 5],
        [1, 1, 1, 60, 1, 1, 1, 90, 1, 1],
        [1, 2, 4, 8, 16, 32, 64],
    ],
)
def test_time_left_never_grows_by_more_than_the_slowest_recent_step(durations):
    left, now = TimeLeft(total=100, done=0, now=0.0), 0.0
    assert left.seconds(now) is None
    shown = None
    for step, seconds in enumerate(durations, start=1):
        for _ in range(seconds):
            now += 1
            ticking = left.seconds(now)
            if shown is not None:
                assert ticking <= shown
                shown = ticking
        left.advance(step, now)
        after = left.seconds(now)
        slowest = max(durations[max(0, step - 20) : step])
        if shown is not None:
            assert after <= shown + slowest
        shown = after


def test_first_step_is_not_representative():
    left = TimeLeft(total=10, done=0, now=0.0)
    left.advance(1, 60.0)
    assert left.seconds(60.0) == 540
    left.advance(2, 61.0)
    assert left.seconds(61.0) == 8


def test_time_left_after_a_resume():
    left = TimeLeft(total=10, done=5, now=0.0)
    left.advance(6, 3.0)
    assert left.seconds(3.0) == 12


def test_duration():
    assert [duration(s) for s in (0.4, 59, 61, 3600)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 00 min",
    ]
