"""Every option of a recipe is one of verl's, and none is refused."""

import os
import subprocess
from pathlib import Path

import pytest

from dppo.verl.options import PruneOptions
from dppo.verl.refusals import check_config

from .conftest import ROOT

RECIPES = sorted((ROOT / "configs" / "verl").glob("*.sh"))


def words(recipe: Path, tmp_path: Path) -> list[str]:
    """What the recipe would start Python with."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/bin/bash\ncase "$*" in *main_ppo*) printf "%s\\n" "$@" > "$SEEN";; esac\necho /model\n'
    )
    stand_in.chmod(0o755)
    seen = tmp_path / "seen"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(stand_in),
        "SEEN": str(seen),
        "OUT": str(tmp_path / "out"),
    }
    subprocess.run(["bash", str(recipe)], env=environment, check=True, cwd=tmp_path)
    given = seen.read_text().splitlines()
    return [word for word in given if "=" in word and not word.startswith("-")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_composes_with_verls_configuration(recipe: Path, tmp_path: Path) -> None:
    import verl
    from hydra import compose, initialize_config_dir

    overrides = words(recipe, tmp_path)
    assert len(overrides) > 20
    folder = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    options = PruneOptions.of(config.prune)
    assert options.prunes
    check_config(config, options)
    assert config.trainer.v1.trainer_mode == "prune_sync"
    assert config.actor_rollout_ref.model.use_remove_padding
    assert config.actor_rollout_ref.actor.use_dynamic_bsz
