"""The entry point: makes the mode known to verl once verl has loaded its trainers.

verl imports its plug-ins in every Ray process, before its own trainers, and swallows what they
raise. So nothing heavy is imported here, and nothing can fail: the module that holds verl's
trainers is followed by ours whenever a process imports it. What is wrong then is raised by the mode
itself, when it is asked for.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRAINERS = "verl.trainer.ppo.v1"
"""verl's package of trainers and their registry."""


class _Followed(Loader):
    """Loads a module, and then ours."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module("dppo.verl.registered")


class _AfterTrainers(MetaPathFinder):
    """Finds verl's trainers as they would be found, to be followed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TRAINERS:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _Followed(spec.loader)
                    return spec
        return None


def install() -> None:
    """Follow verl's trainers, also where they are imported already."""
    if TRAINERS in sys.modules:
        importlib.import_module("dppo.verl.registered")
    elif not any(isinstance(finder, _AfterTrainers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTrainers())


install()
