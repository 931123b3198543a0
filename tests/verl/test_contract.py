"""What of verl is wrapped is there, and a verl that lacks it is refused in words."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from dppo.errors import UnsupportedHostError
from dppo.verl import MODE, contract

from .conftest import ROOT


def test_this_verl_has_what_is_wrapped() -> None:
    contract.check_contract()


@pytest.mark.parametrize("name", contract.TRAINER)
def test_a_changed_signature_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    def other(self: Any, something: Any, else_: Any, *rest: Any) -> None: ...

    monkeypatch.setattr(PPOTrainerSync, name, other)
    with pytest.raises(UnsupportedHostError, match=f"PPOTrainerSync.{name}"):
        contract.check_contract()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "version", lambda name: "0.10.0")
    with pytest.raises(UnsupportedHostError, match=r"verl 0\.10\.0 is installed; pip install"):
        contract.check_contract()


def test_the_plug_in_registers_the_mode_when_verl_loads_its_trainers() -> None:
    code = (
        "import sys, verl\n"
        "assert 'dppo.verl.plugin' in sys.modules and 'dppo.verl.trainer' not in sys.modules\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        f"print(get_trainer_cls('{MODE}').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-1:] == ["PPOTrainerPruneSync"], done.stderr[-2000:]


def test_the_loss_wraps_verls() -> None:
    loss = importlib.import_module("dppo.verl.loss")
    losses = importlib.import_module("verl.workers.utils.losses")
    assert loss.ppo_loss is losses.ppo_loss
