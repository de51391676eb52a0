"""Rules of products in 8 bits: which devices have them, and of which matrices."""

from collections.abc import Iterator

from search_spaces.context import SpaceContext
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.trial_config import TrialConfig

FLOAT8 = "fp8"
"""The value of `precision` that stands for them."""
MULTIPLE = 16
"""Of what both sides of a matrix must be a multiple: cuBLASLt's float8 products have no other ones."""
DEVICE_REMEDY = "use precision=bf16, or such a device"
MODEL_REMEDY = "use precision=bf16; the factory may convert its linear layers itself (torchao.float8)"
SIZES_REMEDY = "use precision=bf16, or a tensor_parallel_size whose slices are"


def float8_device(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision != FLOAT8 or device.supports(FLOAT8):
        return None
    return f"{device.name} has no float8 products, which NVIDIA has from compute capability 8.9 on (Ada, Hopper, Blackwell)"


def float8_model(config: TrialConfig, context: SpaceContext) -> str | None:
    if config.precision != FLOAT8 or not isinstance(context.model, FactoryModel) or float8_device(config, context):
        return None
    return f"which products of {context.model.name} could be in 8 bits is not known"


def float8_sizes(config: TrialConfig, context: SpaceContext) -> str | None:
    """Of a rank's slices of the matrices of a layer."""
    if config.precision != FLOAT8 or not isinstance(context.model, ModelSpec) or float8_device(config, context):
        return None
    wrong = [f"{name} ({size})" for name, size in _sizes(context.model, config.tensor_parallel_size) if size % MULTIPLE]
    return f"a rank's {', '.join(wrong)} of {context.model.name} are no multiples of {MULTIPLE}" if wrong else None


def _sizes(model: ModelSpec, ranks: int) -> Iterator[tuple[str, int]]:
    yield "hidden size", model.hidden_size
    yield "queries", model.num_attention_heads * model.head_dim // ranks
    yield "keys", model.num_key_value_heads * model.head_dim // ranks
    yield "MLP's width", model.ffn_hidden_size // ranks
