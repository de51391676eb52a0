"""AdamW split between device and host against one AdamW over the whole vector, and the bytes on each side.

On a machine without an accelerator both sides are ordinary memory; the same code runs.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.engine import HOST
from executor.engines.native.offload import Hyperparameters, Initial, SplitAdamW
from executor.engines.native.parameter_shard import DeviceShard, HostShard, MasterShard, ParameterShard
from executor.measurement.memory import account_step
from executor.parallel.copies import CopyEngine, HostPool, Staging
from executor.parallel.initialization import Given

DEVICE = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
STEPS = 4
HYPERPARAMETERS = Hyperparameters(learning_rate=1e-2, weight_decay=0.1, fused=True)
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Largest difference of a value of about 1: the order of roundings differs between kernels, nothing else."""


class Offloaded:
    """A split optimizer and a shard, as the engine builds them."""

    def __init__(self, initial: Tensor, ratio: float, shard: str, dtype: torch.dtype | None = None, chunk: int = 7) -> None:
        self.pool, copies = HostPool(DEVICE), CopyEngine(DEVICE)
        first = Initial(Given(initial), initial.dtype, DEVICE)
        self.optimizer = SplitAdamW(first, ratio, HYPERPARAMETERS, self.pool, copies, chunk_elements=chunk)
        dtype = dtype or initial.dtype
        self.arrivals_bytes = 0
        self.shard: ParameterShard
        if shard == "device":
            before = self.pool.bytes
            arrivals = Staging(self.optimizer.chunk_elements, dtype, self.pool, copies)
            self.arrivals_bytes = self.pool.bytes - before
            self.shard = DeviceShard(initial.numel(), dtype, DEVICE, arrivals)
        else:
            self.shard = HostShard(initial.numel(), dtype, DEVICE, self.pool, copies)
        self.optimizer.publish(self.shard)

    def read(self, *ranges: tuple[int, int]) -> Tensor:
        loaded = self.shard.read(ranges)
        for copy in loaded.copies:
            copy.wait()
        return loaded.values


def drawn(elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(DEVICE)


def plain(initial: Tensor) -> Iterator[Tensor]:
    """The whole vector after each step of one ordinary AdamW."""
    whole = nn.Parameter(initial.clone())
    optimizer = torch.optim.AdamW(
        [whole], lr=HYPERPARAMETERS.learning_rate, weight_decay=HYPERPARAMETERS.weight_decay, foreach=False
    )
    for step in range(STEPS):
        whole.grad = drawn(initial.numel(), initial.dtype, 1 + step)
        optimizer.step()
        yield whole.detach().clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shard", ["device", "host"])
@pytest.mark.parametrize("chunk", [7, 64, 1 << 22])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_equals_one_adamw(ratio: float, chunk: int, shard: str, dtype: torch.dtype) -> None:
    initial = drawn(131, dtype, 0)
    offloaded = Offloaded(initial, ratio, shard, chunk=chunk)
    assert torch.equal(offloaded.read((0, 131)), initial)
    for step, wanted in enumerate(plain(initial)):
        offloaded.optimizer.step([drawn(131, dtype, 1 + step)], offloaded.shard)
        assert (offloaded.optimizer.full_master() - wanted).abs().max() <= BOUND[dtype]
        assert torch.equal(offloaded.read((0, 131)), offloaded.optimizer.full_master())
        assert torch.equal(offloaded.read((3, 50), (90, 131)), torch.cat((offloaded.read((3, 50)), offloaded.read((90, 131)))))


@given(elements=st.integers(1, 60), ratio=st.floats(0, 1), chunk=st.integers(1, 70))
def test_any_size_and_share(elements: int, ratio: float, chunk: int) -> None:
    initial = drawn(elements, torch.float64, 0)
    offloaded = Offloaded(initial, ratio, "device", chunk=chunk)
    assert offloaded.optimizer.host_elements == round(ratio * elements)
    for step, wanted in enumerate(plain(initial)):
        offloaded.optimizer.step([drawn(elements, torch.float64, 1 + step)], offloaded.shard)
        assert (offloaded.read((0, elements)) - wanted).abs().max() <= 1e-13


@pytest.mark.parametrize("shard", ["device", "host"])
def test_parameters_in_bf16_are_the_masters_rounded(shard: str) -> None:
    initial = drawn(131, torch.float32, 0)
    offloaded = Offloaded(initial, 0.5, shard, torch.bfloat16)
    offloaded.optimizer.step([drawn(131, torch.float32, 1)], offloaded.shard)
    assert torch.equal(offloaded.read((0, 131)), offloaded.optimizer.full_master().to(torch.bfloat16))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_bytes_on_each_side_equal_the_closed_form(ratio: float) -> None:
    """Host: 12 a host element, a step counter a chunk, two staging buffers each way. Device: 12 an element that stays."""
    elements, chunk = 1001, 100
    offloaded = Offloaded(drawn(elements, torch.float32, 0), ratio, "device", torch.bfloat16, chunk)
    offloaded.optimizer.step([drawn(elements, torch.float32, 1)], offloaded.shard)
    host = round(ratio * elements)
    staged = min(chunk, host)
    assert offloaded.arrivals_bytes == 2 * 2 * staged
    assert offloaded.pool.bytes == 12 * host + 4 * -(-host // chunk) + 2 * 4 * staged + 2 * 2 * staged
    step_counter = 4 if host < elements else 0
    assert sum(tensor.nbytes for tensor in offloaded.optimizer.device_tensors()) == 12 * (elements - host) + step_counter
    assert [tensor.nbytes for tensor in offloaded.shard.tensors()] == [2 * elements]


def test_a_host_shard_takes_nothing_on_the_device() -> None:
    offloaded = Offloaded(drawn(1000, torch.float32, 0), 1.0, "host", torch.bfloat16, 1000)
    assert list(offloaded.shard.tensors()) == []
    assert offloaded.pool.bytes == (12 + 2 + 2 * 4) * 1000 + 4


def test_the_master_itself_as_shard_is_cast_when_it_is_read() -> None:
    master = drawn(10, torch.float32, 0)
    shard = MasterShard(master, torch.float32)
    assert shard.read([(2, 5)]).values.data_ptr() == master[2:].data_ptr()
    assert torch.equal(shard.read([(0, 2), (5, 10)]).values, torch.cat((master[:2], master[5:])))
    assert MasterShard(master, torch.bfloat16).read([(0, 10)]).values.dtype == torch.bfloat16


def test_frozen_parameters_follow_the_master_and_are_not_cast() -> None:
    master, frozen = drawn(10, torch.float32, 0), drawn(6, torch.bfloat16, 1)
    shard = MasterShard(master, torch.bfloat16, frozen)
    assert torch.equal(shard.read([(8, 13), (15, 16)]).values, torch.cat((master[8:].bfloat16(), frozen[:3], frozen[5:])))
    assert shard.read([(11, 13)]).values.data_ptr() == frozen[1:].data_ptr()
    assert [*shard.tensors()] == [frozen]


def test_a_step_takes_no_host_memory_beyond_the_pool() -> None:
    """On a CPU all allocations of the step are seen: none but what the device's share needs."""
    if DEVICE.type != "cpu":
        pytest.skip("host allocations are seen where the host is the device")
    elements = 1 << 18
    offloaded = Offloaded(drawn(elements, torch.float32, 0), 1.0, "host", torch.bfloat16, 1 << 14)
    gradient = drawn(elements, torch.float32, 1)

    def storages() -> list[tuple[str, Tensor]]:
        return [("gradients", gradient), *((HOST, tensor) for tensor in offloaded.pool.tensors())]

    account = account_step(lambda: offloaded.optimizer.step([gradient], offloaded.shard), storages, DEVICE)
    assert account.host_peak == offloaded.pool.bytes
    assert account.peak - account.at_start["gradients"] < 1024
    assert account.at_start["optimizer_state"] == 0


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_and_1_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Offloaded(drawn(4, torch.float32, 0), ratio, "host")
