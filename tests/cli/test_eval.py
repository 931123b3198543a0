"""`dppo eval`: the estimator, canned completions through the files, going on, and refusals."""

import itertools
import json

import pytest

pytest.importorskip("transformers")

from dppo.cli.eval import folder_name
from dppo.cli.main import main
from dppo.evaluation import (
    Benchmark,
    Item,
    RecordFile,
    Settings,
    evaluate_benchmark,
    measure,
    over_benchmarks,
    over_items,
    pass_at_k,
    table,
)

CANNED = {  # item: greedy, then four samples, of which some are right
    0: ("right", ["right", "wrong", "wrong", "wrong"]),
    1: ("wrong", ["right", "right", "right", "wrong"]),
    2: ("wrong", ["wrong", "wrong", "wrong", "wrong"]),
    3: ("right", ["right", "right", "right", "right"]),
}


class Canned:
    """Answers by prompt, and counts what it was asked for."""

    context = 50

    def __init__(self):
        self.asked = 0

    def encode(self, prompt):
        return [int(prompt)] * (60 if prompt == "9" else 3)

    def complete(self, rows, *, seeds, max_new_tokens, temperature):
        self.asked += len(rows)
        if seeds is None:
            return [CANNED[row[0]][0] for row in rows]
        places = {}
        texts = []
        for row in rows:
            place = places.setdefault(row[0], itertools.count())
            texts.append(CANNED[row[0]][1][next(place)])
        return texts


def scored(completions, prompts, **kwargs):
    pairs = zip(completions, prompts, strict=True)
    return [None if prompt == "8" else float(text == "right") for text, prompt in pairs]


def benchmark_of(*numbers):
    items = [Item(n, str(n), {"answer": "right"}) for n in numbers]
    return Benchmark("canned", items, scored)


SETTINGS = Settings(samples=4, max_new_tokens=8, temperature=1.0, batch_size=64, seed=0)


def test_pass_at_k_is_the_chance_over_all_draws():
    for n, k in itertools.product(range(1, 7), range(1, 7)):
        for correct in range(n + 1):
            if k > n:
                continue
            draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(n, correct, k) == pytest.approx(share)
    for wrong in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*wrong)


def test_canned_completions_by_hand(tmp_path):
    """Greedy 2 of 4; pass@1 (1/4 + 3/4 + 0 + 1) / 4 = 0.5; pass@2 (1/2 + 1 + 0 + 1) / 4 = 0.625."""
    policy, path = Canned(), tmp_path / "m" / "canned.jsonl"
    file, done = RecordFile(path), []
    evaluate_benchmark(policy, benchmark_of(*CANNED), SETTINGS, file=file, advance=done.append)
    assert done == list(range(1, 9))
    for records in (file.records, RecordFile(path).records):  # as made, and as read again
        found = measure(records, list(CANNED), [1, 2, 4])["measures"]
        assert found["greedy pass@1"].mean == 0.5
        assert found["pass@1"].mean == pytest.approx(0.5)
        assert found["pass@2"].mean == pytest.approx(0.625)
        assert found["pass@4"].mean == 0.75
        # Of 1, 0, 0, 1: sample variance 1/3.
        assert found["greedy pass@1"].standard_error == pytest.approx((1 / 3 / 4) ** 0.5)


def test_a_stopped_evaluation_goes_on(tmp_path):
    path = tmp_path / "canned.jsonl"
    evaluate_benchmark(
        Canned(), benchmark_of(*CANNED), SETTINGS, file=RecordFile(path), advance=lambda done: None
    )
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:20])  # killed while it wrote the sixth
    policy = Canned()
    evaluate_benchmark(
        policy, benchmark_of(*CANNED), SETTINGS, file=RecordFile(path), advance=lambda done: None
    )
    assert policy.asked == 3 * 4  # three items were left, sampled
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())


def test_what_fails_is_counted_and_left_out(tmp_path):
    CANNED[8] = CANNED[3]
    try:
        file = RecordFile(tmp_path / "x.jsonl")
        items = benchmark_of(0, 3, 8, 9)  # 8 has no score, 9 no room
        evaluate_benchmark(Canned(), items, SETTINGS, file=file, advance=lambda done: None)
    finally:
        del CANNED[8]
    found = measure(file.records, [0, 3, 8, 9], [1])
    assert (found["failed"], found["skipped"], found["unscored"]) == (0, 2, 2)
    greedy = found["measures"]["greedy pass@1"]
    assert (greedy.mean, greedy.count, greedy.left_out) == (1.0, 2, 2)
    assert "2 skipped, 2 unscored" in "\n".join(table({"m": {"canned": found}}))


def test_the_mean_over_benchmarks_weighs_them_alike():
    mean = over_benchmarks([over_items([1.0, 1.0, 0.0, 0.0]), over_items([1.0, 1.0])])
    assert mean.mean == 0.75
    assert mean.standard_error == pytest.approx((1 / 3 / 4) ** 0.5 / 2)


TINY = ["--benchmarks", "builtin", "--limit", "6", "--max-new-tokens", "20", "--batch-size", "5"]


def test_the_command_on_the_builtin_model(tmp_path, capsys):
    from dppo.tasks import builtin_path

    words = ["eval", "builtin", str(builtin_path()), *TINY, "--samples", "3", "--k", "1", "3"]
    words += ["--output-dir", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    for text in ("greedy pass@1", "pass@3", "item 12/12", "builtin"):
        assert text in out
    content = json.loads((tmp_path / "eval.json").read_text(), parse_constant=pytest.fail)
    assert content["command"].startswith("dppo eval builtin")
    first, second = content["models"].values()
    assert first == second  # the same model under two names, with the same seeds
    lines = (tmp_path / "builtin" / "builtin.jsonl").read_text().splitlines()
    assert len(lines) == 12
    record = json.loads(lines[-1])
    assert record["mode"] == "sampled"
    assert len(record["completions"]) == len(record["scores"]) == 3

    assert main(words) == 0  # nothing is made again
    assert (tmp_path / "builtin" / "builtin.jsonl").read_text().splitlines() == lines
    assert main([*words, "--seed", "1"]) == 2
    assert "seed was 0, is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["builtin", "--benchmarks", "gsm9k"], "there is no 'gsm9k'"),
        (["builtin", *TINY, "--samples", "2", "--k", "3"], "pass@3 needs 1 <= k <= --samples"),
        (["builtin", *TINY, "--temperature", "0"], "temperature must be > 0"),
        (["builtin", "builtin", *TINY], "builtin is there twice"),
        (["builtin", *TINY, "--batch-size", "0"], "batch_size must be at least 1"),
        (["./nowhere", *TINY], "there is no directory ./nowhere"),
        (["builtin", *TINY, "--chat", "--max-new-tokens", "100000"], "leaves room"),
    ],
)
def test_refusals(tmp_path, words, message, capsys):
    assert main(["eval", *words, "--output-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_folders_of_models():
    assert folder_name("Qwen/Qwen3-4B") == "Qwen--Qwen3-4B"
    assert folder_name("/a/runs/x/") == "a--runs--x"
