"""What is drawn, and what is said under it."""

from __future__ import annotations

from dataclasses import dataclass

from dppo.pruner import DROP_REASONS
from dppo.report.canvas import COLOURS, GREY, YELLOW


@dataclass(frozen=True)
class Curves:
    """A figure of curves over steps.

    Attributes:
        key: Its name in files and links.
        title: Above it.
        ylabel: What is drawn, with its unit.
        series: Column and name of each curve.
        caption: How to read it.
        floor: Whether the vertical axis begins at 0.
        smooth: Whether a moving average is drawn.
    """

    key: str
    title: str
    ylabel: str
    series: tuple[tuple[str, str], ...]
    caption: str
    floor: bool = True
    smooth: bool = True


@dataclass(frozen=True)
class Stacked:
    """A figure of stacked bars over steps.

    Attributes:
        key: Its name in files and links.
        title: Above it.
        ylabel: What is drawn, with its unit.
        parts: Column, name and colour of each part, from below.
        caption: How to read it.
    """

    key: str
    title: str
    ylabel: str
    parts: tuple[tuple[str, str, str], ...]
    caption: str


REWARD_SECONDS = (
    "Mean reward of what was rolled out. Compare runs over wall-clock seconds, at equal seeds and "
    "on several of them: over steps a pruned run can at best equal the unpruned one; what it gains "
    "is time. Evaluations and saves are not counted."
)
REWARD_STEPS = (
    "The same rewards over optimizer steps. If the curves of a pruned and an unpruned run lie "
    "together here, pruning cost no progress per step."
)
PROMPTS = (
    "Prompts by their share of right completions (reward 1), in the first and in the last third "
    "of the recording. Prompts at either end have no signal; training should move them from "
    "left to right."
)
_REASON_COLOURS = (COLOURS[2], COLOURS[1], COLOURS[3], YELLOW, GREY, COLOURS[6], COLOURS[5])

PHASES = Stacked(
    "phases",
    "Seconds per step",
    "seconds per step",
    (
        ("dppo/time/rollout", "rollout", COLOURS[0]),
        ("dppo/time/score", "score", COLOURS[3]),
        ("dppo/time/prune", "prune", COLOURS[6]),
        ("dppo/time/train", "train", COLOURS[4]),
    ),
    "Where the time of a step goes. Pruning completions and packing shorten train only; the rest "
    "is the ceiling of what they can gain. Prune should be a percent or so.",
)
TOKENS = Curves(
    "tokens",
    "Tokens generated and trained",
    "completion tokens",
    (("dppo/tokens/generated", "generated"), ("dppo/tokens/trained", "trained")),
    "Completion tokens of a generation, and those of the completions that were kept; in shadow "
    "mode, that would be. Token counts alone say nothing about speed.",
)
COMPLETIONS = Stacked(
    "completions",
    "What became of the completions",
    "completions",
    (
        ("count/kept", "kept", COLOURS[0]),
        *(
            (f"count/{name}", name.replace("_", " "), colour)
            for name, colour in reversed(list(zip(DROP_REASONS, _REASON_COLOURS, strict=True)))
        ),
    ),
    "All completions of a generation: kept, or left out and why. Sampled out is the only reason "
    "that adds variance; the others have no gradient.",
)
KEEP = Curves(
    "keep",
    "Rate and kept cost",
    "share",
    (("rate", "rate"), ("dppo/cost/keep", "cost kept"), ("dppo/auto/best", "best rate")),
    "The rate is the expected share of the live training cost that is kept: as set, or as chosen "
    "with auto, which moves it a notch at a time towards the best rate. The cost kept is of all "
    "completions, so it is lower where many have no gradient.",
    smooth=False,
)
GAIN = Curves(
    "auto-gain",
    "Why auto chose the rate",
    "gain, share",
    (("dppo/auto/gain", "predicted gain"), ("dppo/auto/fixed_share", "fixed share")),
    "The efficiency that is predicted at the best rate, against rate 1, and the share of an "
    "unpruned step that pruning completions cannot shorten: the larger it is, the less there is "
    "to gain.",
    smooth=False,
)
DENSITY = Curves(
    "density",
    "Token density",
    "real / computed tokens",
    (("dppo/tokens/density", "as run"), ("dppo/tokens/density_padded", "padded")),
    "Real over computed tokens of the gradient passes, as run and if the whole generation were "
    "padded alike: their ratio is what packing saves in tokens. Above 1, prompts are computed "
    "once for several completions.",
)
ESS = Curves(
    "ess",
    "Effective sample size",
    "share of kept",
    (("dppo/weight/ess", "effective sample size"),),
    "How equally the kept completions count, as a share of their number. Near 1: about equally. "
    "Under 0.1: very few of them decide the step.",
)
VARIANCE = Curves(
    "variance",
    "Predicted variance that pruning adds",
    "variance inflation",
    (("dppo/variance/inflation", "variance inflation"),),
    "Relative to the sum of squared gradient norms; a prediction, on recorded gradients somewhat "
    "too high. Above about 0.3: raise the rate.",
)
CLIP = Curves(
    "clip",
    "Gradient clipping",
    "clip factor",
    (("dppo/clip/factor", "clip factor"),),
    "max_grad_norm over the gradient norm where clipped, else 1. Lower than in an unpruned run: "
    "noise lengthens the gradient, and clipping acts as a lower learning rate. Raise max_grad_norm "
    "by sqrt(1 + v), v being the variance inflation.",
)
DIFFICULTY = Stacked(
    "difficulty",
    "Difficulty of the prompts",
    "share",
    (
        ("share/all_right", "all right", COLOURS[2]),
        ("share/signal", "with signal", COLOURS[0]),
        ("share/other", "other", GREY),
        ("share/no_signal", "without signal", GREY),
        ("share/all_wrong", "all wrong", COLOURS[1]),
    ),
    "Completions by their group: every reward 1, a gradient, every reward 0, or none of these. If "
    "the part with signal shrinks, the prompts have become too easy or too hard.",
)
FIGURES: tuple[Curves | Stacked, ...] = (
    *(PHASES, TOKENS, COMPLETIONS, KEEP, GAIN, DENSITY),
    *(ESS, VARIANCE, CLIP, DIFFICULTY),
)
