"""The sorting task: its prompts, its splits and its reward."""

import hashlib

import numpy as np
import pytest

from dppo.errors import InvalidInputError
from dppo.tasks import sorting_dataset, sorting_reward


def prompts(size, **kwargs):
    return list(sorting_dataset(size, **kwargs)["prompt"])


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_digits_and_their_sorted_digits(split):
    rows = sorting_dataset(500, seed=0, split=split)
    assert rows.column_names == ["prompt", "answer"]
    assert len(rows) == 500
    for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True):
        assert prompt.endswith("=")
        assert prompt[:-1].isdigit()
        assert answer == "".join(sorted(prompt[:-1]))


def test_lengths_cover_3_to_16_evenly():
    lengths = np.array([len(prompt) - 1 for prompt in prompts(4000, seed=0)])
    counts = np.bincount(lengths, minlength=17)
    assert counts[:3].sum() == 0
    assert len(counts) == 17
    # About 4000 / 14 = 286 each, standard deviation 16; repeats thin out the 875 three-digit
    # train prompts to about 250. The bounds leave 5 standard deviations around these.
    assert counts[3:].min() > 170
    assert counts[3:].max() < 370


def test_splits_are_disjoint_for_different_seeds_and_sizes():
    train = set(prompts(6000, seed=0)) | set(prompts(3000, seed=1))
    test = set(prompts(2000, seed=0, split="test")) | set(prompts(1000, seed=2, split="test"))
    assert not train & test


@pytest.mark.parametrize("split", ["train", "test"])
def test_split_rule_does_not_change_between_releases(split):
    # The built-in model has seen train prompts: moving one to test would leak.
    for prompt in prompts(300, seed=0, split=split):
        digest = hashlib.blake2b(prompt[:-1].encode(), digest_size=8).digest()
        assert (int.from_bytes(digest, "big") % 8 == 0) == (split == "test")


def test_prompts_of_a_dataset_are_distinct():
    # 20,000 draws would repeat many of the 1,000 three-digit strings.
    drawn = prompts(20_000, seed=3)
    assert len(set(drawn)) == 20_000


def test_same_arguments_same_rows_and_a_larger_size_appends():
    assert prompts(50, seed=4) == prompts(50, seed=4)
    assert prompts(80, seed=4)[:50] == prompts(50, seed=4)
    assert prompts(50, seed=4) != prompts(50, seed=5)


def test_train_is_the_default_split():
    assert prompts(20, seed=0) == prompts(20, seed=0, split="train")


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", True, None])
def test_bad_size_is_rejected(size):
    with pytest.raises(InvalidInputError, match="size"):
        sorting_dataset(size, seed=0)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", None])
def test_bad_seed_is_rejected(seed):
    with pytest.raises(InvalidInputError, match="seed"):
        sorting_dataset(1, seed=seed)


@pytest.mark.parametrize("split", ["validation", "", None, 0])
def test_bad_split_is_rejected(split):
    with pytest.raises(InvalidInputError, match="split"):
        sorting_dataset(1, seed=0, split=split)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("1134", "1134", 1.0),
        (" 1134\n", "1134", 1.0),
        ("1143", "1134", 0.0),
        ("113", "1134", 0.0),
        ("11344", "1134", 0.0),
        ("11 34", "1134", 0.0),
        ("1134=", "1134", 0.0),
        ("", "1134", 0.0),
        ("012", "012", 1.0),
        ("12", "012", 0.0),  # compared as text, not as numbers
    ],
)
def test_reward_of_plain_and_conversational_completions(completion, answer, reward):
    assert sorting_reward([completion], [answer]) == [reward]
    message = {"role": "assistant", "content": completion}
    assert sorting_reward([[message]], [answer]) == [reward]


def test_reward_is_a_float_per_completion_and_ignores_other_columns():
    rewards = sorting_reward(
        completions=["12", "21", "12"],
        answer=["12", "12", "21"],
        prompts=["21=", "21=", "12="],
        completion_ids=[[1], [2], [3]],
    )
    assert rewards == [1.0, 0.0, 0.0]
    assert all(type(reward) is float for reward in rewards)
    assert sorting_reward([], []) == []


def test_reward_of_several_messages_is_that_of_the_last():
    messages = [
        {"role": "assistant", "content": "21"},
        {"role": "assistant", "content": "12"},
    ]
    assert sorting_reward([messages], ["12"]) == [1.0]


def test_reward_rejects_unequal_lengths():
    with pytest.raises(InvalidInputError, match="2 and 1"):
        sorting_reward(["12", "12"], ["12"])


@pytest.mark.parametrize("completion", [[], [{"role": "assistant"}], [{"content": None}]])
def test_reward_rejects_completions_without_text(completion):
    with pytest.raises(InvalidInputError, match="completion"):
        sorting_reward([completion], ["12"])
