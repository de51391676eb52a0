"""A warm rank builds a user's module once: trials train copies of it, if a copy is certain to be what a new build would be."""

import copy
import ctypes
import enum
import functools
import gc
import logging
import re
import types
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from executor.user_module.factory import load_factory
from executor.user_module.plan import UserModule
from search_spaces.clusters.presets import host_memory_bytes
from search_spaces.trial import Workload

HOST_SHARE = 1 / 16
"""Most of the host's memory that the originals of all ranks may take: they stay beside what trials need."""
_CONSTANTS = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, types.NoneType,
    types.CodeType, types.CellType, types.MethodType, str, bytes, int, float, complex, tuple, frozenset, range, slice, property,
    staticmethod, classmethod, weakref.ref, enum.Enum, re.Pattern, PurePath, logging.Logger, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of objects that cannot change, besides what they refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Original:
    """A module as its factory built it, which is never trained."""

    user: UserModule
    generator_state: Tensor
    """Of torch's global generator after the build."""


def build_seeded(reference: str, workload: Workload) -> UserModule:
    """Build a user's module with torch's generator seeded by the workload.

    Raises:
        FactoryError: the factory violates the Protocol, or raises.
    """
    torch.manual_seed(workload.seed)
    return load_factory(reference, workload)


def copy_or_build(reference: str, workload: Workload, checksum: int | None) -> UserModule:
    """The module as `build_seeded` builds it, and torch's generator as it leaves it: a copy of the rank's original, or where a
    copy is not certain to be the same, a new build; `checksum`: of another build.

    Raises:
        FactoryError: as `build_seeded`.
    """
    original = _original(reference, workload, checksum)
    if original is None:
        return build_seeded(reference, workload)
    torch.manual_seed(workload.seed)  # that of devices too
    torch.set_rng_state(original.generator_state)
    return replace(original.user, module=copy.deepcopy(original.user.module))


@functools.lru_cache(maxsize=1)
def _original(reference: str, workload: Workload, checksum: int | None) -> _Original | None:
    user = build_seeded(reference, workload)
    state = torch.get_rng_state()
    problem = problem_of_copying(user, checksum)
    if problem and checksum is not None:
        logging.getLogger(__name__).warning("%s is built anew for each trial: %s", reference, problem)
    return None if problem else _Original(user=user, generator_state=state)


def problem_of_copying(user: UserModule, checksum: int | None) -> str:
    """Why copies of the module might differ from builds of it, in a clause; empty: they cannot."""
    tensors = list(_tensors(user.module))
    if any(value.device.type != "cpu" for _, value in tensors):
        return "it has tensors that are not in host memory"
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks * sum(value.nbytes for _, value in tensors) > host_memory_bytes() * HOST_SHARE:
        return "host memory has no room for another one of each rank"
    if checksum is None or checksum_of(user.module) != checksum:
        return "two builds from one seed differ"
    try:
        duplicate = copy.deepcopy(user.module)
    except Exception as error:
        return f"it cannot be copied ({type(error).__name__})"
    if checksum_of(duplicate) != checksum:
        return "a copy of it differs"
    objects = _reachable(user.module)
    of_duplicate = _reachable(duplicate)
    if shared := [value for key, value in objects.items() if key in of_duplicate and not isinstance(value, _CONSTANTS)]:
        return f"its copies share a {type(shared[0]).__name__}"
    if any(isinstance(value, int) and value in objects for value in objects.values()):
        return "it stores addresses of its parts"
    batch = _reachable(user.batch)
    if any(isinstance(objects[key], nn.Module | Tensor) for key in objects.keys() & batch.keys()):
        return "its batches are made with parts of it"
    return ""


def checksum_of(module: nn.Module) -> int | None:
    """CRC-32 of names, types and bits of all parameters and buffers; None: some have no data, or are not plain memory."""
    checksum = 0
    for name, value in _tensors(module):
        if is_fake(value) or value.is_meta or value.layout is not torch.strided:
            return None
        plain = value.detach().to("cpu", memory_format=torch.contiguous_format)
        described = f"{name} {value.dtype} {tuple(value.shape)} {value.requires_grad} {type(value).__name__}"
        checksum = zlib.crc32(described.encode(), checksum)
        if plain.nbytes:
            memory = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
            checksum = zlib.crc32(memory, checksum)
    return checksum


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names: tied ones come more than once."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _reachable(root: object) -> dict[int, object]:
    """What code of `root` may read or change, by address: attributes, closures, defaults and what these refer to, but not what
    modules and classes of files hold, which a new build would share too."""
    objects: dict[int, object] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in objects:
            continue
        objects[id(value)] = value
        if isinstance(value, types.FunctionType):
            waiting += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, *vars(value).values()]
        elif isinstance(value, type):
            waiting += vars(value).values() if "<locals>" in value.__qualname__ else ()
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif not isinstance(value, types.ModuleType | types.CodeType | logging.Logger | enum.Enum):
            waiting += gc.get_referents(value)
    return objects
