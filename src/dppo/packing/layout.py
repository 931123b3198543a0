"""Where the tokens of a batch lie in dense rows: an explicit, numpy-only plan.

A *tree* is one prompt with completions to it. Its prompt is computed once: first the whole of one
sequence, then for each further completion a branch, which begins with the prompt's last token
again, so that every token has one successor to predict. A sequence alone is a tree of one branch.
Trees are laid end to end in dense rows, all of one width.

Two prices decide between layouts. *Time*: a token costs 1 + width / (6 hidden), since the two
products of attention take 4 width hidden multiplications, and the weights of a layer about
24 hidden^2 (Kaplan et al., arXiv 2001.08361, section 2.1). *Memory*: a token's activations, and one
row of the attention mask or, where attention keeps them, of its scores.

Suffixes: `_B` sequences of a batch, `_T` trees.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dppo.packing.bins import pack

__all__ = ["Dense", "Price", "Trees", "dense", "flat", "share", "trees"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Price:
    """What computing a token costs, by the width of the row that it lies in."""

    hidden: int = 1
    """Width of the model. 1: rows as narrow as they can be."""
    layers: int = 1
    scores: int = 0
    """Attention scores that are kept of a pair of tokens: heads (times layers), or 0 if none."""

    def time(self, tokens: int, width: int, *, shared: bool = False) -> float:
        """In tokens without attention; shared prompts must save 5 %, since their mask is made."""
        return tokens * (1 + width / (6 * self.hidden)) * (1.05 if shared else 1.0)

    def memory(self, tokens: int, width: int) -> float:
        """Bytes, of half-precision activations: one state a layer, and those of one layer.

        A mask takes one byte a pair, and two once it is added to the scores.
        """
        return tokens * (2 * self.hidden * (self.layers + 32) + (3 + 8 * self.scores) * width)


@dataclass(frozen=True)
class Trees:
    """Sequences grouped by their prompt, as many as are computed together."""

    members_T: list[Ints]
    """Sequences of each tree."""
    tokens_T: Ints
    """Tokens of each tree."""


@dataclass(frozen=True)
class Dense:
    """Where each sequence lies: token `p` of sequence b, for p >= first, at start + p."""

    rows: int
    width: int
    start_B: Ints
    """Flat index into the (rows, width) tokens; for a further branch, of where its token 0 would be
    if its prompt were repeated."""
    first_B: Ints
    """First token that is computed for the sequence; 0, or the last one of a shared prompt."""
    tree_B: Ints
    tokens: int
    """Tokens that are no filling."""

    @property
    def shares(self) -> bool:
        """Whether a prompt is computed once for several completions."""
        return bool(self.first_B.any())


def trees(
    prompt_B: Ints, completion_B: Ints, group_B: Ints, *, most: int, longest: int | None = None
) -> Trees:
    """Group sequences of one prompt into trees.

    Args:
        prompt_B: Tokens of the prompts.
        completion_B: Tokens of the completions.
        group_B: Equal where prompts are.
        most: Completions that may share a prompt.
        longest: Tokens that a tree of several completions may have; None: any number.
    """
    members: list[list[int]] = []
    sizes: list[int] = []
    open_tree: dict[int, int] = {}
    for b, (prompt, completion, group) in enumerate(
        zip(prompt_B.tolist(), completion_B.tolist(), group_B.tolist(), strict=True)
    ):
        tree = open_tree.get(group)
        grown = None if tree is None else sizes[tree] + completion + 1
        if (
            tree is None
            or grown is None
            or prompt < 2  # nothing to share
            or len(members[tree]) == most
            or (longest is not None and grown > longest)
        ):
            open_tree[group] = len(members)
            members.append([b])
            sizes.append(prompt + completion)
        else:
            members[tree].append(b)
            sizes[tree] = grown
    return Trees([np.array(m, dtype=np.int64) for m in members], np.array(sizes, dtype=np.int64))


def _branchings(group_B: Ints, *, shares: bool) -> list[int]:
    """Numbers of completions that a tree may have: powers of two up to the largest group."""
    largest = int(np.unique(group_B, return_counts=True)[1].max(initial=1)) if shares else 1
    return [1 << power for power in range((largest - 1).bit_length() + 1)]


def share(prompt_B: Ints, completion_B: Ints, group_B: Ints, *, price: Price) -> int:
    """Number of completions per tree that takes the least time if rows are about a tree wide."""
    if not prompt_B.size:
        return 1

    def time(most: int) -> float:
        tokens_T = trees(prompt_B, completion_B, group_B, most=most).tokens_T
        return price.time(int(tokens_T.sum()), int(tokens_T.max()), shared=most > 1)

    return min(_branchings(group_B, shares=True), key=time)


def dense(
    prompt_B: Ints,
    completion_B: Ints,
    group_B: Ints,
    *,
    price: Price,
    padded: tuple[int, int],
    shares: bool = True,
    window: int = 64,
    widest: int | None = None,
) -> Dense:
    """The layout that takes the least time, of those that take no more memory than padding.

    Args:
        prompt_B: Tokens of the prompts.
        completion_B: Tokens of the completions.
        group_B: Equal where prompts are.
        price: Of a token.
        padded: Tokens and width of the padded batch, whose memory may be used. Where no layout
            keeps to it, the one that takes the least is chosen.
        shares: Whether completions may share a prompt.
        window: Of the packer (`dppo.pack`).
        widest: Tokens that a row of several sequences may have.
    """
    allowed = price.memory(*padded)
    best: tuple[tuple[float, float], Ints, int, Trees] | None = None
    candidates = [
        ((max(price.memory(rows * width, width) - allowed, 0.0), time), rows, grown)
        for time, rows, width, grown in _candidates(
            prompt_B, completion_B, group_B, price=price, shares=shares
        )
    ]
    for (least, bound), rows, grown in sorted(candidates, key=lambda candidate: candidate[0]):
        if best is not None and (1.01 * least, 1.01 * bound) >= best[0]:  # 1 % to gain at most
            break
        bin_T, width = _fitted(grown.tokens_T, rows, window)
        if widest is not None and width > widest and rows < prompt_B.size:
            continue
        computed = (int(bin_T.max()) + 1) * width
        excess = max(price.memory(computed, width) - allowed, 0.0)
        shared = len(grown.members_T) < prompt_B.size
        cost = (excess, price.time(computed, width, shared=shared))
        if best is None or cost < best[0]:
            best = (cost, bin_T, width, grown)
    assert best is not None  # one sequence a row is always a candidate
    return _placed(best[3], prompt_B, completion_B, best[1], best[2])


def _candidates(
    prompt_B: Ints, completion_B: Ints, group_B: Ints, *, price: Price, shares: bool
) -> Iterator[tuple[float, int, int, Trees]]:
    """A bound of the time, a number of rows, a bound of their width, and the trees to lay there."""
    for most in _branchings(group_B, shares=shares):
        grown = trees(prompt_B, completion_B, group_B, most=most)
        count, total = len(grown.members_T), int(grown.tokens_T.sum())
        longest = int(grown.tokens_T.max())
        # Rows are most even where each has as many trees, or they take turns with one more.
        for rows in sorted({-(-2 * count // each) for each in range(2, 2 * count + 1)}):
            width = max(longest, -(-total // rows))
            time = price.time(rows * width, width, shared=count < prompt_B.size)
            yield time, rows, width, grown


def _fitted(tokens_T: Ints, rows: int, window: int) -> tuple[Ints, int]:
    """Bin of each tree, in at most `rows` bins, and the width that they need, about the least.

    Bisection of the capacity, longest tree first (Coffman, Garey and Johnson 1978, "multifit");
    of more trees than the packer sees at once, it sees a sample of all lengths.
    """
    falling = np.argsort(-tokens_T, kind="stable")
    stripes = -(-tokens_T.size // window)
    order = np.concatenate([falling[stripe::stripes] for stripe in range(stripes)])
    ordered_T = tokens_T[order]
    low = high = max(int(ordered_T[0]), -(-int(ordered_T.sum()) // rows), 1)
    found = pack(ordered_T, capacity=high, window=window)
    while len(found.bins) > rows:
        low, high = high + 1, high + max(high // 16, 1)
        found = pack(ordered_T, capacity=high, window=window)
    while high - low > low // 256:
        middle = (low + high) // 2
        tried = pack(ordered_T, capacity=middle, window=window)
        if len(tried.bins) > rows:
            low = middle + 1
        else:
            found, high = tried, middle
    bin_T = np.empty(tokens_T.size, dtype=np.int64)
    bin_T[order] = found.bin_of_item
    return bin_T, max(int(np.bincount(bin_T, weights=tokens_T).max()), 1)


def _placed(grown: Trees, prompt_B: Ints, completion_B: Ints, bin_T: Ints, width: int) -> Dense:
    start_B, first_B, tree_B = (np.zeros(prompt_B.size, dtype=np.int64) for _ in range(3))
    end = (np.arange(int(bin_T.max()) + 1) * width).tolist()
    for tree, (members, row) in enumerate(zip(grown.members_T, bin_T.tolist(), strict=True)):
        for number, b in enumerate(members.tolist()):
            first_B[b] = prompt_B[b] - 1 if number else 0
            start_B[b] = end[row] - first_B[b]
            end[row] += int(prompt_B[b] + completion_B[b] - first_B[b])
            tree_B[b] = tree
    return Dense(len(end), width, start_B, first_B, tree_B, int(grown.tokens_T.sum()))


def flat(prompt_B: Ints, completion_B: Ints) -> Dense:
    """One row, sequence after sequence, for attention that is told where each begins."""
    length_B = prompt_B + completion_B
    start_B = np.cumsum(length_B) - length_B
    total = int(length_B.sum())
    index_B = np.arange(length_B.size)
    return Dense(1, total, start_B, np.zeros_like(index_B), index_B, total)
