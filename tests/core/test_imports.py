"""What the package imports, and what it exports."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing

import numpy as np
import pytest

import dppo
import dppo.estimator

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "pandas", "scipy")
CORE = [
    "dppo",
    "dppo._batch",
    "dppo._checks",
    "dppo.config",
    "dppo.errors",
    "dppo.estimator",
    *(f"dppo.estimator.{m.name}" for m in pkgutil.iter_modules(dppo.estimator.__path__)),
    "dppo.pruner",
    "dppo.types",
]


def heavy_modules_after(statement, path=()):
    """The heavy modules that a fresh interpreter has loaded after `statement`."""
    code = (
        f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{statement}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_the_core_imports_no_framework():
    assert heavy_modules_after("import " + ", ".join(CORE)) == "[]"


def test_the_import_test_can_fail(tmp_path):
    (tmp_path / "torch.py").write_text("")  # a stand-in, so that the real one need not be there
    (tmp_path / "culprit.py").write_text("def _hidden():\n    import torch\n\n_hidden()\n")
    assert heavy_modules_after("import dppo, culprit", [tmp_path]) == "['torch']"


def test_all_lists_exactly_the_public_names():
    public = {
        name
        for name, value in vars(dppo).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(dppo.__all__) - {"__version__"}
    assert len(dppo.__all__) == len(set(dppo.__all__))


@pytest.mark.parametrize("name", [n for n in dppo.__all__ if n != "__version__"])
def test_every_public_name_is_documented_with_an_example(name):
    value = getattr(dppo, name)
    text = inspect.getdoc(value)
    assert text
    # A dataclass without a docstring shows its signature instead.
    assert not text.startswith(f"{name}(")
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        assert "Example:" in text
        assert ">>> " in text


@pytest.mark.parametrize("module", CORE)
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


def test_doctests_are_found():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in CORE]
    examples = [t for m in modules for t in finder.find(m) if t.examples]
    assert len(examples) >= 15  # one for each public function at least


def test_no_public_function_returns_a_bare_mask():
    # A selection never travels without its probabilities.
    functions = [f for n in dppo.__all__ if inspect.isfunction(f := getattr(dppo, n))]
    assert len(functions) >= 13
    for function in functions:
        returned = typing.get_type_hints(function)["return"]
        assert returned not in (bool, np.ndarray, np.typing.NDArray[np.bool_]), function.__name__
    adv = dppo.group_advantages([[1.0, 0.0]])
    rng = dppo.generator(0, 0, stream="order")
    arrays = [
        dppo.completion_norms(adv.values_PG),
        dppo.completion_sizes(adv.values_PG),
        dppo.surprisal_norm([[-1.0]], [[True]]),
        dppo.uniform_inclusion([[True, False]], keep=1.0),
        dppo.threshold_inclusion(adv.values_PG, prune_rate=0.0),
        dppo.proportional_inclusion([1.0, 0.0], keep=1.0),
        dppo.stratified_order(adv.values_PG, rng),
    ]
    assert all(array.dtype != np.bool_ for array in arrays)
    for selection in (dppo.systematic([0.5], rng), dppo.poisson([0.5], rng)):
        assert isinstance(selection, dppo.Selection)


def test_public_functions_take_keywords_only_after_two_arguments():
    for name in dppo.__all__:
        function = getattr(dppo, name)
        if inspect.isfunction(function) and name != "systematic":  # its order is third
            kinds = [p.kind for p in inspect.signature(function).parameters.values()]
            assert all(kind == inspect.Parameter.KEYWORD_ONLY for kind in kinds[2:]), name
