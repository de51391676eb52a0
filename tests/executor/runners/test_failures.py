"""What an exception means for its trial."""

import pytest
import torch
import torch.distributed as dist

from executor.errors import EngineRefusalError, FactoryError, MemoryLimitError, WrongResultError, failure_table
from executor.measurement.device import CudaCounters
from executor.runners.rank_loop import DeviceMemory
from executor.runners.verdict import classify
from search_spaces.failure import rows_from
from search_spaces.outcome import Outcome

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5678"


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (EngineRefusalError("a-rule", "use stage 0-2"), Outcome.INVALID, "use stage 0-2"),
        (MemoryLimitError("peak of 2 GiB"), Outcome.INFEASIBLE, "peak of 2 GiB"),
        (torch.OutOfMemoryError("CUDA out of memory"), Outcome.INFEASIBLE, "OutOfMemoryError: CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), Outcome.INFEASIBLE, None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), Outcome.INFEASIBLE, None),
        (WrongResultError("the loss is not finite"), Outcome.WRONG, "the loss is not finite"),
        (ValueError("of the user\nsecond line"), Outcome.FAILED, "ValueError: of the user"),
        (KeyboardInterrupt(), Outcome.FAILED, "KeyboardInterrupt"),
    ],
)
def test_each_error_has_its_outcome(error: BaseException, outcome: Outcome, message: str | None) -> None:
    failure = classify(error)
    assert failure.outcome is outcome
    assert message in (None, failure.message)
    assert (failure.traceback is not None) == (outcome is Outcome.FAILED)


def test_a_refusal_has_the_name_of_its_rule() -> None:
    assert classify(EngineRefusalError("a-rule", "why")).rule == "a-rule"


def test_memory_that_runs_out_inside_a_factory_is_INFEASIBLE() -> None:
    error = FactoryError("mine:build raised RuntimeError")
    error.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    assert classify(error).outcome is Outcome.INFEASIBLE


def test_a_sticky_error_retires_the_process() -> None:
    failure = classify(RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"))
    assert (failure.outcome, failure.cause, failure.retire) == (Outcome.FAILED, "sticky-cuda", True)
    assert not classify(ValueError("mine")).retire


@pytest.mark.parametrize(
    ("held", "free", "cause"),
    [(0, 10, "device-memory"), (2 * 2**30, 2**20, "device-memory-leftover"), (2**30, 2**20, "device-memory")],
)
def test_what_a_warm_process_holds_may_be_to_blame(monkeypatch: pytest.MonkeyPatch, held: int, free: int, cause: str) -> None:
    memory, counters = DeviceMemory(), CudaCounters(torch.device("cuda", 0))
    libraries = 3 * 2**30
    left = iter([80 * 2**30, 80 * 2**30 - libraries, 80 * 2**30 - libraries - held, free])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(left), 80 * 2**30))
    for _ in range(3):
        memory.begin(counters)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB")
    assert classify(error, signs_of=memory.signs).cause == cause


def test_what_a_failed_first_trial_has_left_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, counters = DeviceMemory(), CudaCounters(torch.device("cuda", 0))
    left = iter([80 * 2**30, 76 * 2**30, 2**20])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(left), 80 * 2**30))
    memory.begin(counters)
    memory.failed()
    memory.begin(counters)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB")
    assert classify(error, signs_of=memory.signs).cause == "device-memory-leftover"


def test_a_users_row_tells_an_exception() -> None:
    rows = rows_from({"licence": {"message": ["no licence"], "outcome": "LOST", "remedy": "buy"}}, failure_table())
    failure = classify(RuntimeError("no licence left"), failure_table(rows))
    assert (failure.outcome, failure.cause) == (Outcome.LOST, "licence")
    assert failure.traceback is not None


@pytest.mark.parametrize(
    ("error", "broken"),
    [(RuntimeError(GLOO), True), (dist.DistNetworkError("the store is gone"), True), (RuntimeError("shape mismatch"), False)],
)
def test_a_broken_collective_is_told_apart(error: Exception, broken: bool) -> None:
    assert classify(error).collective is broken
