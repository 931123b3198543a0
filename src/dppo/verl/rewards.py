"""Rewards of this package as verl calls them: one completion at a time.

reward.custom_reward_function.path=pkg://dppo.verl.rewards
"""

from typing import Any

from dppo.rewards import math_reward

SORTING = "dppo/sorting"
"""`data_source` of the built-in task."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """1 for a right answer: to the built-in task by its own rule, else as mathematics.

    Args:
        data_source: Of the row.
        solution_str: The completion.
        ground_truth: Of the row.
        extra_info: Of the row; not used.
        kwargs: What else verl passes; not used.

    Raises:
        ValueError: The ground truth cannot be read, so no answer could be right.
    """
    if data_source == SORTING:
        from dppo.tasks import sorting_reward

        return float(sorting_reward([solution_str], answer=[ground_truth])[0])
    (score,) = math_reward([solution_str], answer=[ground_truth])
    if score is None:
        raise ValueError(f"the ground truth {ground_truth!r} cannot be read; leave the row out")
    return float(score)
