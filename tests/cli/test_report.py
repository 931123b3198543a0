"""`dppo report`, from records written by hand."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dppo.cli.main import main
from dppo.errors import ConfigurationError
from dppo.report import RunData, make_page, make_pictures, read_runs
from dppo.report.derived import moving_average
from dppo.report.difficulty import solved
from dppo.report.read import distinct_names
from dppo.report.table import headline

REASONS = {"all_right": 8.0, "all_wrong": 16.0, "constant": 0.0, "masked": 4.0, "sampled_out": 100}


def _pruned(step, **changes):
    """256 completions, 128 of them kept."""
    record = {
        "step": step,
        "max_steps": 4,
        "loss": 0.0,
        "reward": 0.1 * step,
        "completions/mean_length": 10.0,
        "dppo/completions/live": 0.875,
        "dppo/completions/keep": 0.5,
        "dppo/cost/keep": 0.45,
        "dppo/tokens/generated": 2560.0,
        "dppo/tokens/trained": 1200.0,
        **{f"dppo/dropped/{reason}": count for reason, count in REASONS.items()},
        "dppo/time/rollout": 1.0,
        "dppo/time/score": 0.25,
        "dppo/time/prune": 0.25,
        "dppo/time/train": 0.5,
        "dppo/weight/ess": 0.9,
    }
    return {**record, **changes}


def _trl(step):
    return {"step": step, "max_steps": 4, "loss": 0.0, "reward": 0.5, "frac_reward_zero_std": 0.25}


def _summary(**changes):
    summary = {
        "reward_before": 0.4,
        "reward_before_standard_error": 0.02,
        "reward_after": 0.6,
        "reward_after_standard_error": 0.03,
        "steps": 4,
        "resumed_from_step": None,
        "interrupted": False,
        "wall_seconds": 130.0,
        "completion_tokens_generated": 10240,
        "completion_tokens_trained": 5120,
        "completion_tokens_skipped": {"sampled_out": 5120, "masked": 0},
        "prompts_candidates": 128,
        "prompts_rolled_out": 128,
        "effective_sample_size": 0.91,
        "seconds": {"rollout": 6.0, "score": 0.0, "train": 3.0, "prune": 1.0},
        "config": {"completion_keep": 0.5, "seed": 0},
        "versions": {"dppo": "0.1.0"},
    }
    return {**summary, **changes}


def _write(folder: Path, records, *, summary=None, tail="") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _read(folder: Path, records, **options) -> RunData:
    return read_runs([_write(folder, records, **options)])[0]


def _cells(run):
    return {label: cells[0] for label, cells in headline([run])[0]}


def _page(run):
    return make_page([run], make_pictures([run]), title="t")


# Numbers


def test_seconds_of_steps_add_up(tmp_path):
    records = [
        _pruned(1, step_seconds=3.0, step_cpu_seconds=5.0),
        {"step": 1, "eval_reward": 0.3},  # an evaluation takes no time here
        _pruned(3, step_seconds=4.0, step_cpu_seconds=6.5),
        {"step": 3, "train_runtime": 99.0, "step_seconds": 0.5, "step_cpu_seconds": 0.5},
    ]
    run = _read(tmp_path, records)
    assert run.clock.wall_S.tolist() == [3.0, 7.5]
    assert run.clock.cpu == 12.0
    assert run.clock.source == ("step_seconds",)
    assert run.columns["eval_reward"][0] == 0.3
    assert run.column("reward")[1].tolist() == pytest.approx([0.1, 0.3])


def test_without_them_the_phases_times_the_steps(tmp_path):
    # 2 s a step: 10 steps, then, past an evaluation in between, 10 more
    run = _read(tmp_path, [_pruned(10), {"step": 15, "eval_reward": 0.5}, _pruned(20)])
    assert run.clock.wall_S.tolist() == [20.0, 30.0, 40.0]
    assert run.clock.phases == {"rollout": 20.0, "score": 5.0, "prune": 5.0, "train": 10.0}
    assert run.clock.cpu is None
    assert run.clock.source == ("dppo/time/*",)


def test_the_hosts_time_of_a_step(tmp_path):
    run = _read(tmp_path, [{**_trl(2), "step_time": 0.5}, {**_trl(4), "step_time": 1.0}])
    assert run.clock.wall_S.tolist() == [1.0, 3.0]
    assert "step_time, which leaves the optimizer out" in _page(run)


def test_moving_average():
    values = np.array([1.0, 2.0, 6.0, 4.0])
    assert moving_average(values, 3).tolist() == [1.0, 1.5, 3.0, 4.0]
    assert moving_average(values, 1).tolist() == values.tolist()
    assert moving_average(np.empty(0), 3).size == 0


def test_completions_by_reason_add_up_to_all(tmp_path):
    run = _read(tmp_path, [_pruned(1)])
    counts = {name: run.columns[f"count/{name}"][0] for name in ("kept", *REASONS)}
    assert counts == {"kept": 128.0, **REASONS}
    assert sum(counts.values()) == 256
    shares = {k: v[0] for k, v in run.columns.items() if k.startswith("share/")}
    assert shares == {
        "share/all_right": 8 / 256,
        "share/signal": 0.875,
        "share/other": 1 - 24 / 256 - 0.875,  # masked
        "share/all_wrong": 16 / 256,
    }


def test_completions_where_all_were_kept(tmp_path):
    nothing = {f"dppo/dropped/{reason}": 0.0 for reason in REASONS}
    kept = {"dppo/completions/keep": 1.0, "dppo/completions/live": 1.0}
    run = _read(tmp_path, [_pruned(1, **nothing, **kept)])
    assert run.columns["count/kept"].tolist() == [256.0]  # 2560 tokens of 10 each
    assert run.columns["share/signal"].tolist() == [1.0]


def test_the_rate_that_was_set(tmp_path):
    def rate(name, records, **config):
        run = _read(tmp_path / name, records, summary=_summary(config=config))
        return run.column("rate")[1].tolist()

    assert rate("fixed", [_pruned(1)], completion_keep=0.25) == [0.25]
    assert rate("shadow", [_pruned(1)], completion_keep="shadow") == [0.5]
    assert rate("shadow2", [_pruned(1)], completion_keep="shadow:0.3") == [0.3]
    auto = [_pruned(1, **{"dppo/auto/rate": 0.7})]
    assert rate("auto", auto, completion_keep="auto") == [0.7]
    assert rate("inert", [_pruned(1)], completion_keep=0.5, completion_rule="inert") == []


def test_the_reward_of_drawn_prompts_is_the_estimate(tmp_path):
    record = _pruned(1, **{"dppo/prompts/keep": 0.6, "dppo/reward/ht": 0.44})
    run = _read(tmp_path, [record])
    assert run.column("reward_shown")[1].tolist() == [0.44]
    assert "dppo/reward/ht, the estimate" in _page(run)


def test_prompts_by_share_of_right_completions():
    early = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    late = [[1, 1, 1], [1, 1, 1], [1, 1, math.nan], [1, 1, 1]]
    found = solved(np.array([*early, *early, *late], float), "r.npz")
    assert found.prompts == 4
    assert found.early.tolist() == [0.25, 0, 0.5, 0, 0.25]  # 1/3 and 2/3 are in the middle
    assert found.late.tolist() == [0, 0, 0, 0, 1]
    assert solved(np.zeros((12, 4)), "nothing.npz") is None
    assert solved(np.ones((5, 4)), "few.npz") is None


def test_headline(tmp_path):
    cells = _cells(_read(tmp_path, [_pruned(4, step_seconds=8.0)], summary=_summary()))
    assert cells["state"] == "finished"
    assert cells["held-out reward before"] == "0.400 ± 0.020"
    assert cells["wall (whole run)"] == "2 min 10 s"
    assert cells["wall (optimizer steps)"] == "8.0 s"
    assert cells["time in rollout"] == "6.0 s (60%)"
    assert cells["tokens trained"] == "5,120 (50.0%)"
    assert cells["skipped: sampled out"] == "5,120"
    assert "skipped: masked" not in cells
    assert cells["effective sample size"] == "0.91"


def test_zero_is_shown_where_another_run_has_more(tmp_path):
    none = _summary(completion_tokens_skipped={"sampled_out": 0})
    runs = [
        _read(tmp_path / "a", [_pruned(4)], summary=_summary()),
        _read(tmp_path / "b", [_pruned(4)], summary=none),
        _read(tmp_path / "c", [_pruned(4)]),
    ]
    rows = dict(headline(runs)[0])
    assert rows["skipped: sampled out"] == ["5,120", "0", None]


# What runs leave


def test_a_run_in_progress(tmp_path):
    run = _read(tmp_path, [_pruned(1), _pruned(2)], tail='{"step": 3, "rew')
    assert run.steps_S.tolist() == [1, 2]
    assert _cells(run)["state"] == "no end yet, step 2 of 4"
    page = _page(run)
    assert "the last line of metrics.jsonl is half written" in page
    assert "no summary.json" in page
    assert "Not recorded by any run: held-out reward before" in page


def test_lines_that_are_no_records(tmp_path):
    folder = _write(tmp_path, [_pruned(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('3\n{"reward": 1}\n\n{"step": 2, "reward": NaN, "loss": 0.5, "word": "x"}\n')
    run = read_runs([folder])[0]
    assert run.steps_S.tolist() == [1, 2]
    assert run.column("reward")[0].tolist() == [1]
    assert "2 unreadable lines" in " ".join(run.notes)


def test_a_broken_summary(tmp_path):
    folder = _write(tmp_path, [_pruned(1)])
    (folder / "summary.json").write_text('{"steps": ')
    assert "summary.json cannot be read" in " ".join(read_runs([folder])[0].notes)


def test_a_resumed_run(tmp_path):
    ten = _pruned(12)
    begun = _read(tmp_path / "fresh", [ten], summary=_summary(resumed_from_step=10))
    assert begun.clock.wall_S.tolist() == [4.0]  # two steps, not twelve
    assert "resumed at 10, totals since" in _cells(begun)["state"]
    same = _read(tmp_path / "same", [_pruned(8), ten], summary=_summary(resumed_from_step=10))
    assert same.clock.wall_S.tolist() == [16.0, 24.0]
    again = [_pruned(step, step_seconds=1.0) for step in (1, 2, 3, 2, 3, 4)]
    appended = _read(tmp_path / "appended", again)
    assert appended.steps_S.tolist() == [1, 2, 3, 4]
    assert "steps back" in " ".join(appended.notes)


def test_nothing_recorded_yet(tmp_path):
    run = _read(tmp_path, [])
    assert "no records yet" in run.notes
    assert not [picture for picture in make_pictures([run]) if picture.png]
    assert "<img" not in _page(run)


def test_a_trl_run_leaves_out_what_it_lacks(tmp_path):
    run = _read(tmp_path, [_trl(1), _trl(2)])
    pictures = {picture.key: picture for picture in make_pictures([run])}
    drawn = {key for key, picture in pictures.items() if picture.png}
    assert drawn == {"reward-steps", "difficulty"}
    assert "with signal 0.75, without signal 0.25" in pictures["difficulty"].alt
    page = make_page([run], list(pictures.values()), title="t")
    assert "Not drawn, for lack of records: Reward over wall-clock time" in page
    assert "tokens generated" in page.split("Not recorded by any run")[1].split("<")[0]
    assert '<th scope="row">tokens generated' not in page
    assert not {">0</td>", ">0.0 s</td>", ">0.00</td>"} & set(re.findall(r">[^<>]*</td>", page))


def test_a_recording_and_files_that_are_none(tmp_path):
    folder = _write(tmp_path, [_pruned(1)])
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 half")
    np.savez(folder / "other.npz", something=np.ones(3))
    rewards = np.array([[1.0, 0.0]] * 6)
    np.savez(folder / "rollouts.npz", reward_NG=rewards, completion_tokens_NG=np.ones((6, 2)))
    run = read_runs([folder])[0]
    assert run.solved.source == "rollouts.npz"
    assert run.solved.early.tolist() == [0, 0, 1, 0, 0]
    assert len([note for note in run.notes if "no recording" in note]) == 2
    assert {picture.key for picture in make_pictures([run]) if picture.png} >= {"prompts"}


def test_names_are_told_apart(tmp_path):
    paths = [_write(tmp_path / parent / "run", [_pruned(1)]) for parent in "ab"]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run"]
    metrics = paths[0] / "metrics.jsonl"
    assert [run.name for run in read_runs([metrics])] == ["run"]
    twice = [run.name for run in read_runs([paths[0], metrics])]
    assert len(set(twice)) == 2
    assert distinct_names([Path("/a/x/r"), Path("/b/x/r"), Path("/c")]) == ["a/x/r", "b/x/r", "c"]


def test_missing_runs_are_named(tmp_path, capsys):
    with pytest.raises(ConfigurationError, match=r"nowhere does not exist"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigurationError, match=r"has no metrics\.jsonl"):
        read_runs([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist; give the output_dir" in capsys.readouterr().err


# The page


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags, self.alts = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in {"src", "href", "srcset"}]
        self.alts += [value for name, value in attrs if name == "alt"]


def _report(tmp_path, *arguments):
    out = tmp_path / "out" / "page.html"
    assert main(["report", *map(str, arguments), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(tmp_path, capsys):
    records = [_pruned(step, eval_reward=0.5) for step in range(1, 41)]
    runs = [_write(tmp_path / "a", records, summary=_summary()), _write(tmp_path / "b", records)]
    pngs = tmp_path / "pngs"
    page = _report(tmp_path, *runs, "--png-dir", pngs)
    links = _Links()
    links.feed(page)
    assert links.found
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert len(links.alts) == len(links.found) == len(list(pngs.glob("*.png")))
    assert all(links.alts)
    assert not re.search(r"https?://|@import|url\(", page)
    assert not links.tags & {"script", "link", "iframe"}
    assert "the mean of the last 4 records" in page
    assert "2 runs" in capsys.readouterr().out
    assert _report(tmp_path, *runs) == page


def test_names_are_escaped(tmp_path):
    name = "_<b>&\"quoted\" $x$ 'run'"
    run = _write(tmp_path / name, [_pruned(1), _pruned(2)], summary=_summary(config={"<k>": "<v>"}))
    other = _write(tmp_path / "other", [_trl(1)])
    page = _report(tmp_path, run, other, "--title", "<i>title</i>")
    assert "<b>" not in page
    assert "<i>" not in page
    assert "_&lt;b&gt;&amp;&quot;quoted&quot; $x$ &#x27;run&#x27;" in page
    assert "&lt;k&gt;" in page
    assert "&lt;v&gt;" in page
    links = _Links()
    links.feed(page)
    assert any(name in alt for alt in links.alts)


def test_options_that_differ_are_side_by_side(tmp_path):
    configs = [{"seed": 0, "completion_keep": keep, "unset": None} for keep in (0.5, 1.0)]
    runs = [
        _write(tmp_path / str(i), [_trl(1)], summary=_summary(config=config))
        for i, config in enumerate(configs)
    ]
    page = _report(tmp_path, *runs)
    assert 'completion_keep</th><td class="text">0.5</td><td class="text">1.0</td>' in page
    assert "<li>seed: 0</li>" in page
    assert "<li>version of dppo: 0.1.0</li>" in page
    assert "unset" not in page


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    run = _write(tmp_path / "r", [_trl(1)])
    assert main(["report", str(run), "--out", str(run)]) == 2
    assert "--out" in capsys.readouterr().err


def test_matplotlib_is_optional(tmp_path, capsys, monkeypatch):
    run = _write(tmp_path / "r", [_trl(1)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run)]) == 2
    assert "pip install 'dppo[plots]'" in capsys.readouterr().err


def test_imports_stay_light():
    code = "import sys, dppo, dppo.cli.report; assert 'matplotlib' not in sys.modules; "
    code += (
        "import dppo.report; assert not {'torch', 'transformers', 'matplotlib'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
