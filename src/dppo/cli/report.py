"""`dppo report`: one page about runs, from the files they leave."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dppo.errors import ConfigurationError

SUMMARY = "one page about runs: reward over time, seconds, tokens, what was left out and why"


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo report`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: A run cannot be read, matplotlib is missing, or a file not written.
    """
    args = _parser().parse_args(list(arguments))
    from dppo.report import make_page, make_pictures, read_runs

    runs = read_runs(args.run)
    pictures = make_pictures(runs)
    names = ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    title = args.title or f"Report: {names}"
    page = make_page(runs, pictures, title=title).encode("utf-8")
    drawn = [picture for picture in pictures if picture.png]
    if args.png_dir is not None:
        for picture in drawn:
            _write(args.png_dir / f"{picture.key}.png", picture.png, option="--png-dir")
    _write(args.out, page, option="--out")
    print(f"{args.out}: {len(runs)} runs, {len(drawn)} figures, {len(page) / 1000:,.0f} kB")
    for note in (f"{run.name}: {note}" for run in runs for note in run.notes):
        print(note)
    absent = [picture.title for picture in pictures if not picture.png]
    if absent:
        print(f"not drawn, for lack of records: {'; '.join(absent)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo report",
        description=SUMMARY + ". What is on the page: docs/report.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="output_dir of `dppo train`, or its metrics.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--png-dir", type=Path, help="write the pictures here, too")
    parser.add_argument("--title", help="of the page; by default the names of the runs")
    return parser


def _write(path: Path, content: bytes, *, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be written: {error}") from error
