"""What to prune and how: the options of the `Pruner`, checked when they are set."""

from dataclasses import asdict, dataclass
from typing import Any

from dppo._checks import one_of, share
from dppo.errors import ConfigurationError, InvalidInputError

__all__ = ["COMPLETION_RULES", "SAMPLING_DESIGNS", "PruneConfig"]

COMPLETION_RULES = ("proportional", "threshold", "uniform", "inert")
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
    """Share of the candidate prompts that is rolled out. This version takes 1.0 only."""

    def __post_init__(self) -> None:
        try:
            share("completion_keep", self.completion_keep)
            one_of("completion_rule", self.completion_rule, COMPLETION_RULES)
            share("completion_prune_rate", self.completion_prune_rate, zero=True, one=False)
            one_of("sampling_design", self.sampling_design, SAMPLING_DESIGNS)
            share("prompt_keep", self.prompt_keep)
        except InvalidInputError as error:
            raise ConfigurationError(str(error)) from error
        for name in ("completion_keep", "completion_prune_rate", "prompt_keep"):
            object.__setattr__(self, name, float(getattr(self, name)))  # numpy's are not JSON
        if self.prompt_keep != 1:
            raise ConfigurationError(
                f"prompt_keep={self.prompt_keep!r}: this version prunes completions only; "
                "set prompt_keep=1.0"
            )

    def to_dict(self) -> dict[str, Any]:
        """The options by name, JSON-ready."""
        return asdict(self)
