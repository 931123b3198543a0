"""What a run records is what `dppo audit` reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dppo.audit import load_recording, measure, unbiased_methods
from dppo.errors import ConfigurationError

from .conftest import Script, config, random_completions, trainer, watched


@pytest.mark.parametrize("keep", [0.5, "shadow", "auto"])
def test_a_run_records_its_completions(tmp_path: Path, keep: float | str) -> None:
    path = tmp_path / "folder" / "rollouts.npz"
    run = trainer(tmp_path, completion_keep=keep, record_rollouts=str(path))
    watch = watched(run)
    found = load_recording(path)
    assert found.rewards_PG.shape == (2 * 3, 4)
    assert found.surprisal_PG is not None
    for number, decision in enumerate(watch.decisions):
        mine = slice(2 * number, 2 * number + 2)
        np.testing.assert_allclose(found.rewards_PG[mine], decision.rewards_PG)
        np.testing.assert_allclose(found.advantages_PG[mine], decision.choices[0].advantages)
        tokens = decision.rows.completion_tokens.reshape(2, 4)
        np.testing.assert_array_equal(found.completion_tokens_PG[mine], tokens)
    assert measure(found, unbiased_methods(found), draws=5)
    assert not list(path.parent.glob("*.part"))
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="would be overwritten; give another name"):
        trainer(tmp_path, record_rollouts=str(path))
    assert path.read_bytes() == before


def test_without_log_probs_there_is_no_surprisal(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    script = Script(random_completions(8, seed=0))
    trainer(tmp_path, rollout_func=script, record_rollouts=str(path), max_steps=1).train()
    assert load_recording(path).surprisal_PG is None


def test_nothing_is_recorded_where_nothing_is_decided(tmp_path: Path) -> None:
    off: dict[str, Any] = {"completion_keep": 1.0, "record_rollouts": "rollouts.npz"}
    with pytest.raises(ConfigurationError, match=r"record_rollouts='rollouts\.npz'"):
        config(tmp_path, packing="none", **off)
    config(tmp_path, packing="auto", **off)
