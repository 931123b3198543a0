r"""verl on CPUs, for tests and the demo: a platform, FSDP on gloo, and a rollout server.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=dppo.verl.cpu python -m verl.trainer.main_ppo \
        trainer.device=cpu actor_rollout_ref.rollout.name=hf_cpu ...

verl loads this module in every process. It uses verl's registries, and patches two things that
only a machine without an accelerator meets (`patches`).
"""

from importlib.metadata import version

from dppo.errors import UnsupportedHostError
from dppo.verl import VERL

if version("verl") != VERL:
    raise UnsupportedHostError(
        f"dppo.verl.cpu was tested with verl {VERL}, and verl {version('verl')} is installed; "
        f"pip install verl=={VERL}"
    )

from dppo.verl.cpu import patches, platform

__all__ = ["platform"]

patches.apply()
