"""Invariants of the packers, for any lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dppo
from dppo.packing import bucket

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@given(LENGTHS, st.integers(1, 50), st.integers(1, 12))
def test_every_item_is_in_one_bin_and_no_bin_is_over(lengths, capacity, window):
    packing = dppo.pack(lengths, capacity=capacity, window=window)
    assert sorted(i for items in packing.bins for i in items.tolist()) == list(range(len(lengths)))
    for number, items in enumerate(packing.bins):
        assert packing.lengths[items].sum() <= capacity or len(items) == 1
        assert (packing.bin_of_item[items] == number).all()


@given(LENGTHS, st.integers(1, 50), st.integers(1, 12))
def test_the_rule_step_by_step(lengths, capacity, window):
    """A bin takes the oldest; then always the largest, then oldest, of those in view that fit."""
    unplaced = list(range(len(lengths)))
    for items in dppo.pack(lengths, capacity=capacity, window=window).bins:
        room, expected = capacity - lengths[unplaced[0]], [unplaced.pop(0)]
        while fitting := [i for i in unplaced[:window] if lengths[i] <= room]:
            best = max(fitting, key=lambda i: (lengths[i], -i))
            unplaced.remove(best)
            expected.append(best)
            room -= lengths[best]
        assert items.tolist() == expected
    assert not unplaced


@given(LENGTHS, st.integers(1, 50), st.integers(1, 12))
def test_no_item_waits_longer_than_the_window(lengths, capacity, window):
    """Before bin number b opens, at least b items are placed: so many are in view by then."""
    packing = dppo.pack(lengths, capacity=capacity, window=window)
    placed = np.cumsum([0] + [len(items) for items in packing.bins])
    for item, number in enumerate(packing.bin_of_item.tolist()):
        in_view = next(b for b, count in enumerate(placed) if item < count + window)
        assert number - in_view <= window


@given(LENGTHS, st.integers(1, 50))
def test_token_density_is_real_tokens_over_bins(lengths, capacity):
    packing = dppo.pack(lengths, capacity=capacity)
    sizes = [max(capacity, *(lengths[i] for i in items)) for items in packing.bins[:-1]]
    sizes += [sum(lengths[i] for i in items) for items in packing.bins[-1:]]
    assert packing.token_density == (sum(lengths) / sum(sizes) if sum(lengths) else 1.0)
    assert 0 < packing.token_density <= 1


@given(LENGTHS, st.integers(1, 300), st.one_of(st.none(), st.integers(1, 9)))
def test_buckets_hold_every_item_within_the_budget(lengths, budget, most_rows):
    batches = bucket(lengths, budget=budget, most_rows=most_rows)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) * width <= budget or len(batch) == 1
        assert most_rows is None or len(batch) <= most_rows
    widths = [lengths[i] for batch in batches for i in batch.tolist()]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "two lengths"])
def test_as_dense_as_first_fit_decreasing_that_sees_everything(kind):
    rng = np.random.default_rng(1)
    lengths = {
        "uniform": rng.integers(1, 512, 2000),
        "lognormal": np.minimum(rng.lognormal(5, 0.8, 2000), 1024).astype(int),
        "two lengths": rng.choice([90, 400], 2000),
    }[kind]
    packing = dppo.pack(lengths, capacity=1024, window=64)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = next((i for i, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(1024 - length)
        else:
            rooms[place] -= length
    assert len(packing.bins) <= 1.015 * len(rooms) + 1


@pytest.mark.parametrize(
    ("lengths", "options", "named"),
    [
        ([1, -1], {}, "lengths"),
        ([1.5], {}, "lengths"),
        ([float("nan")], {}, "lengths"),
        ([[1]], {}, "lengths"),
        (["a"], {}, "lengths"),
        ([1], {"capacity": 0}, "capacity"),
        ([1], {"window": 0}, "window"),
        ([1], {"capacity": 1.5}, "capacity"),
    ],
)
def test_what_is_no_packing_problem(lengths, options, named):
    with pytest.raises(dppo.InvalidInputError, match=named):
        dppo.pack(lengths, **options)


def test_nothing_to_pack():
    packing = dppo.pack([])
    assert packing.bins == []
    assert packing.token_density == 1.0
    assert bucket([], budget=1) == []
