import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dppo.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"

HEAVY = ("torch", "transformers", "datasets", "trl")
THREE_PROCESSES = [
    "plan",
    "--num-prompts",
    "8000",
    "--num-processes",
    "3",
    "--per-device-train-batch-size",
    "4",
    "--gradient_accumulation_steps=2",
    "--num-generations",
    "6",
    "--num-train-epochs",
    "2",
]


def _json(capsys, *arguments):
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_table(capsys):
    assert main([*THREE_PROCESSES, "--solve-rate", "0.1819"]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert values["prompts per step"] == "4"
    assert values["steps in total"] == "4,000"
    assert values["rollouts in total"] == "96,000"
    assert values["remainder"] == "0 of 8,000 prompts unused per epoch"
    dead = values["dead groups at solve rate 0.1819"]
    for text in ("G=2 70.2%", "G=8 20.1%", "G=16 4.0%", "G=6"):
        assert text in dead


def test_json_has_the_same_numbers(capsys):
    plan = _json(capsys, *THREE_PROCESSES[1:], "--solve-rate", "0.1819", "--completion-keep", "0.5")
    assert (plan["prompts_per_step"], plan["total_steps"]) == (4, 4000)
    assert plan["completions_total"] == 96_000
    assert plan["legal_group_sizes"] == [2, 3, 4, 6, 8, 12, 24]
    dead = plan["dead_group_probability"]["6"]
    assert plan["expected_trained_per_step"] == pytest.approx(24 * (1 - dead) * 0.5)
    assert plan["expected_trained_total"] == pytest.approx(96_000 * (1 - dead) * 0.5)


def test_keep_without_solve_rate_and_off(capsys):
    assert _json(capsys, "--completion-keep", "0.25")["expected_trained_per_step"] == 2
    assert _json(capsys, "--completion-keep", "shadow")["expected_trained_per_step"] == 8
    off = ("--completion-keep", "1.0", "--solve-rate", "0.5")
    assert _json(capsys, *off)["expected_trained_per_step"] == 8
    inert = ("--completion-rule", "inert", "--solve-rate", "0.5")
    assert _json(capsys, *inert)["expected_trained_per_step"] == 8 * (1 - 2 / 2**8)
    threshold = _json(capsys, "--completion-rule", "threshold")
    assert threshold["expected_trained_per_step"] is None
    assert _json(capsys, "--completion-keep", "shadow:0.25")["expected_trained_per_step"] == 8
    default = _json(capsys)
    assert default["completion_keep"] == "auto"
    assert default["expected_trained_per_step"] is None
    auto = ("--completion-keep", "auto", "--completion-rule", "inert", "--solve-rate", "0.5")
    assert _json(capsys, *auto)["expected_trained_per_step"] == 8 * (1 - 2 / 2**8)
    main(["plan"])
    assert "chosen while training" in capsys.readouterr().out
    assert main(["plan", "--completion-keep", "1.5"]) == 2


def test_defaults_are_those_of_trl(capsys):
    plan = _json(capsys, "--num-prompts", "128")
    assert plan["settings"]["per_device_train_batch_size"] == 8
    assert plan["settings"]["num_generations"] == 8
    assert plan["total_steps"] == 384


def test_illegal_arithmetic_is_exit_code_two(capsys):
    assert main(["plan", "--per-device-train-batch-size", "4", "--num-generations", "6"]) == 2
    err = capsys.readouterr().err
    assert "legal group sizes for this batch: 2, 4" in err
    assert "nearest legal batch" in err
    assert "Traceback" not in err


def test_remainder_and_too_few_prompts(capsys):
    assert main(["plan", "--num-generations", "2", "--num-prompts", "10"]) == 0
    assert "2 of 10 prompts unused per epoch" in capsys.readouterr().out
    assert main(["plan", "--num-generations", "2", "--num-prompts", "3"]) == 2
    assert "3 prompts are fewer than one generation batch" in capsys.readouterr().err


def test_file_and_flags(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 3e-4\nnum-generations: 4\nnum_prompts: 64\ndataset: x.json\n")
    plan = _json(capsys, "--config", str(path))
    assert (plan["prompts_per_step"], plan["num_prompts"]) == (2, 64)
    plan = _json(capsys, "--num_generations", "2", "--config", str(path))
    assert plan["prompts_per_step"] == 4


_PROBE = f"""
import sys
from dppo.cli.main import main
code = main({THREE_PROCESSES!r})
print([name for name in {HEAVY!r} if name in sys.modules], code)
"""


def test_plan_imports_nothing_heavy_and_is_fast():
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert time.monotonic() - started < 2


def test_the_import_probe_can_fail():
    code = f"import datasets, sys; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "datasets" in done.stdout


def test_works_without_trl(monkeypatch, capsys):
    from importlib.util import find_spec

    from dppo.cli import fields

    hidden = ("trl", "transformers")
    monkeypatch.setattr(fields, "find_spec", lambda n: None if n in hidden else find_spec(n))
    fields.config_fields.cache_clear()
    try:
        plan = _json(capsys, "--num-prompts", "128", "--weight-decay", "0.1")
        assert plan["total_steps"] == 384
        assert "weight-decay not checked" in plan["notes"][0]
        plan = _json(capsys, "--num-prompts", "128", "--learning-rate", "3e-4")
        assert "learning-rate not checked" in plan["notes"][0]
        assert main(["plan", "--num-generation", "4"]) == 2
    finally:
        fields.config_fields.cache_clear()


def test_help_and_unknown_command(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--num-train-epochs" in out
    assert "examples:" in out
    assert main(["--help"]) == 0
    assert main(["plann"]) == 2


PRUNED = ["--num-prompts", "400", "--per-device-train-batch-size", "64", "--prompt-keep", "0.6"]


def test_windows_of_candidates(capsys):
    # K = 64 * 4 / 8 = 32, M = floor(32 / 0.6 + 0.5) = 53, 400 = 7 * 53 + 29
    plan = _json(capsys, *PRUNED, "--gradient-accumulation-steps", "4")
    assert plan["prompts_per_generation"] == 32
    assert plan["candidates_per_generation"] == 53
    assert plan["generations_per_epoch"] == 7
    assert plan["unused_prompts_per_epoch"] == 29
    assert plan["total_steps"] == 21


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-prompts", "12"], ["M=13", "N=12"]),
        (["--num-train-epochs", "1"], ["1 passes", "allow_single_epoch"]),
        (["--loss-type", "bnpo"], ["bnpo", "prompt_keep=1.0"]),
        (["--entropy-coef", "0.01"], ["entropy_coef=0.01", "prompt_keep=1.0"]),
        (["--prompt-keep", "0"], ["prompt_keep"]),
        (["--prompt-rule", "best"], ["prompt_rule"]),
    ],
)
def test_windows_that_cannot_be(arguments, named, capsys):
    assert main(["plan", *PRUNED, *arguments]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in named), message


def test_a_single_epoch_that_was_asked_for(capsys):
    plan = _json(capsys, *PRUNED, "--num-train-epochs", "1", "--allow-single-epoch", "true")
    assert plan["generations_per_epoch"] == plan["total_steps"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_that_ships_can_be_planned(path, capsys):
    """As its first lines say: 8 processes for those of the paper, which a step of theirs needs."""
    of_the_paper = path.stem.startswith("qwen3")
    words = ["--num-processes", "8", "--num-prompts", "7473"] if of_the_paper else []
    assert main(["plan", "--config", str(path), *words]) == 0
    out = capsys.readouterr().out
    if of_the_paper:
        assert re.search(r"prompts per generation +1,024\n", out)
        assert re.search(r"prompts per step +256\n", out)
