"""Processes that judge: reused, killed, started again, and what is said where they fail."""

import sys
import time

import pytest

from dppo.errors import RewardError
from dppo.rewards.pool import TIMEOUT, JudgeError, Pool

FAKE = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    gold, text = json.loads(line)
    if text == "sleep": time.sleep(60)
    if text == "die": sys.exit(3)
    if text == "raise":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
        continue
    print(json.dumps({"verdict": f"{text} {os.getpid()}"}), flush=True)
"""


def pool_of(workers, **options):
    command = [sys.executable, "-c", FAKE]
    return Pool(workers=workers, **{"time_limit": 1.0, "command": command, **options})


def test_processes_are_reused_and_answers_keep_their_order():
    pool = pool_of(2)
    answers = pool.judge([("", str(i)) for i in range(40)])
    assert [a.split()[0] for a in answers] == [str(i) for i in range(40)]
    processes = {a.split()[1] for a in answers}
    assert len(processes) <= 2
    assert {a.split()[1] for a in pool.judge([("", "x")] * 8)} <= processes
    pool.close()
    assert not {a.split()[1] for a in pool.judge([("", "x")] * 8)} & processes


def test_one_that_takes_long_is_killed_alone():
    pool, began = pool_of(2), time.monotonic()
    answers = pool.judge([("", "a"), ("", "sleep"), ("", "b"), ("", "sleep"), ("", "c")])
    assert [a.split()[0] for a in answers] == ["a", TIMEOUT, "b", TIMEOUT, "c"]
    assert time.monotonic() - began < 10
    pool.close()


@pytest.mark.parametrize(("text", "why"), [("die", "ended with 3"), ("raise", "ValueError: no")])
def test_one_that_fails_twice_is_named(text, why):
    pool = pool_of(1)
    with pytest.raises(JudgeError, match=rf"{why}.*gold 'g'.*{text}"):
        pool.judge([("g", text)])
    assert pool.judge([("", "fine")])[0].startswith("fine")  # and the pool goes on
    pool.close()


def test_a_process_that_does_not_start():
    pool = pool_of(1, command=[sys.executable, "-c", "print('no')"])
    with pytest.raises(RewardError, match="did not start"):
        pool.judge([("", "x")])
