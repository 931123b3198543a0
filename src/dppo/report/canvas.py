"""Figures in one style, as PNG: fonts that survive the width of a phone, colours for everyone."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind; yellow last, for areas only.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
YELLOW, GREY = "#F0E442", "#999999"
_WIDTH, HEIGHT, _DPI = 6.5, 3.6, 160
_STYLE: dict[str, Any] = {
    "font.size": 14,  # of 6.5 inches; 11 pixels where these are 360 pixels
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.titlesize": 14,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 13,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
}


def short(names: Sequence[str], length: int = 36) -> list[str]:
    r"""Names for a picture: no mathematics, and not too long.

    Example:
        >>> short(["cost $x$", "a-run-with-a-very-long-name-at-0.5-seed-0"])
        ['cost \\$x\\$', 'a-run-with-a-ver…name-at-0.5-seed-0']
    """
    cut = [n if len(n) <= length else f"{n[: length // 2 - 2]}…{n[-length // 2 :]}" for n in names]
    cut = [f"{i + 1}: {c}" if cut.count(c) > 1 else c for i, c in enumerate(cut)]
    # matplotlib leaves out labels that begin with "_"
    return [f" {c}" if c.startswith("_") else c for c in (c.replace("$", r"\$") for c in cut)]


def add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Above the axes, in as many columns as fit; the figure grows by its rows."""
    if not names:
        return
    longest = max(len(name) for name in names)
    columns = min(max(1, 56 // (longest + 7)), len(names), 4)
    rows = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.28 * (rows - 1))
    figure.legend(handles, names, loc="outside upper left", ncols=columns)


def whole_numbers(axis: Axes) -> None:
    """A few ticks at whole numbers, as steps are."""
    axis.locator_params(axis="x", nbins=6, integer=True)


@contextmanager
def new_figure(height: float = HEIGHT) -> Iterator[Figure]:
    """A figure in this page's style, whatever style the user has set."""
    try:
        from matplotlib import figure, style  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise ConfigurationError(
            "dppo report needs matplotlib, which is not installed: pip install 'dppo[plots]'"
        ) from None
    with style.context(["default", _STYLE]):
        yield figure.Figure(figsize=(_WIDTH, height), layout="constrained")


def as_png(figure: Figure) -> bytes:
    """The finished figure; the same bytes for the same figure."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a name in a script without a font
        figure.savefig(file, dpi=_DPI, format="png", metadata={"Software": None})
    return file.getvalue()
