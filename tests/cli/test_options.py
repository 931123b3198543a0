import dataclasses

import pytest

from dppo.cli.convert import alternatives, convert
from dppo.cli.fields import PLAN_OPTIONS, RUN_OPTIONS, Field, config_fields, nearest_name
from dppo.cli.options import read_settings
from dppo.errors import ConfigurationError


def _read(*words):
    return read_settings(words, run_options=RUN_OPTIONS)


def _problems(*words):
    with pytest.raises(ConfigurationError) as caught:
        _read(*words)
    return str(caught.value).splitlines()


def test_fields_are_those_of_the_real_class():
    trl = pytest.importorskip("trl")
    table = config_fields()
    real = {field.name: field for field in dataclasses.fields(trl.GRPOConfig) if field.init}
    assert set(real) <= set(table.fields)
    for name in ("num_generations", "learning_rate", "logging_steps", "bf16", "seed"):
        assert table.fields[name].default == real[name].default
    assert not table.missing


def test_every_annotation_can_be_read():
    for field in config_fields().fields.values():
        assert alternatives(field.annotation)[0]


def test_kebab_snake_equals_and_negation():
    settings = _read("--learning-rate", "3e-4", "--max_steps=7", "--no-gradient-checkpointing")
    assert settings.config == {
        "learning_rate": 3e-4,
        "max_steps": 7,
        "gradient_checkpointing": False,
    }


def test_flag_kinds():
    settings = _read(
        *[
            "--bf16",
            "--max-steps",
            "-1",
            "--reward-weights",
            "0.7",
            "0.3",
            "--report-to",
            "none",
            "--seed",
            "3",
        ],
        *["--reward", "a:b", "--reward", "c:d", "--model", "there"],
        '--model-init-kwargs={"dtype": "float32"}',
    )
    assert settings.config == {
        "bf16": True,
        "max_steps": -1,
        "reward_weights": [0.7, 0.3],
        "report_to": "none",
        "seed": 3,
        "model_init_kwargs": {"dtype": "float32"},
    }
    assert settings.run == {"reward": ["a:b", "c:d"], "model": "there"}


def test_unknown_keys_are_all_reported_with_the_nearest_name(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num-epochs: 3\ncompletion_kep: 0.5\n")
    problems = _problems("--config", str(path), "--lr", "1", "--sead", "2", "--seed", "x")
    assert len(problems) == 5
    text = "\n".join(problems)
    for name in ("num_train_epochs", "completion_keep", "learning_rate", "mean seed"):
        assert name in text
    assert "seed: expected int, got 'x' (str)" in text
    assert str(path) in text


def test_plan_only_options_are_named_as_such():
    assert "solve_rate" in PLAN_OPTIONS
    assert "`dppo plan` only" in _problems("--solve-rate", "0.5")[0]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_epochs", "num_train_epochs"),
        ("prune_rato", "completion_prune_rate"),
        ("group_size", "num_generations"),
        ("per_device_batch_size", "per_device_train_batch_size"),
    ],
)
def test_nearest_name(wrong, right):
    names = [*config_fields().fields, "completion_prune_rate", "completion_keep"]
    assert nearest_name(wrong, names) == right


def test_nothing_is_near():
    assert nearest_name("zzzzzz", ["num_generations"]) is None
    assert "no option has a similar name" in _problems("--qqqqqqqqq", "1")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n  b: 2\n", ["line 2", "column 4"]),
        ("seed: [1, 2\n", ["line 2", "column 1"]),
        ("seed: 1\nseed: 2\n", ["line 2", "already on line 1"]),
        ("seed: 1\nmax-steps: 2\nmax_steps: 3\n", ["same option"]),
        ("- seed\n", ["name: value"]),
        ("seed: 1.5\n", ["seed: expected int, got 1.5 (float)"]),
        ("seed: true\n", ["seed: expected int, got True (bool)"]),
        ("learning_rate: fast\n", ["learning_rate: expected float, got 'fast' (str)"]),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = "\n".join(_problems("--config", str(path)))
    for word in [*words, "bad.yaml"]:
        assert word in message


def test_missing_file():
    assert "nowhere.yaml" in _problems("--config", "nowhere.yaml")[0]


def test_missing_value_and_stray_word():
    problems = _problems("--learning-rate", "--max-steps", "1", "2")
    assert "--learning-rate needs a value (float)" in "\n".join(problems)
    assert "unexpected argument '2'" in "\n".join(problems)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("float", "3e-4", 3e-4),
        ("float", 1, 1.0),
        ("int | None", "none", None),
        ("int | str | None", "auto", "auto"),
        ("int | str | None", "8", 8),
        ("float | Literal['shadow', 'auto']", "shadow", "shadow"),
        ("float | Literal['shadow', 'auto']", "0.5", 0.5),
        ("bool | None", "False", False),
        ("str | bool", "non_padding", "non_padding"),
        ("dict[str, Any] | str | None", '{"a": 1}', {"a": 1}),
        ("dict[str, Any] | str | None", {"a": 1}, {"a": 1}),
        ("list[float] | None", "0.5,0.5", [0.5, 0.5]),
        ("list[float] | None", [1, 2], [1.0, 2.0]),
        ("None | str | list[str]", "none", "none"),
        ("None | str | list[str]", '["a", "b"]', ["a", "b"]),
        ("SchedulerType | str", "constant", "constant"),
        ("Optional[Union[int, float]]", "2", 2),
    ],
)
def test_convert(annotation, value, expected):
    converted = convert(Field("x", annotation), value)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("int", "1.5"),
        ("int", None),
        ("bool", "perhaps"),
        ("float | Literal['shadow']", "shaddow"),
        ("ParallelismConfig | None", "x"),
        ("dict", "{broken"),
        ("str", 5),
    ],
)
def test_convert_refuses(annotation, value):
    with pytest.raises(ConfigurationError, match="x: expected"):
        convert(Field("x", annotation), value)
