r"""Where in a completion the final answer is, and answers that need no algebra to be compared.

The last \boxed counts: if it is not closed, there is no answer. Without any, what follows the last
"####"; without that, the whole text, in which math-verify looks for the last expression.
"""

import re
from fractions import Fraction

BOX = "\\boxed"
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")
SPACE = re.compile(r"(?<!\\)\\[!,; ]")
ROW = re.compile(r"(?<!\\)\\(?![A-Za-z\\{}])")
"""A row of a matrix that lost one of its two backslashes, as in published copies of MATH."""
WORDS = re.compile(r"[A-Za-z]+([ ,;]+[A-Za-z]+)+[.]?")
TEXT = re.compile(r"\\(?:text|textbf|mbox|mathrm|textrm)\{([^{}]*)\}")


def final_answer(text: str) -> tuple[str, bool] | None:
    r"""The part of a completion that holds its answer.

    Returns:
        The text, and whether it is the answer itself (of a box, or after "####") rather than
        something in which to look for one; None if there is none.

    Example:
        >>> final_answer(r"so \boxed{\frac{1}{2}}."), final_answer(r"\boxed{3} or \boxed{")
        (('\\frac{1}{2}', True), None)
        >>> final_answer("#### 42\nas I said"), final_answer("It is 7.")
        (('42', True), ('It is 7.', False))
    """
    if not text.strip():
        return None
    start = text.rfind(BOX)
    if start >= 0:
        content = _braced(text[start + len(BOX) :].lstrip())
        return None if content is None or not content.strip() else (content.strip(), True)
    if "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        return (lines[0].strip(), True) if lines else None
    return text, False


def _braced(text: str) -> str | None:
    r"""Content of the braces that `text` begins with; of \boxed 5 the 5; None if never closed."""
    if not text.startswith("{"):
        return text.split(maxsplit=1)[0].rstrip("$.,") if text.split() else None
    depth = 0
    for place, character in enumerate(text):
        if character in "{}" and text[place - 1 : place] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[1:place]
    return None


def normalised(answer: str) -> str:
    r"""The same answer without what only typesets it.

    Commas are taken out of a number that has them at thousands, and of nothing else, so that the
    entries of a list stay apart.

    Example:
        >>> normalised(r"$9{,}500"), normalised(r"\dfrac{1}{2}."), normalised("[8.1, 2,000]")
        ('9500', '\\frac{1}{2}', '[8.1,2,000]')
    """
    text = SPACE.sub(" ", answer.strip().replace("{,}", ","))
    for old, new in (
        *(("~", " "), ("\\$", ""), ("$", ""), ("\\left", ""), ("\\right", "")),
        *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac")),
    ):
        text = text.replace(old, new)
    if "matrix}" in text:
        text = ROW.sub(r"\\\\", text)
    text = text.strip().removesuffix(".").strip()
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?([,=+\-*/(){}\[\]<>^_|]) ?", r"\1", text)
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def number(answer: str) -> Fraction | None:
    """Its value, if a normalised answer is a plain decimal number.

    Example:
        >>> number("0.50"), number("1/2")
        (Fraction(1, 2), None)
    """
    return Fraction(answer) if NUMBER.fullmatch(answer) else None


def words(answer: str) -> str | None:
    r"""A normalised answer in words, such as \text{even} or Evelyn, in small letters; else None.

    Example:
        >>> words(r"\text{Evelyn}"), words("x"), words("3")
        ('evelyn', None, None)
    """
    bare = TEXT.sub(r"\1", answer).strip()
    plain = bare.strip("() .").lower()
    wordy = bare != answer.strip() or len(plain) > 1
    return plain if wordy and re.fullmatch(r"[a-z][a-z ,\-']*", plain) else None


def is_remark(answer: str) -> bool:
    """Whether a gold answer is several plain words, such as "see figure": nothing to compare with.

    Example:
        >>> is_remark("see figure"), is_remark("even"), is_remark("x + 1")
        (True, False, False)
    """
    return WORDS.fullmatch(answer.strip()) is not None
