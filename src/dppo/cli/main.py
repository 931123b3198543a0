"""Entry point of the command line `dppo`."""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from dppo.cli.help import command_help
from dppo.errors import DPPOError

COMMANDS = ("plan", "train", "compare", "eval", "audit", "report", "verl")


def main(argv: list[str] | None = None) -> int:
    """Runs `dppo`.

    Args:
        argv: The words after `dppo`; by default those of the process.

    Returns:
        The exit code: 0; 2 for an error of the user's; 130 after an interrupt.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(_version())
        return 0
    if words[0] in COMMANDS:
        try:
            code = _run(words[0], words[1:])
        except Exception:
            if not _among_gloo_peers():
                raise
            traceback.print_exc()
            code = 1
        return _leave(code)
    print(f"dppo: error: no command {words[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _run(name: str, arguments: list[str]) -> int:
    command = import_module(f"dppo.cli.{name}")
    if {"-h", "--help"} & set(arguments) and hasattr(command, "OPTIONS"):
        options, examples = command.OPTIONS, command.EXAMPLES
        print(command_help(name, command.SUMMARY, options=options, examples=examples))
        return 0
    try:
        return command.run(arguments)
    except SystemExit as stop:  # of argparse, which has said why
        return int(stop.code or 0)
    except DPPOError as error:
        print(f"dppo {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dppo {name}: interrupted", file=sys.stderr)
        return 130


def _among_gloo_peers() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_backend() == "gloo"


def _leave(code: int) -> int:
    """The exit code; where several processes talk by gloo, ends this one at once.

    Gloo may wait for its peers for ever while the interpreter ends.
    """
    if not _among_gloo_peers():
        return code
    if code == 0:
        sys.modules["torch"].distributed.barrier()  # nobody is in the middle of an exchange
        time.sleep(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _overview() -> str:
    lines = ["usage: dppo COMMAND [options]", "", "commands:"]
    for name in COMMANDS:
        lines.append(f"  {name:<8}{import_module(f'dppo.cli.{name}').SUMMARY}")
    return "\n".join([*lines, "", "dppo COMMAND --help lists the options of a command."])


def _version() -> str:
    try:
        return f"dppo {version('dppo')}"
    except PackageNotFoundError:
        return "dppo (not installed)"
