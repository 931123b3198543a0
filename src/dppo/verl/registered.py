"""Registers the mode; where this verl is not the one that was tested, a mode that says so."""

import logging
from typing import Any

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from dppo.errors import UnsupportedHostError
from dppo.verl import MODE
from dppo.verl.contract import check_contract

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # as verl does for its own; the root is at WARNING

if MODE not in TRAINER_REGISTRY:
    try:
        check_contract()
    except UnsupportedHostError as error:
        refusal = error

        class Refused(PPOTrainerSync):
            """Stands in for the mode, and says why it cannot work."""

            def __init__(self, config: Any) -> None:
                raise refusal

        register_trainer(MODE)(Refused)
    else:
        from dppo.verl.trainer import PPOTrainerPruneSync

        register_trainer(MODE)(PPOTrainerPruneSync)
        logger.info("trainer mode %s of dppo is registered", MODE)
