"""`dppo audit`: what pruning rules do to recorded rollouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dppo.audit import biased_methods, load_recording, measure, unbiased_methods
from dppo.audit.measure import ROLLOUT_SHARES, Measured
from dppo.audit.methods import names
from dppo.errors import ConfigurationError

SUMMARY = "bias, variance, cost and efficiency of pruning rules on recorded rollouts"


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo audit`.

    Returns:
        The exit code, 0.

    Raises:
        DPPOError: The file cannot be read, or holds nothing to thin.
    """
    args = _parser().parse_args(list(arguments))
    recording = load_recording(_recorded(args.file))
    methods = unbiased_methods(recording, design=args.design)
    methods += biased_methods(recording)
    found = measure(recording, methods, draws=args.draws, seed=args.seed, design=args.design)
    print("\n".join(_report(found, with_gradients=recording.gradients_PGK is not None)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(m) for m in found], indent=2) + "\n")
    if args.plot is not None:
        _plot(found, names(methods), args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo audit",
        description=SUMMARY + ". The format of the file: docs/audit.md.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="recorded rollouts, .npz, or a run with one")
    parser.add_argument("--design", choices=("systematic", "poisson"), default="systematic")
    parser.add_argument("--draws", type=int, default=200, help="of each method, where not exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--plot", type=Path, help="draw efficiency against cost here (matplotlib)")
    return parser


def _recorded(path: Path) -> Path:
    """The file itself, or the one in the directory of a run."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.npz"))
    if len(found) != 1:
        listed = ", ".join(file.name for file in found) or "none"
        raise ConfigurationError(
            f"{path} should hold one recording (.npz, of --record-rollouts), and holds {listed}; "
            "name the file"
        )
    return found[0]


def _report(found: Sequence[Measured], *, with_gradients: bool) -> list[str]:
    lines = [
        "variance: what is added to that between prompts, by recorded gradients"
        if with_gradients
        else "no gradients are recorded: variance is predicted from advantages and surprisal",
        "",
        "unbiased, each at its best rate",
        f"{'rule':<22}{'f':>5}{'rate':>10}{'variance':>18}{'cost':>7}{'efficiency':>12}"
        f"{'sample':>8}{'weight':>8}",
    ]
    exact = [m for m in found if m.efficiency is not None]
    for name in dict.fromkeys(m.name for m in exact):
        for share in ROLLOUT_SHARES:
            best = max(
                (m for m in exact if m.name == name), key=lambda m: (m.efficiency or {})[share]
            )
            lines.append(
                f"{name if share == ROLLOUT_SHARES[0] else '':<22}{share:>5}{best.rate:>10}"
                f"{_value(best):>18}{best.cost:>7.2f}{(best.efficiency or {})[share]:>12.2f}"
                f"{best.sample_size:>8.2f}{best.largest_weight:>8.1f}"
            )
    biased = [m for m in found if m.efficiency is None]
    if biased:
        lines += [
            "",
            "biased, for comparison",
            f"{'method':<22}{'rate':>15}{'bias':>8}{'cosine':>8}{'variance':>18}{'cost':>7}"
            f"{'rollouts':>10}",
        ]
    lines += [
        f"{m.name:<22}{m.rate:>15}{_number(m.bias):>8}{_number(m.cosine):>8}{_value(m):>18}"
        f"{m.cost:>7.2f}{m.rollout:>10.2f}"
        for m in biased
    ]
    return lines


def _value(measured: Measured) -> str:
    error = measured.variance_error
    return f"{measured.variance:.3f}" + ("" if error is None else f" +- {error:.3f}")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _plot(found: Sequence[Measured], order: Sequence[str], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ROLLOUT_SHARES), figsize=(12, 4), sharex=True)
    for share, axis in zip(ROLLOUT_SHARES, axes, strict=True):
        for name in order:
            mine = sorted((m for m in found if m.name == name), key=lambda m: m.cost)
            points = [(m.cost, m.efficiency[share]) for m in mine if m.efficiency is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=f"rollout share {share}", xlabel="kept share of the training cost")
    axes[0].set_ylabel("efficiency against the full batch")
    axes[-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
