"""Dry runs for CUDA on a CPU: what only CUDA's kernels do."""

import pytest

from executor.dry.dry_run import dry_run
from search_spaces.models.model import ModelSpec
from search_spaces.trial import DryRank, Workload
from search_spaces.trial_config import TrialConfig

LAYERS, HIDDEN, TOKENS, SAMPLES = 3, 256, 512, 2
SPEC = ModelSpec(
    name="small", family="llama", num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4,
    head_dim=64, ffn_hidden_size=512, vocab_size=256, sequence_length=TOKENS,
)  # fmt: skip
WORKSPACES = 64 << 20


def dry(backend: str, **knobs: object) -> DryRank:
    config = TrialConfig(precision="bf16", micro_batch_size=SAMPLES).replace(knobs)  # type: ignore[arg-type]
    return dry_run(SPEC, config, Workload(global_batch_size=SAMPLES, sequence_length=TOKENS), 1, backend=backend)


@pytest.mark.prove
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_kernels_that_a_cpu_has_not_keep_what_flash_attention_keeps(kernel: str) -> None:
    assert dry("nccl", attention_backend=kernel).peak_memory_bytes == dry("nccl", attention_backend="flash").peak_memory_bytes


def test_a_norm_keeps_its_input_and_libraries_their_workspaces() -> None:
    """Operators keep the input in fp32, too, and the result before the weight: 6 bytes an element of each norm. At the peak,
    one norm has temporaries."""
    cuda, cpu = dry("nccl"), dry("gloo")
    assert cuda.memory_by_tag["buffers"] - cpu.memory_by_tag["buffers"] == pytest.approx(WORKSPACES, abs=1 << 16)
    saved = cpu.memory_by_tag["activations"] - cuda.memory_by_tag["activations"]
    assert saved == pytest.approx((6 * (2 * LAYERS + 1) + 8) * SAMPLES * TOKENS * HIDDEN, rel=0.01)
