"""GPUs by the driver's own listing, of which torch would see some, or none."""

from pathlib import Path

import pytest

from executor.detect import LocalGpus, local_gpus

H100 = LocalGpus(name="NVIDIA H100 80GB HBM3", count=2, memory_bytes=81559 * 2**20)
LISTED = "\n".join(f"{index}, GPU-{index}aaa-bbbb, {H100.name}, 81559" for index in range(2))


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1", 2), ("1", 1), ("GPU-1aaa", 1), ("0,7,1", 1), ("MIG-1/2", 2), ("", 0), ("-1", 0)]
)
def test_what_is_not_visible_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, count: int
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\ncat <<END\n{LISTED}\nEND\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = local_gpus()
    assert (found.count if found else 0) == count
    assert found is None or (found.name, found.memory_bytes) == (H100.name, H100.memory_bytes)


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpus() is None
