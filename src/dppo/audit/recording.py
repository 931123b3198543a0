"""Recorded rollouts, in an .npz file.

| array | shape | |
|---|---|---|
| reward_NG | (P, G) | rewards; NaN: no score |
| completion_tokens_NG | (P, G) | tokens |
| prompt_tokens_N | (P,) | tokens; optional, 0 |
| advantage_NG | (P, G) | optional, group-relative ones of the rewards |
| surprisal_norm_NG | (P, G) | optional, see `dppo.surprisal_norm` |
| gradient_NGK | (P, G, K) | optional; each completion's gradient, advantage included, or a sketch |
| earlier_reward_NG | (P, G) | optional; rewards of an earlier visit to the same prompts |

A sketch must keep inner products, as signed hashing does on average.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from dppo._checks import Floats, finite, reject, same_shape
from dppo.errors import InvalidInputError
from dppo.estimator.advantages import check_rewards, group_advantages

__all__ = ["Recording", "load_recording", "save_recording"]


@dataclass(frozen=True, eq=False)
class Recording:
    """Completions of one policy, checked.

    Raises:
        InvalidInputError: Shapes differ, or values are not what they are called.
    """

    rewards_PG: Floats
    completion_tokens_PG: Floats
    prompt_tokens_P: Floats
    advantages_PG: Floats
    surprisal_PG: Floats | None = None
    gradients_PGK: Floats | None = None
    earlier_rewards_PG: Floats | None = None

    @classmethod
    def of(
        cls,
        reward_NG: ArrayLike,
        completion_tokens_NG: ArrayLike,
        *,
        prompt_tokens_N: ArrayLike | None = None,
        advantage_NG: ArrayLike | None = None,
        surprisal_norm_NG: ArrayLike | None = None,
        gradient_NGK: ArrayLike | None = None,
        earlier_reward_NG: ArrayLike | None = None,
    ) -> "Recording":
        """From the arrays of a file, by their names there."""
        rewards = check_rewards(reward_NG)
        tokens = finite("completion_tokens_NG", completion_tokens_NG, ndim=2)
        same_shape("completion_tokens_NG", tokens, rewards.shape)
        reject("completion_tokens_NG", tokens, tokens < 0, "must be >= 0")
        prompts = np.zeros(len(rewards)) if prompt_tokens_N is None else prompt_tokens_N
        prompt_tokens = finite("prompt_tokens_N", prompts, ndim=1)
        same_shape("prompt_tokens_N", prompt_tokens, rewards.shape[:1])
        cost = tokens + prompt_tokens[:, None]
        reject("prompt_tokens_N + completion_tokens_NG", cost, cost < 1, "must be >= 1")
        advantages = group_advantages(rewards).values_PG if advantage_NG is None else advantage_NG
        advantages = finite("advantage_NG", advantages, ndim=2)
        same_shape("advantage_NG", advantages, rewards.shape)
        surprisal = gradients = earlier = None
        if surprisal_norm_NG is not None:
            surprisal = finite("surprisal_norm_NG", surprisal_norm_NG, ndim=2)
            same_shape("surprisal_norm_NG", surprisal, rewards.shape)
        if gradient_NGK is not None:
            gradients = finite("gradient_NGK", gradient_NGK, ndim=3)
            same_shape("gradient_NGK", gradients[..., 0], rewards.shape)
        if earlier_reward_NG is not None:
            earlier = check_rewards(earlier_reward_NG)
            same_shape("earlier_reward_NG", earlier, (len(rewards), earlier.shape[1]))
        return cls(rewards, tokens, prompt_tokens, advantages, surprisal, gradients, earlier)

    @property
    def cost_PG(self) -> Floats:
        """Tokens that training on a completion computes."""
        return self.completion_tokens_PG + self.prompt_tokens_P[:, None]


NAMES = (
    *("reward_NG", "completion_tokens_NG", "prompt_tokens_N", "advantage_NG"),
    *("surprisal_norm_NG", "gradient_NGK", "earlier_reward_NG"),
)


def load_recording(path: str | Path) -> Recording:
    """Read a file of this module's format; arrays of other names are ignored.

    Raises:
        InvalidInputError: It cannot be read, lacks an array, or the arrays do not fit together.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name], np.float64) for name in NAMES if name in file}
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read as .npz: {error}") from error
    missing = [name for name in NAMES[:2] if name not in arrays]
    if missing:
        raise InvalidInputError(f"{path} lacks {' and '.join(missing)}")
    return Recording.of(**arrays)


def save_recording(
    path: str | Path, recording: Recording, *, gradient_dtype: DTypeLike = np.float64
) -> None:
    """Write a file that `load_recording` reads."""
    gradients = recording.gradients_PGK
    arrays = {
        "reward_NG": recording.rewards_PG,
        "completion_tokens_NG": recording.completion_tokens_PG,
        "prompt_tokens_N": recording.prompt_tokens_P,
        "advantage_NG": recording.advantages_PG,
        "surprisal_norm_NG": recording.surprisal_PG,
        "gradient_NGK": None if gradients is None else gradients.astype(gradient_dtype),
        "earlier_reward_NG": recording.earlier_rewards_PG,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **given)
