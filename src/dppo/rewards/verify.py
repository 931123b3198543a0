"""One completion against one gold answer. Slow, and may hang on adversarial input: see `pool`."""

from dppo.rewards.extract import final_answer, is_remark, normalised, number, words

RIGHT, WRONG, NO_ANSWER, NO_GOLD = "right", "wrong", "no answer", "no gold"


def judge(gold: str, completion: str) -> str:
    r"""What a completion is worth.

    Args:
        gold: The right answer: a number, LaTeX, or a word.
        completion: Text.

    Returns:
        `RIGHT`, `WRONG`, `NO_ANSWER` (none found, or none that can be read), or `NO_GOLD` (the gold
        answer cannot be read).

    Example:
        >>> judge("8000", r"So it is \boxed{8,000}."), judge("see figure", "see figure")
        ('right', 'no gold')
    """
    right = normalised(gold)
    simple = number(right) is not None or words(right) is not None
    parsed = [] if simple else _parse(right, itself=True)
    if not right or is_remark(gold) or not (simple or parsed):
        return NO_GOLD
    found = final_answer(completion)
    if found is None:
        return NO_ANSWER
    text, itself = found
    verdict = _compared(right, normalised(text), itself=itself)
    if verdict is not None:
        return verdict
    read = _parse(normalised(text) if itself else text, itself=itself)
    return _verified(parsed or _parse(right, itself=True), read) if read else NO_ANSWER


def _compared(right: str, answer: str, *, itself: bool) -> str | None:
    """What needs no algebra: equal texts, numbers, words; None if it does."""
    if answer == right:
        return RIGHT
    if not itself:
        return None
    value, other = number(right), number(answer)
    if value is not None and other is not None:
        return RIGHT if value == other else WRONG
    if words(right) is not None:
        return RIGHT if words(answer) == words(right) else WRONG
    return None


def _verified(gold: list, answer: list) -> str:
    from math_verify import verify  # noqa: PLC0415 - seconds to import

    return RIGHT if verify(gold, answer, timeout_seconds=None) else WRONG


def _parse(answer: str, *, itself: bool) -> list:
    from math_verify import parse  # noqa: PLC0415 - seconds to import

    text = f"\\boxed{{{answer}}}" if itself else answer
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]
