"""The failure table as it comes with the package: each row has an end that it tells, and docs/failures.md lists it."""

import re
from pathlib import Path

import pytest

from executor.errors import failure_table
from search_spaces.failure import Evidence, FailureRow, Sign, rows_from
from search_spaces.outcome import RETRIES, Outcome

TABLE = failure_table()
PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
RAY = "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the node"
NCCL_MEMORY = (
    "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600029 ms"
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5678"
CUDA_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def said(message: str, *signs: Sign, exception: str = "RuntimeError") -> Evidence:
    return Evidence(exceptions=(exception, "Exception", "BaseException"), message=message, signs=signs)


ENDS = [
    ("memory-limit", said("MemoryLimitError: rank 0 needs 2 bytes", exception="MemoryLimitError")),
    ("host-memory-monitor", Evidence(signs=(Sign.OUT_OF_REACH,), output=RAY)),
    ("kernel-oom", Evidence(exit_code=137, signs=(Sign.OOM_KILL,))),
    ("kernel-oom", Evidence(exit_code=-9, signs=(Sign.OOM_KILL,), output=GLOO)),
    ("preempted", Evidence(exit_code=-15)),
    ("preempted", Evidence(exit_code=-10)),
    ("preempted", Evidence(exit_code=143)),
    ("killed", Evidence(exit_code=-9, output=GLOO)),
    ("killed", Evidence(exit_code=137)),
    ("lost-node", Evidence(signs=(Sign.OUT_OF_REACH,), output="The actor is unavailable: node died")),
    ("not-measured", Evidence(signs=(Sign.NOT_MEASURED,))),
    ("library-memory", said(NCCL_MEMORY)),
    ("library-memory", said("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("library-memory", said("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("device-memory-leftover", said(CUDA_MEMORY, Sign.LEFTOVER, exception="OutOfMemoryError")),
    ("device-memory", said(CUDA_MEMORY, exception="OutOfMemoryError")),
    ("device-memory", said("AcceleratorError: CUDA error: out of memory")),
    ("host-allocation", said("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")),
    ("host-allocation", said("MemoryError: ")),
    ("host-allocation", Evidence(exit_code=-6, output="terminate called after throwing an instance of 'std::bad_alloc'")),
    ("ecc", said("AcceleratorError: CUDA error: uncorrectable ECC error encountered")),
    ("driver", said("RuntimeError: CUDA error: all CUDA-capable devices is/are busy or unavailable")),
    ("driver", Evidence(exit_code=1, output="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")),
    ("sticky-cuda", said("AcceleratorError: CUDA error: an illegal memory access was encountered")),
    ("sticky-cuda", said("RuntimeError: CUDA error: device-side assert triggered")),
    ("shared-memory", Evidence(exit_code=-7, output="DataLoader worker: bus error, insufficient shared memory (shm).")),
    (
        "collective-timeout",
        said("RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
    ),
    ("collective-timeout", Evidence(exit_code=-6, output=WATCHDOG)),
    ("collective-usage", said("DistBackendError: NCCL error: ncclInvalidUsage: This usually reflects invalid usage")),
    ("missing-backend", said("RuntimeError: Distributed package doesn't have NCCL built in")),
    ("collective", said(GLOO)),
    ("collective", said("DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a network error")),
    ("collective", said("DistNetworkError: the store is gone")),
    ("hang", Evidence(signs=(Sign.HANG,))),
    ("time-limit", Evidence(signs=(Sign.TIME_LIMIT,))),
    ("python-error", said("KeyError: 'labels'", exception="KeyError")),
    ("crash", Evidence(exit_code=-11, output="Fatal Python error: Segmentation fault")),
    ("dead-rank", Evidence(exit_code=3, output="leaving without a word")),
]


@pytest.mark.parametrize(("name", "end"), ENDS)
def test_each_end_is_told_by_its_row(name: str, end: Evidence) -> None:
    assert TABLE.find(end)[0].name == name


def test_every_row_has_an_end_that_it_tells() -> None:
    assert {row.name for row in TABLE.rows} == {name for name, _ in ENDS}


def test_of_an_error_and_its_causes_the_first_row_tells() -> None:
    outer, inner = said("FactoryError: mine:build raised"), said("RuntimeError: DefaultCPUAllocator: can't allocate")
    row, piece = TABLE.find(outer, inner)
    assert (row.name, piece) == ("host-allocation", inner)


def test_an_outcome_is_retried_as_often_where_no_row_tells_it() -> None:
    for outcome, retries in RETRIES.items():
        assert retries == max(row.retries for row in TABLE.rows if row.outcome is outcome)


def test_what_users_write_wins() -> None:
    mine = rows_from(
        {
            "killed": {"retries": 0},
            "licence": {"output": ["no licence left"], "outcome": "LOST", "retries": 9, "remedy": "ask for more licences"},
        },
        TABLE,
    )
    table = failure_table(mine)
    killed = Evidence(exit_code=-9)
    assert (table.find(killed)[0].retries, table.find(killed)[0].outcome) == (0, Outcome.LOST)
    assert table.find(Evidence(exit_code=-9, output="no licence left"))[0].name == "licence"
    assert [row.name for row in table.rows][1:] == [row.name for row in TABLE.rows]
    assert TABLE.find(killed)[0].retries == 3


def test_the_page_lists_the_rows_in_their_order() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \| ([A-Z]+) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [(row.name, row.outcome.value, what_follows(row)) for row in TABLE.rows]


def what_follows(row: FailureRow) -> str:
    """What becomes of the trial, its processes and its node, in the page's words."""
    retried = {0: "", 1: "once"}.get(row.retries, f"{row.retries} times" if row.retries < 1000 else "always")
    said = [retried, *(name for name in ("verify", "quarantine", "retire", "consequence") if getattr(row, name))]
    return ", ".join(filter(None, said))
