"""A process that judges completions: a line of JSON in, a line out. Killed where one takes long."""

import json
import logging
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Judge until there is nothing more to judge."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    logging.disable(logging.WARNING)  # math-verify warns of every call without its own time limit
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints must not get among the answers
    from dppo.rewards.verify import judge  # noqa: PLC0415 - its own imports take seconds

    with suppress(Exception):
        judge("x+1", "\\boxed{1+x}")  # imports and caches, before any time is counted
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gold, completion = json.loads(line)
        try:
            answer = {"verdict": judge(gold, completion)}
        except Exception as error:  # of sympy, which has many
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
