"""Whether there are prompts enough. Shared by the command line and the trainer; no torch."""

from dppo.errors import ConfigurationError


def check_prompts(prompts: int, *, rolled_out: int) -> None:
    """Refuse a data set that is smaller than one generation.

    Args:
        prompts: Of the data set, N.
        rolled_out: Prompts of a generation, K.

    Raises:
        ConfigurationError: The message names both.
    """
    if prompts < rolled_out:
        raise ConfigurationError(
            f"{prompts} prompt{'s are' if prompts != 1 else ' is'} fewer than one generation batch "
            f"({rolled_out} prompts): nothing would be trained. Use more prompts, a smaller batch "
            "(per_device_train_batch_size, gradient_accumulation_steps), or larger groups"
        )


def check_window(
    prompts: int,
    *,
    prompt_keep: float,
    rolled_out: int,
    candidates: int,
    passes: float,
    known: bool,
) -> None:
    """Refuse windows that the data set cannot fill, or that have no history to be drawn by.

    Args:
        prompts: Of the data set, N.
        prompt_keep: As configured.
        rolled_out: Prompts of a generation, K.
        candidates: Prompts of a window, M.
        passes: Over the data, of the whole run.
        known: Whether there is a prior, or the user wants it all the same.

    Raises:
        ConfigurationError: M = K, M > N, or fewer than two passes without a prior.
    """
    check_choice(prompt_keep, rolled_out=rolled_out, candidates=candidates)
    if candidates > prompts:
        raise ConfigurationError(
            f"prompt_keep={prompt_keep} with {rolled_out} prompts per generation draws from a "
            f"window of M={candidates} prompts, but the data set has N={prompts}. Raise "
            "prompt_keep, or lower the number of prompts per generation"
        )
    if passes < 2 and not known:
        raise ConfigurationError(
            f"prompt_keep={prompt_keep} chooses prompts by their past visits, but the run makes "
            f"{passes:.3g} passes over the data: there is no history to choose by. Train at least "
            "2 epochs, give prompt_prior_column, set allow_single_epoch=True to draw uniformly, or "
            "set prompt_keep=1.0"
        )


def check_choice(prompt_keep: float, *, rolled_out: int, candidates: int) -> None:
    """Refuse windows that leave nothing to choose.

    Args:
        prompt_keep: As configured.
        rolled_out: Prompts of a generation, K.
        candidates: Prompts of a window, M.

    Raises:
        ConfigurationError: M = K.
    """
    if candidates == rolled_out:
        raise ConfigurationError(
            f"prompt_keep={prompt_keep} has nothing to choose from: a generation rolls out "
            f"{rolled_out} prompt{'s' * (rolled_out > 1)}, from a window of as many. Lower it, "
            "raise the number of prompts per generation, or set prompt_keep=1.0"
        )
