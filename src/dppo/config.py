"""What to prune and how: the options of the `Pruner`, checked when they are set."""

from dataclasses import asdict, dataclass
from typing import Any

from dppo._checks import natural, one_of, share
from dppo.errors import ConfigurationError, InvalidInputError

__all__ = ["COMPLETION_RULES", "PROMPT_RULES", "SAMPLING_DESIGNS", "PruneConfig", "parse_keep"]

COMPLETION_RULES = ("proportional", "threshold", "uniform", "inert")
PROMPT_RULES = ("proportional", "threshold", "uniform")
SAMPLING_DESIGNS = ("systematic", "poisson")


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Options of the estimator. None of them can bias it; they trade variance against cost.

    Raises:
        ConfigurationError: An option is outside its range or not in this version.

    Example:
        >>> import dppo
        >>> dppo.PruneConfig(completion_keep=0.25).completion_rule
        'proportional'
    """

    completion_keep: float = 0.5
    """Expected share of the live training cost that is kept, in (0, 1], for the rules
    "proportional" and "uniform" (there: the probability of a live row); 1.0 leaves out inert rows
    only. On recorded gradients half of all tokens adds 2 % of variance, a quarter 16 %."""

    completion_rule: str = "proportional"
    """"proportional" to size; "threshold", the paper's rule; "uniform", the baseline; "inert",
    which keeps every row that has a gradient."""

    completion_prune_rate: float = 0.7
    """The paper's r_o, for the rule "threshold" only. The paper names no default; up to 0.7 its
    variance stays bounded."""

    sampling_design: str = "systematic"
    """"systematic": fixed kept count, 20-30 % less pruning variance. "poisson": independent."""

    prompt_keep: float = 1.0
    """Prompts rolled out per candidate prompt, in (0, 1]: `count` prompts are drawn from a window
    of floor(count / prompt_keep + 1/2). 1.0 rolls all of them out."""

    prompt_rule: str = "proportional"
    """"proportional" to the predicted gradient norm per square root of cost; "threshold", the
    paper's rule; "uniform", the baseline."""

    prompt_prune_rate: float = 0.5
    """The paper's r_q, for the rule "threshold" only: the relative size of a prompt whose |A| was
    below average is 1 - r_q. In simulation 0.9 made up to 60 % less progress per rollout."""

    advantage_scale: str = "group"
    """How the host scales advantages ("group", "batch", "none"); what a prompt's history counts as
    signal."""

    observation_lag: int = 0
    """Generations by which what was observed reaches the choice of prompts later than it could, so
    that a loader that works ahead changes nothing: the window of generation g uses generations
    up to g - 1 - lag."""

    def __post_init__(self) -> None:
        try:
            share("completion_keep", self.completion_keep)
            one_of("completion_rule", self.completion_rule, COMPLETION_RULES)
            share("completion_prune_rate", self.completion_prune_rate, zero=True, one=False)
            one_of("sampling_design", self.sampling_design, SAMPLING_DESIGNS)
            share("prompt_keep", self.prompt_keep)
            one_of("prompt_rule", self.prompt_rule, PROMPT_RULES)
            share("prompt_prune_rate", self.prompt_prune_rate, zero=True, one=False)
            one_of("advantage_scale", self.advantage_scale, ("group", "batch", "none"))
            natural("observation_lag", self.observation_lag)
        except InvalidInputError as error:
            raise ConfigurationError(str(error)) from error
        for name in (
            "completion_keep",
            "completion_prune_rate",
            "prompt_keep",
            "prompt_prune_rate",
        ):
            object.__setattr__(self, name, float(getattr(self, name)))  # numpy's are not JSON

    def to_dict(self) -> dict[str, Any]:
        """The options by name, JSON-ready."""
        return asdict(self)


def parse_keep(name: str, value: object) -> tuple[str, float]:
    """How a trainer's `completion_keep` is meant, and the rate, for "auto" the one it starts with.

    Args:
        name: Of the option.
        value: "auto", a number in (0, 1], "shadow" (decide and log, train on everything) or
            "shadow:RATE".

    Returns:
        "auto", "on", "off" or "shadow"; the rate.

    Raises:
        ConfigurationError: It is none of them.

    Example:
        >>> from dppo.config import parse_keep
        >>> parse_keep("completion_keep", "shadow:0.25"), parse_keep("completion_keep", 1)
        (('shadow', 0.25), ('off', 1.0))
    """
    try:
        if value == "auto":
            return "auto", PruneConfig.completion_keep
        if isinstance(value, str):
            mode, colon, rate = value.partition(":")
            if mode == "shadow":
                shadowed = float(rate) if colon else PruneConfig.completion_keep
                if not 0 < shadowed < 1:
                    raise ValueError
                return "shadow", shadowed
            value = float(value)
        keep = share(name, value)
        return ("off" if keep == 1 else "on"), keep
    except (ValueError, InvalidInputError):
        raise ConfigurationError(
            f"{name} must be 'auto', a number in (0, 1], 'shadow' or 'shadow:RATE' with a rate "
            f"below 1, got {value!r}"
        ) from None
