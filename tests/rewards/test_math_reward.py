"""Final answers in mathematics: what is extracted, what is right, what is counted."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="pip install 'math-verify[antlr4_13_2]'")

from dppo.errors import ConfigurationError, InvalidInputError
from dppo.rewards import MathReward, math_reward
from dppo.rewards.extract import final_answer

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def reward():
    found = MathReward(workers=2)
    yield found
    found._pool.close()


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"\boxed{8,000}", "8000", 1),
        (r"\boxed{$9{,}500}", "9500", 1),
        ("The total is 72 clips, altogether.", "72", 1),
        ("[8.124,12.852]", "[8.124, 12.852]", 1),
        (r"\boxed{[8.124,12.852]}", "[8.124, 12.852]", 1),
        (r"\boxed{[8,124]}", "[8124]", 0),
        ("#### 42\n" + "As I have said before. " * 25, "42", 1),
        (r"\boxed{3} ... \boxed{", "3", 0),
        ("see figure", "see figure", None),
        (r"\boxed{see figure}", "see figure", None),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        ("", "5", 0),
        (r"\boxed{\frac13}", "1/3", 1),
        (r"\boxed{5}", "7", 0),
        (r"\boxed{x+1}", "1+x", 1),
        (r"\boxed{\text{ even }}", r"\text{Even}", 1),
        (r"\boxed{Monday}", r"\text{Tuesday}", 0),
        (r"first \boxed{1}, then \boxed{2}", "2", 1),
        (r"\boxed{\begin{pmatrix} 1 \\ -2 \end{pmatrix}}", r"\begin{pmatrix}1\-2\end{pmatrix}", 1),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\-2\end{pmatrix}", 0),
    ],
)
def test_answers(reward, completion, gold, expected):
    assert reward([completion], answer=[gold]) == [expected]


def test_messages_and_whatever_else_is_passed(reward):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": r"\boxed{2}"}]
    assert reward([messages], answer=["2"], prompts=["?"], trainer_state=None) == [1]
    assert reward([], answer=[]) == []
    with pytest.raises(InvalidInputError, match="equal length, got 1 and 2"):
        reward(["1"], answer=["1", "2"])
    with pytest.raises(InvalidInputError, match="must be a text"):
        reward([3], answer=["1"])


def test_what_cannot_be_read_is_counted_apart():
    reward, logged = MathReward(workers=1), {}
    scores = reward(
        [r"\boxed{1", r"\boxed{1}", "1", r"\boxed{2}"],
        answer=["1", "no answer given", "1", "1"],
        log_metric=lambda name, value: logged.update({name: value}),
    )
    assert scores == [0, None, 1, 0]
    assert logged == {
        "math/unparseable_answer": 0.25,
        "math/unparseable_gold": 0.25,
        "math/timeout": 0,
    }
    assert reward.counts == {"right": 1, "wrong": 1, "no answer": 1, "no gold": 1}


def test_from_any_thread(reward):
    """The main thread, a worker thread, several at once, and asyncio."""
    arguments = ([r"\boxed{\frac13}"] * 4, ["1/3"] * 4)
    assert reward(*arguments) == [1] * 4
    found = []
    threads = [threading.Thread(target=lambda: found.append(reward(*arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1] * 4] * 4

    async def awaited():
        return await asyncio.gather(*(asyncio.to_thread(reward, *arguments) for _ in range(2)))

    assert asyncio.run(awaited()) == [[1] * 4] * 2

    async def inside():
        return reward(*arguments)

    assert asyncio.run(inside()) == [1] * 4


def test_a_power_tower_ends_within_the_limit_and_the_next_item_is_judged():
    reward = MathReward(5.0, workers=1)
    assert reward([r"\boxed{1}"], answer=["1"]) == [1]  # the process is there
    tower = "so it is\n$2003^{2002^{2001}}$"
    for _ in range(2):
        began = time.monotonic()
        assert reward([tower], answer=["241"]) == [None]
        assert time.monotonic() - began < 7
        reward._pool.judge([("1", r"\boxed{1}")])  # started anew, not counted
    assert reward.counts["timeout"] == 2
    assert reward([r"\boxed{\frac13}"], answer=["1/3"]) == [1]
    zero = MathReward(0.5, on_timeout=0.0, workers=1)
    assert zero([tower], answer=["241"]) == [0.0]


def test_wrong_options():
    for options in ({"time_limit": 0}, {"time_limit": float("inf")}, {"workers": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            MathReward(**options)


def test_the_function_is_a_reward_function_with_a_name():
    assert math_reward.__name__ == "math_reward"
    assert math_reward([r"\boxed{2}"], ["2"]) == [1]


def test_final_answers():
    assert final_answer(r"\boxed 5.") == ("5", True)
    assert final_answer(r"\boxed{}") is None
    assert final_answer(r"\boxed{\{1,2\}}") == (r"\{1,2\}", True)
    assert final_answer("   ") is None
    assert final_answer("####") is None


@pytest.mark.skipif(not DATA.is_dir(), reason="no copies of GSM8K and MATH beside the checkout")
def test_gold_answers_are_right(reward):
    """All of GSM8K; of MATH all but a few that are damaged in the published copies."""
    import pandas as pd

    damaged = {"math_train": 17}
    for name, column in (
        *(("gsm8k_train", "final"), ("gsm8k_test", "final")),
        *(("math_train", "answer"), ("math500_test", "answer")),
    ):
        golds = pd.read_parquet(DATA / f"{name}.parquet")[column].astype(str).tolist()
        scores = reward([f"So it is $\\boxed{{{gold}}}$." for gold in golds], answer=golds)
        unread = [gold for gold, score in zip(golds, scores, strict=True) if score != 1]
        assert len(unread) <= damaged.get(name, 0), unread
        assert all(score is None for score in scores if score != 1)  # none is called wrong


@pytest.mark.skipif(not DATA.is_dir(), reason="no copies of GSM8K and MATH beside the checkout")
def test_other_answers_are_wrong(reward):
    """Each gold answer against that of the next problem, unless they are equal."""
    import pandas as pd

    golds = pd.read_parquet(DATA / "math500_test.parquet")["answer"].astype(str).tolist()[:200]
    others = [*golds[1:], golds[0]]
    scores = reward([f"\\boxed{{{other}}}" for other in others], answer=golds)
    right = [(g, o) for g, o, s in zip(golds, others, scores, strict=True) if s]
    assert {(g, o) for g, o in right if g != o} <= {("5", "x=5")}  # names the unknown, and is right
