"""The share of an AdamW in a file against the same share in host memory: values, bytes, and what a folder can refuse."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.engines.native.file_shard import FileShard, FileShare, _Staged, records, share_in_files
from executor.engines.native.offload import Hyperparameters, Initial, Span, SplitAdamW
from executor.engines.native.parameter_shard import DeviceShard, HostShard
from executor.errors import EngineRefusalError
from executor.files import rank_file
from executor.files.rank_file import RankFile
from executor.parallel.copies import CopyEngine, HostPool, Staging
from executor.parallel.initialization import Given
from search_spaces.training.states import BUFFERS, UNITS
from search_spaces.trial import Workload

CPU = torch.device("cpu")
HYPERPARAMETERS = Hyperparameters(learning_rate=1e-2, weight_decay=0.1, fused=True)


class Pair:
    """The same optimizer twice: its share in host memory, and in a file."""

    def __init__(self, folder: Path, initial: Tensor, ratio: float, chunk: int, pieces: tuple[int, ...] = ()) -> None:
        workload = Workload(global_batch_size=1, sequence_length=1, nvme_path=str(folder))
        self.sides = []
        for make in (None, share_in_files(workload)):
            pool, copies = HostPool(CPU), CopyEngine(CPU)
            first = Initial(Given(initial), initial.dtype, CPU)
            optimizer = SplitAdamW(first, ratio, HYPERPARAMETERS, pool, copies, pieces, chunk, make)
            shard = DeviceShard(initial.numel(), initial.dtype, CPU, Staging(chunk, initial.dtype, pool, copies))
            optimizer.publish(shard)
            self.sides.append((optimizer, shard, pool))

    def step(self, gradient: list[Tensor]) -> None:
        for optimizer, shard, _ in self.sides:
            optimizer.begin()
            optimizer.step([piece.clone() for piece in gradient], shard)

    def values(self) -> Iterator[Tensor]:
        for optimizer, shard, _ in self.sides:
            yield shard.read([(0, sum(value.numel() for value in shard.tensors()))]).values
            yield optimizer.full_master()

    def close(self) -> None:
        for optimizer, _, _ in self.sides:
            optimizer.close()


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [7, 40, 64, 1 << 22])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_files_hold_what_host_memory_would_to_the_bit(tmp_path: Path, ratio: float, chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pair = Pair(tmp_path, torch.randn(131, dtype=dtype), ratio, chunk, pieces=(50, 81))
    for _ in range(4):
        gradient = torch.randn(131, dtype=dtype)
        pair.step([gradient[:50], gradient[50:]])
        first, *others = pair.values()
        assert all(torch.equal(first, other) for other in others)
    pair.close()
    pair.close()


def test_a_step_that_is_skipped_leaves_what_was_read_ahead_to_the_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = Pair(tmp_path, torch.randn(131), 1.0, 7)
    for _ in range(2):
        pair.sides[1][0].begin()
        pair.step([torch.randn(131)])
        first, *others = pair.values()
        assert all(torch.equal(first, other) for other in others)
    pair.close()


def test_host_memory_is_four_buffers_of_a_chunk_and_files_the_rest(tmp_path: Path) -> None:
    elements, chunk = 100_000, 4096
    pair = Pair(tmp_path, torch.zeros(elements), 1.0, chunk)
    optimizer, _, pool = pair.sides[1]
    count = -(-elements // chunk)
    share = optimizer.share
    assert isinstance(share, FileShare)
    staging = (2 + 2) * 4 * chunk
    assert pool.bytes == BUFFERS * 12 * chunk + 4 * count + staging
    assert share.file.size == 12 * chunk * (count - 1) + rank_file.rounded_up(12 * (elements - (count - 1) * chunk))
    before = share.file.bytes_read, share.file.bytes_written
    pair.step([torch.ones(elements)])
    assert share.file.bytes_read - before[0] == share.file.bytes_written - before[1] == share.file.size
    assert next(iter(optimizer.device_tensors())).numel() == 0
    pair.close()


def test_records_begin_where_direct_io_can_begin() -> None:
    found = records([Span(0, 0, 7, 0), Span(0, 7, 5000, 7), Span(1, 5000, 5001, 0)], 4)
    assert [record.extent.offset % rank_file.ALIGNMENT for record in found] == [0, 0, 0]
    assert [record.extent.size % rank_file.ALIGNMENT for record in found] == [0, 0, 0]
    assert found[1].extent.offset == found[0].extent.size


@pytest.mark.parametrize("refused", [False, True])
def test_a_file_system_that_refuses_direct_io_is_told_and_read_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    if refused:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file, pool = RankFile(tmp_path, 3 << 20), HostPool(CPU)
    if refused:
        assert not file.direct
    out, back = pool.pages(3 << 20), pool.pages(3 << 20)
    out.copy_(torch.arange(out.numel()) % 251)
    file.write(0, memoryview(out.numpy())).wait()
    file.read(0, memoryview(back.numpy())).wait()
    assert torch.equal(out, back)
    file.close()


def test_nothing_is_left_in_the_folder_by_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from executor.files.rank_file import RankFile;"
        "file = RankFile(Path(sys.argv[1]), 1 << 20); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineRefusalError, match=r"nvme-path: nvme_path .*gone cannot be written to \(No such file"):
        RankFile(tmp_path / "gone", 1)
    with pytest.raises(EngineRefusalError, match="no folder is named"):
        share_in_files(Workload(global_batch_size=1, sequence_length=1))


def test_a_file_system_without_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineRefusalError, match=r"nvme-space: a rank needs 4,000,002,048 bytes .* which has [\d,]+ left"):
        RankFile(tmp_path, 4_000_000_000)


def test_a_write_that_fails_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pool = RankFile(tmp_path, 1 << 16), HostPool(CPU)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(0, memoryview(pool.pages(1 << 16).numpy())).wait()
    file.close()


def shards(folder: Path, elements: int, piece: int, dtype: torch.dtype) -> tuple[FileShard, HostShard, list[tuple[int, int]]]:
    """Parameters in a file and in host memory, in pieces of the optimizer that do not end where units of three slots do."""
    pool = HostPool(CPU)
    pieces = [(start, min(start + piece, elements)) for start in range(0, elements, piece)]
    slots = [(start, min(start + 11, elements)) for start in range(0, elements, 11)]
    units = [slots[number : number + 3] for number in range(0, len(slots), 3)]
    file = FileShard(pieces, units, dtype, CPU, pool, CopyEngine(CPU), folder)
    largest = max(sum(place.size for place in file._within(unit)) for unit in units)
    assert pool.bytes == UNITS * largest + BUFFERS // 2 * rank_file.rounded_up(min(piece, elements) * dtype.itemsize)
    return file, HostShard(elements, dtype, CPU, pool, CopyEngine(CPU)), slots


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("piece", [7, 50, 1000])
def test_parameters_in_a_file_are_read_as_from_host_memory(tmp_path: Path, piece: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    elements = 131
    file, host, slots = shards(tmp_path, elements, piece, dtype)
    for update in range(3):
        values = torch.randn(elements, dtype=torch.float64)
        file.expect(slots[:3])  # read before the update, and stale after it
        for shard in (file, host):
            if update % 2:
                shard.accept_from_device(0, values)
            else:
                for start in range(0, elements, piece):
                    shard.accept_from_host(start, values[start : start + piece])
            shard.finish()
        file.expect(slots[3:6])
        file.expect(slots[6:9])
        file.expect(slots[9:12])
        for asked in (slots[3:5], [(slots[0][0], slots[7][1])], slots, slots[9:10], [(0, elements)]):
            assert torch.equal(file.read(asked).values, host.read(asked).values)
    file.close()


def test_staged_units_are_compared_by_identity() -> None:
    """Their fields are tensors, whose comparison is a tensor: `list.remove` would raise with two units of equal size."""
    staged = [_Staged(torch.zeros(4), {}), _Staged(torch.zeros(4), {})]
    staged.remove(staged[1])
    assert len(staged) == 1


def test_a_rank_that_trains_nothing_publishes_nothing() -> None:
    pool, copies = HostPool(CPU), CopyEngine(CPU)
    shard = DeviceShard(0, torch.float32, CPU, Staging(8, torch.float32, pool, copies))
    shard.copy_to([], [])
