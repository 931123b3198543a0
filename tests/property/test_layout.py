"""Invariants of dense rows, for any batch; and how dense they are on real lengths."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dppo
from dppo.packing.layout import Price, dense, flat, share, trees

ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=40
)
"""Group, prompt tokens of the group, completion tokens."""
PRICES = st.builds(Price, st.sampled_from([1, 32, 4096]), st.just(4), st.sampled_from([0, 8]))


def batch(rows):
    """Prompt and completion tokens, and groups, whose prompts are of one length."""
    of_group = {group: prompt for group, prompt, _ in rows}
    columns = [(of_group[group], completion, group) for group, _, completion in rows]
    return np.array(columns, dtype=np.int64).T


@given(ROWS, PRICES, st.booleans(), st.integers(1, 64))
def test_every_token_lies_in_one_place_and_no_sequence_is_cut(rows, price, shares, window):
    prompt_B, completion_B, group_B = batch(rows)
    length_B = prompt_B + completion_B
    padded = (len(rows) * int(length_B.max()), int(length_B.max()))
    found = dense(
        prompt_B, completion_B, group_B, price=price, padded=padded, shares=shares, window=window
    )
    places = []
    for b, length in enumerate(length_B.tolist()):
        first, last = found.start_B[b] + found.first_B[b], found.start_B[b] + length - 1
        assert first // found.width == last // found.width < found.rows
        places += range(first, last + 1)
    assert len(set(places)) == len(places) == found.tokens
    assert found.rows * found.width >= found.tokens
    for b in np.flatnonzero(found.first_B).tolist():  # the prompt was computed before it, but one
        trunk = int(np.flatnonzero((found.tree_B == found.tree_B[b]) & (found.first_B == 0))[0])
        assert group_B[trunk] == group_B[b]
        assert found.first_B[b] == prompt_B[b] - 1
        start, end = found.start_B[trunk], found.start_B[b] + found.first_B[b]
        assert start // found.width == end // found.width
        assert start + length_B[trunk] <= end
    assert shares or not found.shares
    # Not dearer, and not larger, than one sequence a row.
    computed = found.rows * found.width
    assert price.memory(computed, found.width) <= price.memory(*padded)
    assert price.time(computed, found.width) <= price.time(*padded)


@given(ROWS, PRICES)
def test_a_layout_does_not_depend_on_the_names_of_groups(rows, price):
    prompt_B, completion_B, group_B = batch(rows)
    padded = (10**6, 100)
    one = dense(prompt_B, completion_B, group_B, price=price, padded=padded)
    other = dense(prompt_B, completion_B, 7 - group_B, price=price, padded=padded)
    assert one.rows == other.rows
    np.testing.assert_array_equal(one.start_B, other.start_B)


@given(ROWS, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 30)))
def test_trees_hold_every_sequence_within_their_limits(rows, most, longest):
    prompt_B, completion_B, group_B = batch(rows)
    grown = trees(prompt_B, completion_B, group_B, most=most, longest=longest)
    assert sorted(b for m in grown.members_T for b in m.tolist()) == list(range(len(rows)))
    for members, tokens in zip(grown.members_T, grown.tokens_T.tolist(), strict=True):
        prompt = int(prompt_B[members[0]])
        assert len(set(group_B[members].tolist())) == 1
        assert tokens == prompt + completion_B[members].sum() + len(members) - 1
        assert len(members) <= most
        if len(members) > 1:
            assert prompt >= 2
            assert longest is None or tokens <= longest


def test_sharing_is_for_long_prompts():
    group_B, completion_B = np.repeat([0, 1], 8), np.full(16, 100)
    assert share(np.full(16, 400), completion_B, group_B, price=Price(4096)) == 8
    assert share(np.full(16, 2), completion_B, group_B, price=Price(64)) == 1
    assert share(np.zeros(0, np.int64), np.zeros(0, np.int64), group_B[:0], price=Price()) == 1


def test_where_memory_is_short_the_least_is_taken():
    """Scores of all heads and layers are kept: rows are no wider than one sequence."""
    eager = Price(hidden=4096, layers=32, scores=32 * 32)
    ones, groups = np.ones(8, np.int64), np.arange(8)
    found = dense(ones, np.full(8, 99), groups, price=eager, padded=(1, 1))
    assert (found.rows, found.width) == (8, 100)


def test_flat_is_one_row_without_filling():
    found = flat(np.array([2, 1]), np.array([3, 1]))
    assert (found.rows, found.width, found.start_B.tolist()) == (1, 7, [0, 5])


# -- how dense -------------------------------------------------------------------------------------

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.parquet"
GROUP, PROMPTS = 8, 32


def sorting_lengths(rng):
    """Of the built-in task: digits to sort, and answers as long or cut short."""
    digits = rng.integers(2, 9, PROMPTS)
    return digits + 2, np.minimum(digits[:, None] + rng.integers(-1, 4, (PROMPTS, GROUP)), 16)


def gsm8k_lengths(rng):
    """Questions, and the answers to any of them; four characters are about one token."""
    if not DATA.exists():
        pytest.skip(f"{DATA.name} is not beside the checkout")
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(DATA, columns=["question", "answer"]).to_pydict()
    question, answer = (np.array([len(text) // 4 for text in table[n]]) for n in table)
    return rng.choice(question, PROMPTS), rng.choice(answer, (PROMPTS, GROUP))


@pytest.mark.parametrize("keep", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [sorting_lengths, gsm8k_lengths])
def test_almost_every_token_is_a_real_one(lengths, keep):
    rng = np.random.default_rng(0)
    prompt_P, completion_PG = lengths(rng)
    kept_PG = rng.random(completion_PG.shape) < keep
    group_B = np.nonzero(kept_PG)[0]
    prompt_B, completion_B = prompt_P[group_B], completion_PG[kept_PG]
    total = int((prompt_B + completion_B).sum())
    for capacity in (1024, 4096):
        packing = dppo.pack(prompt_B + completion_B, capacity=capacity)
        assert packing.token_density >= 0.97
        assert len(packing.bins) <= math.ceil(total / capacity) * 1.03 + 1
    # What is computed in dense rows: with shared prompts, fewer tokens than there are.
    for hidden, shares, least in ((96, True, 1.0), (2048, False, 0.96), (2048, True, 1.2)):
        padded = (total * 2, int(prompt_B.max() + completion_B.max()))
        found = dense(
            *(prompt_B, completion_B, group_B),
            price=Price(hidden, 24),
            padded=padded,
            shares=shares,
        )
        assert total / (found.rows * found.width) >= least
