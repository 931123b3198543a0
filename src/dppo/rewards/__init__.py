"""Verifiable rewards, in TRL's form: called with completions and the data set's columns."""

from dppo.rewards.mathematics import MathReward, math_reward
from dppo.rewards.shaping import format_reward, overlong_penalty

__all__ = ["MathReward", "format_reward", "math_reward", "overlong_penalty"]
