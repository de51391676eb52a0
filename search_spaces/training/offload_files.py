"""Offloading to files: bytes in the files and in the host buffers for reading and writing."""

from search_spaces.models.model import Model
from search_spaces.training.states import MASTER_BYTES, PARAMETER_BYTES, _elements, _owned, _shards
from search_spaces.trial_config import TrialConfig

CHUNK_ELEMENTS = 1 << 22
"""Elements of the optimizer state that are transferred and updated together: 16 MiB of fp32 gradient, 48 MiB of state."""
REQUEST_BYTES = 4 << 20
"""Bytes of one request to a file: large enough for a device's full rate; a transfer is several of them at once."""
REQUEST_THREADS = 4
"""Concurrent requests of a rank, reads and writes together."""
BUFFERS = 4
"""Chunks in host memory at the same time, two per direction: one is read while one is updated, and two are being written."""
UNITS = 3
"""Parameter units in host memory at the same time: two that are prefetched, and one that is read on demand."""
STATES = 3
"""Values per element in a file: master and two moments."""


def file_bytes(config: TrialConfig, model: Model, world_size: int) -> int:
    """Bytes in the files of all ranks together, without rounding to blocks.

    A rank has 3 M r P / S of optimizer state: P trainable parameters of its slice and stages, S ranks that shard them, the
    share r that is offloaded, M bytes per value; and W P / S of parameters, W bytes each. Unknown for a script: 0.
    """
    shards = _shards(config, world_size, None)
    trainable, frozen = _owned(config, model, shards), _elements(config, model)[1] / shards
    found = 0.0
    if config.offload_optimizer == "nvme":
        found += trainable * STATES * MASTER_BYTES[config.precision] * config.offload_ratio
    if config.offload_param == "nvme":
        found += (trainable + frozen) * PARAMETER_BYTES[config.precision]
    return int(config.data_parallel_size(world_size) * config.model_parallel_size * found)
