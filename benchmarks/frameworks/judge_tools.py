"""What the judges of all frameworks share: a request, a device that is claimed, and packages that stand in.

Imports only the standard library, because it runs beside the frameworks.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A file to judge."""

    path: Path
    tree: Path
    """Root of the framework's own source, or of the file's repository."""
    ranks: int
    """Ranks of a recipe that does not state them."""


class UnjudgedError(Exception):
    """The framework's parser cannot be asked about this file."""


def claim_gpu() -> None:
    """Answer the frameworks' questions about the device as a node of 8 H100s would."""
    import typing

    import typing_extensions

    typing.override = typing_extensions.override  # of Python 3.12
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
    import torch

    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="H100", total_memory=80 * 2**30)


def stand_in(*names: str) -> None:
    """Modules that exist in name only, for imports that no parser needs."""
    from importlib.machinery import ModuleSpec
    from unittest.mock import MagicMock

    class Instance:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __class_getitem__(cls, _: Any) -> type:
            return cls

    class Anything(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Instance,), {}) if name[0].isupper() else MagicMock(name=name)

    class Finder:
        def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
            return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in missing else None

        def create_module(self, spec: ModuleSpec) -> ModuleType:
            module = Anything(spec.name)
            module.__version__ = "9.9.9"
            return module

        def exec_module(self, module: ModuleType) -> None:
            pass

    from importlib.util import find_spec

    missing = {name for name in names if name not in sys.modules and find_spec(name) is None}
    sys.meta_path.append(Finder())
