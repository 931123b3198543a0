"""Errors of the library.

Every error is a `DPPOError` and also the standard error a caller would expect, so that both
`except DPPOError` and `except ValueError` work. A message names the thing, its value and what to
do about it. Nothing is repaired silently: input that would void unbiasedness raises.
"""


class DPPOError(Exception):
    """Base of every error raised on purpose by this library."""


class InvalidInputError(DPPOError, ValueError):
    """An array or argument is malformed: wrong shape, NaN, outside its range."""


class ConfigurationError(DPPOError, ValueError):
    """A combination of options that cannot work, found before any work is done."""


class UnsupportedLossError(DPPOError, ValueError):
    """A loss whose gradient is not a weighted sum over completions with a known denominator."""


class UnsupportedHostError(DPPOError, ImportError):
    """The installed host (TRL) is outside the tested range or lacks a hook that is wrapped."""


class HostDriftError(DPPOError, RuntimeError):
    """The host computed something else than the pruning decision was based on."""


class RewardError(DPPOError, RuntimeError):
    """A reward function failed, or did on every completion of many generations."""


class RankError(DPPOError, RuntimeError):
    """Another process failed, or processes do not agree; raised on all of them."""
