"""Blocks as CUDA graphs on a GPU: losses, step time and memory with graphs and without, in the same engine."""

import gc
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.common.static_buffers import StaticBuffers
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, ratio
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.measurement.memory import MemoryAccount, account_step
from executor.parallel.graphs import EAGER_STEPS, CudaCapture
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

STEPS, ROUNDS = EAGER_STEPS + 3, 10
RESERVED_BOUND = 0.10
"""Relative difference between the account's peak and the allocator's reserved bytes, whose segments are not all full."""
SHAPES = {
    "bound by launches": {"num_layers": 24, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 704},
    "bound by the device": {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 5632},
}
SMALL = {"bound by launches": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}}
LEAST_FASTER = {"bound by launches": 1.0, "bound by the device": 0.97}
"""Shape -> lower bound of the speedup over an eager step: where the device is always busy, graphs must not cost much."""
CONFIGS = (TrialConfig(precision="bf16"), TrialConfig(precision="fp32", zero_stage=1, contiguous_gradients=False))


@dataclass(slots=True)
class _Run:
    """One session, with or without graphs."""

    session: ParallelSession
    device: torch.device
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Train one step; its seconds include the device's work."""
        self.session.prepare(len(self.losses))
        self._synchronize()
        began = time.perf_counter()
        loss = self.session.train_step().loss
        self._synchronize()
        self.seconds.append(time.perf_counter() - began)
        assert loss is not None
        self.losses.append(loss)

    def account(self) -> MemoryAccount:
        """The memory account of a further step."""
        self.session.prepare(len(self.losses))
        session = self.session
        return account_step(session.train_step, session.tagged_storages, self.device, session.private_pool())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def items(setting: Setting) -> list[Item]:
    """Items of the part correctness."""
    shapes = SHAPES if setting.size == "large" else SMALL
    return [
        Item(
            name=f"graphs: {shape}, {config.precision} at stage {config.zero_stage}",
            show=partial(prove_graphs, shape=shape, config=config),
            seconds=20.0,
            group=f"graphs, {shape}",
        )
        for shape in shapes
        for config in CONFIGS
    ]


def prove_graphs(proof: Proof, shape: str, config: TrialConfig) -> None:
    """Train both on the same steps in turn, four micro-batches each; then time both in turn and compare their memory."""
    proof.setting.close()  # ranks hold memory of the device
    large, device = proof.setting.size == "large", proof.setting.device
    sizes, length = (SHAPES if large else SMALL)[shape], 256 if large else 16
    model = ModelSpec(
        name=shape, family="llama", num_key_value_heads=sizes["num_attention_heads"], vocab_size=1024 if large else 32,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"], sequence_length=length, **sizes,
    )  # fmt: skip
    workload = Workload(global_batch_size=4, sequence_length=length)
    graphed, eager = (_run(model, config.replace({"cuda_graphs": on}), workload, device) for on in (True, False))
    for _ in range(STEPS):
        graphed.step()
        eager.step()
    off = max(abs(a - b) / abs(b) for a, b in zip(graphed.losses, eager.losses, strict=True))
    bound = LOSS_BOUND[config.precision]
    proof.claim(off <= bound, f"losses of {STEPS} steps {off:.1e} off those of eager blocks (bound {bound:.1e})")
    capture = graphed.session.capture_seconds()
    proof.claim(capture > 0.0 and graphed.session.private_pool() is not None, f"captured in {capture:.2f} s")
    rounds = ROUNDS if proof.setting.on_gpu else 2
    for _ in range(rounds):
        graphed.step()
        eager.step()
    faster = ratio(eager.seconds[-rounds:], graphed.seconds[-rounds:])
    proof.at_least(faster, LEAST_FASTER[shape], f"an eager step as a multiple of one with graphs, {rounds} rounds")
    _claim_memory(proof, graphed, eager)


def _claim_memory(proof: Proof, graphed: _Run, eager: _Run) -> None:
    """The account has the graphs' memory by tag; without the eager session it matches the reserved bytes."""
    with_graphs, without = graphed.account(), eager.account()
    pool = graphed.session.private_pool()
    assert pool is not None
    more = ", ".join(f"{tag} {size - without.by_tag[tag]:+,}" for tag, size in with_graphs.by_tag.items())
    standing = with_graphs.at_start["gradients"] - without.at_start["gradients"]
    proof.claim(
        sum(with_graphs.by_tag.values()) == with_graphs.peak and standing >= 0.99 * pool.by_tag["gradients"] > 0,
        f"peak {with_graphs.peak:,} bytes with graphs, {without.peak:,} without ({more}); "
        f"their own: {', '.join(f'{tag} {size:,}' for tag, size in pool.by_tag.items())}",
    )
    device = graphed.device
    eager.session.close()
    if device.type == "cuda":
        eager.losses.clear()
        del eager
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        peak = graphed.account().peak
        reserved = torch.cuda.max_memory_reserved(device)
        off = abs(peak / reserved - 1)
        proof.claim(off <= RESERVED_BOUND, f"account {peak:,} bytes, reserved {reserved:,}, {off:.1%} apart")
    graphed.session.close()


def _run(model: ModelSpec, config: TrialConfig, workload: Workload, device: torch.device) -> _Run:
    engine = NativeEngine(CudaCapture if device.type == "cuda" else StaticBuffers)
    return _Run(engine.build(RankContext(rank=0, world_size=1, device=device), model, config, workload), device)
