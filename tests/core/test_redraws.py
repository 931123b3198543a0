"""The statistics of redraws on data whose bias is known."""

import numpy as np
import pytest

from dppo.audit import measure_redraws
from dppo.errors import InvalidInputError

PROMPTS, SIZE, REDRAWS, TIMES = 4, 60, 32, 600


def repeated(*, bias=0.0, spread=1.0, skewed=False, times=TIMES, redraws=REDRAWS):
    """`TIMES` audits of a gradient of length 1; d has scales from 0.1 to 1, |d|^2 about 20."""
    rng = np.random.default_rng(0)
    full_PK = rng.normal(size=(PROMPTS, SIZE))
    full_PK /= np.linalg.norm(full_PK.sum(axis=0))
    g = full_PK.sum(axis=0)
    scale = spread * np.linspace(0.1, 1.0, SIZE)
    across = rng.normal(size=SIZE)
    across -= (across @ g) * g
    off = bias * across / np.linalg.norm(across)
    for _ in range(times):
        shape = (redraws, SIZE)
        noise = rng.exponential(size=shape) - 1 if skewed else rng.normal(size=shape)
        yield full_PK, g + off + noise * scale, scale


@pytest.mark.parametrize("skewed", [False, True])
def test_scores_are_standard_without_bias(skewed):
    """Of 600 scores: the mean has a standard error of 0.04, so 0.16 is four of them.

    The standard deviation has one of 0.03 if normal, 0.04 with the heavier right tail here; a
    t-score of 31 degrees of freedom has one of 1.03. So 0.85 to 1.2 is four errors to each side.
    """
    found = [measure_redraws(full, drawn) for full, drawn, _ in repeated(skewed=skewed)]
    for scores in ([f.along_z for f in found], [f.bias_z for f in found]):
        assert abs(np.mean(scores)) < 0.16
        assert 0.85 < np.std(scores) < 1.2
    assert sum(f.suspicious for f in found) <= 3
    assert abs(np.mean([f.bias for f in found])) < 4 * np.std([f.bias for f in found]) / TIMES**0.5


def test_variance_is_that_of_the_noise():
    found = [(measure_redraws(full, drawn), full, scale) for full, drawn, scale in repeated()]
    _, full, scale = found[0]
    truth = float((scale**2).sum() / (full**2).sum())
    values = np.array([f.inflation for f, _, _ in found])
    errors = np.array([f.inflation_error for f, _, _ in found])
    assert abs(values.mean() - truth) < 4 * values.std() / TIMES**0.5
    assert errors.mean() == pytest.approx(values.std(), rel=0.15)  # of 600, each from 32
    dimensions = float((scale**2).sum() ** 2 / (scale**4).sum())
    assert np.median([f.dimensions for f, _, _ in found]) == pytest.approx(dimensions, rel=0.2)


def test_a_planted_bias_is_found_in_either_way():
    """Across g only the second score can see it; along g the first does."""
    across = [measure_redraws(f, d) for f, d, _ in repeated(bias=2.0, times=50)]
    assert np.mean([f.bias_z > 4 for f in across]) > 0.9
    assert np.mean([f.bias for f in across]) == pytest.approx(4, rel=0.2)
    assert np.mean([abs(f.along_z) < 4 for f in across]) > 0.9
    along = [measure_redraws(f, 1.3 * d) for f, d, _ in repeated(spread=0.2, times=50)]
    assert np.mean([f.along_z > 4 for f in along]) > 0.9
    assert np.mean([f.along for f in along]) == pytest.approx(1.3, abs=0.02)
    assert all(f.suspicious for f in along if f.along_z > 4)


def test_by_hand():
    """g = (2, 0), d = (1, 1), (-1, 1), (0, -2): <d, d'> are 0, -2, -2."""
    found = measure_redraws([[1, 0], [1, 0]], [[3, 1], [1, 1], [2, -2]])
    assert found.redraws == 3
    assert found.along == pytest.approx(1)
    assert found.along_error == pytest.approx(0.5 / 3**0.5)
    assert found.along_z == pytest.approx(0)
    assert found.bias == pytest.approx((2 * -4 / 6) / 4)
    spread = 2 * (4 + 4) / 6
    assert found.bias_z == pytest.approx((-8 / 6) / np.sqrt(2 * spread / 6))
    assert found.inflation == pytest.approx((2 + 2 + 4) / 3 / 2)
    assert found.inflation_error == pytest.approx(np.std([2, 2, 4], ddof=1) / 2 / 3**0.5)


def test_few_redraws_never_alarm_in_any_direction():
    found = [measure_redraws(f, d) for f, d, _ in repeated(bias=50.0, times=5, redraws=6)]
    assert all(f.bias_z <= 15**0.5 + 1e-9 for f in found)


def test_redraws_that_do_not_differ():
    same = measure_redraws([[1.0, 0.0]], [[1.0, 0.0]] * 3)
    assert (same.along_z, same.bias_z, same.inflation, same.suspicious) == (0, 0, 0, False)
    other = measure_redraws([[1.0, 0.0]], [[2.0, 0.0]] * 3)
    assert other.along_z == np.inf
    assert other.suspicious


@pytest.mark.parametrize(
    ("full", "drawn", "message"),
    [
        ([[1.0]], [[1.0]], "at least 2"),
        ([[1.0]], [[1.0, 2.0]] * 2, "shape"),
        ([[1.0], [-1.0]], [[1.0]] * 2, "the full gradient is 0"),
        ([[np.nan]], [[1.0]] * 2, "full_PK must be finite"),
    ],
)
def test_what_is_refused(full, drawn, message):
    with pytest.raises(InvalidInputError, match=message):
        measure_redraws(full, drawn)
