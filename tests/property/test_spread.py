"""Rows spread over ranks and bins: each once, equal shapes, near-equal tokens."""

from typing import Any

import numpy as np
import pytest

from dppo.packing.layout import Price
from dppo.packing.spread import PADDING, Room, dense_bins, held, loads, spread


def lengths(rng: np.random.Generator, count: int, kind: str) -> Any:
    """Tokens of completions as they occur: even, skewed, or a few that run to the limit."""
    if kind == "even":
        return rng.integers(90, 110, count)
    if kind == "skewed":
        return np.minimum(rng.lognormal(4, 1, count).astype(int) + 1, 1024)
    return np.where(rng.random(count) < 0.1, 1024, rng.integers(1, 60, count))


def room_of(rng: np.random.Generator, length_N: Any, *, shares: bool) -> Room:
    group_N = np.arange(len(length_N)) // 8
    prompt_N = rng.integers(1, 120, group_N[-1] + 1)[group_N]
    capacity = int(rng.integers(1, 4)) * int((length_N + prompt_N).max())
    return Room(capacity, Price(1000), shares, prompt_N, length_N, group_N)


@pytest.mark.parametrize("packing", ["rows", "tokens", "shared prompts"])
@pytest.mark.parametrize("kind", ["even", "skewed", "limit"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_row_runs_once_and_ranks_carry_about_the_same(
    ranks: int, kind: str, packing: str
) -> None:
    rng = np.random.default_rng([ranks, len(kind)])
    for trial in range(12):
        size = ranks * 16
        completion_N = lengths(rng, size, kind)
        room = room_of(rng, completion_N, shares=packing != "tokens")
        length_N = room.prompt_N + completion_N
        here_N = rng.random(size) < (0.0, 1.0, rng.random())[trial % 3]
        bins = spread(
            here_N,
            -length_N,
            length_N,
            ranks=ranks,
            micro_batch=4,
            room=None if packing == "rows" else room,
            most=4,
            at_least=trial % 2,
        )
        assert trial % 2 <= len(bins) <= 4
        assert all(rows_WR.shape[0] == ranks for rows_WR in bins)
        flat = np.concatenate([np.zeros(0, int), *(rows_WR.ravel() for rows_WR in bins)])
        assert sorted(flat[flat != PADDING]) == np.flatnonzero(here_N).tolist()
        shared = room.group_N if packing == "shared prompts" else None
        load_W = loads(bins, room.prompt_N, completion_N, shared)
        if here_N.any():
            assert load_W.max() - load_W.mean() <= max(0.05 * load_W.mean(), length_N.max())
            of_all = held(bins, ranks)
            assert sorted(np.concatenate(of_all)) == np.flatnonzero(here_N).tolist()


def test_control_rows_that_stay_at_home_are_not_balanced() -> None:
    length_N = np.where(np.arange(32) < 16, 100, 1)
    options: dict[str, Any] = {"ranks": 2, "micro_batch": 4, "room": None, "most": 4}
    here_N, none_N = np.ones(32, bool), np.zeros(32, int)
    for moves, gap in ((True, 100), (False, 1000)):
        bins = spread(here_N, -length_N, length_N, **options, moves=moves)
        load_W = loads(bins, none_N, length_N)
        assert (np.ptp(load_W) <= gap) == moves


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bins_hold_what_they_may(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(50):
        completion_N = rng.integers(1, 40, ranks * 16)
        room = room_of(rng, completion_N, shares=bool(rng.integers(0, 2)))
        length_N = room.prompt_N + completion_N
        here_N = rng.random(ranks * 16) < rng.random()
        bins = spread(here_N, -length_N, length_N, ranks=ranks, micro_batch=4, room=room, most=4)
        shared = room.group_N if room.shares else None
        most = max((loads([b], room.prompt_N, completion_N, shared).max() for b in bins), default=0)
        # Over the capacity only where as many rows as before are taken instead.
        assert most <= room.capacity or all(rows_WR.shape[1] <= 4 for rows_WR in bins)


def test_bins_by_tokens_differ_by_less_than_the_longest_row() -> None:
    length_N = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 1])
    bins = dense_bins(np.arange(10), length_N, apart(length_N, capacity=25), ranks=1, most=5)
    loads_of = [int(length_N[rows[rows != PADDING]].sum()) for (rows,) in bins or []]
    assert sum(loads_of) == 46
    assert len(loads_of) == 2
    assert max(loads_of) - min(loads_of) <= 1
    few = apart(length_N, capacity=10)
    assert dense_bins(np.arange(10), length_N, few, ranks=1, most=4) is None


def test_completions_to_one_prompt_share_a_bin_where_that_saves_most() -> None:
    prompt_N, group_N = np.full(32, 40), np.arange(32) // 8
    room = Room(150, Price(10_000), True, prompt_N, np.full(32, 10), group_N)
    bins = dense_bins(np.arange(32), prompt_N + 10, room, ranks=1, most=16) or []
    assert len(bins) == 4
    assert all(len(set(group_N[rows].tolist())) == 1 for (rows,) in bins)
    # Attention to a wide row would cost more than short prompts do.
    prompt_N, completion_N = np.full(32, 4), np.full(32, 46)
    room = Room(160, Price(1), True, prompt_N, completion_N, group_N)
    bins = dense_bins(np.arange(32), prompt_N + completion_N, room, ranks=1, most=16) or []
    assert len(bins) == 11
    assert int((room.prompt_N + room.completion_N)[bins[0][0]].sum()) == 150


def test_a_shared_prompt_gives_way_where_ranks_could_not_carry_the_same() -> None:
    """Two groups, of which one is much larger, cannot be halved with whole groups."""
    sizes = np.array([12, 2])
    group_N = np.repeat([0, 1], sizes)
    prompt_N, completion_N = np.full(14, 20), np.full(14, 30)
    room = Room(10_000, Price(10_000), True, prompt_N, completion_N, group_N)
    bins = dense_bins(np.arange(14), prompt_N + completion_N, room, ranks=2, most=4) or []
    load_W = loads(bins, prompt_N, completion_N, group_N)
    assert load_W.max() - load_W.mean() <= 50
    alone = dense_bins(np.arange(14), prompt_N + completion_N, room, ranks=1, most=4) or []
    assert loads(alone, prompt_N, completion_N, group_N).tolist() == [14 * 30 + 2 * 20]


def apart(length_N: Any, *, capacity: int) -> Room:
    """Rows that share nothing."""
    group_N = np.arange(len(length_N))
    return Room(capacity, Price(), False, np.ones_like(group_N), length_N - 1, group_N)
