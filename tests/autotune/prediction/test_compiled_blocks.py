"""What compiled blocks keep for backward, against the equations."""

import pytest
import torch

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.activations import layer_bytes
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = ModelSpec(
    name="llama", family="llama", num_layers=2, hidden_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
    ffn_hidden_size=704, vocab_size=64, sequence_length=64, tied_embeddings=False,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=2, sequence_length=64)
TOKENS, ROTARY_BYTES = 128, 2 * 64 * 64 * 2


def kept_bytes(config: TrialConfig) -> int:
    """Bytes that the last block saves for backward, without its parameters."""
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    session = NativeEngine().build(context, MODEL, config, WORKLOAD)
    try:
        block = session.parts[0].blocks[-1]
        own, kept = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}, dict[int, int]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        forward = block.forward

        def watched(*given: object, **named: object) -> object:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(*given, **named)

        block.forward = watched
        session.prepare(0)
        session.train_step()
        return sum(kept.values())
    finally:
        session.close()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
def test_a_compiled_block_keeps_what_is_predicted() -> None:
    config = TrialConfig(precision="bf16", micro_batch_size=2, compile_blocks=True)
    predicted = float(layer_bytes(cases_of(MODEL, local_cluster(1), WORKLOAD, [config], "native")).item())
    # Rotary positions of this short model belong to no token.
    assert kept_bytes(config) - ROTARY_BYTES == pytest.approx(TOKENS * predicted, rel=0.02)
    assert kept_bytes(config.replace({"compile_blocks": False})) > 1.4 * kept_bytes(config)
