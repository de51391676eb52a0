"""Rules of float8 matrix products: which devices and matrices support them."""

from collections.abc import Iterator

from search_spaces.context import SpaceContext
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.trial_config import TrialConfig

FLOAT8 = "fp8"
"""The value of `precision` that selects them."""
MULTIPLE = 16
"""Both dimensions of a matrix must be multiples of this, as cuBLASLt's float8 products require."""
DEVICE_REMEDY = "use precision=bf16, or such a device"
MODEL_REMEDY = "use precision=bf16; the factory may convert its linear layers itself (torchao.float8)"
SIZES_REMEDY = "use precision=bf16, or a tensor_parallel_size whose slices are"


def float8_device(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision != FLOAT8 or device.supports(FLOAT8):
        return None
    return (
        f"{device.name} does not support float8 products, which need compute capability 8.9 or newer (Ada, Hopper, Blackwell)"
    )


def float8_model(config: TrialConfig, context: SpaceContext) -> str | None:
    if config.precision != FLOAT8 or not isinstance(context.model, FactoryModel) or float8_device(config, context):
        return None
    return f"it is unknown which products of {context.model.name} could be in float8"


def float8_sizes(config: TrialConfig, context: SpaceContext) -> str | None:
    """Check the sizes of a rank's slices of a layer's matrices."""
    if config.precision != FLOAT8 or not isinstance(context.model, ModelSpec) or float8_device(config, context):
        return None
    wrong = [f"{name} ({size})" for name, size in _sizes(context.model, config) if size % MULTIPLE]
    return f"a rank's {', '.join(wrong)} of {context.model.name} are not multiples of {MULTIPLE}" if wrong else None


def _sizes(model: ModelSpec, config: TrialConfig) -> Iterator[tuple[str, int]]:
    ranks = config.tensor_parallel_size
    yield "hidden size", model.hidden_size
    yield "queries", model.num_attention_heads * model.head_dim // ranks
    yield "keys", model.num_key_value_heads * model.head_dim // ranks
    yield "MLP's width", model.ffn_hidden_size // (config.expert_slices if model.num_experts else ranks)
    yield "dense layers' MLP", model.dense_ffn_size // ranks
    yield "shared experts' width", model.shared_expert_size // ranks
    if model.latent is not None:
        yield "values", model.num_attention_heads * model.latent.value_size // ranks
        yield "latent keys and values", model.latent.key_value_rank
        yield "latent queries", model.latent.query_rank
