"""Networks as sources describe them."""

import pytest

from autotune.knowledge.row_names import network_understood, row_hardware

GIGABYTE = 1e9


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("1600 Gb/s per node (RoCE)", 200),
        ("8x400 Gb/s NDR IB per node", 400),
        ("8x ConnectX-7 400 Gb/s", 400),
        ("8 x ConnectX-7 400 Gb/s", 400),
        ("8× CX-7 @ 400Gb/s", 400),
        ("2x ConnectX-6 HDR 200Gb/s", 50),
        ("4 Omni-Path 100 Gb/s links per node", 50),
        ("400 Gb/s per GPU", 400),
        ("50 GB/s per GPU", 400),
        ("8 NICs of 100 Gbit/s", 100),
        ("400G x 8", 400),
        ("3.2 Tb/s", 400),
        ("EFA 3200 Gbps", 400),
        ("EFAv2", 400),
        ("8x NDR", 400),
        ("4x HDR200", 100),
        ("InfiniBand HDR, 8 ports", 200),
        ("100GbE", 12.5),
        ("25gbps Ethernet", 3.125),
    ],
)
def test_the_rate_of_a_node_is_read(text: str, gigabytes: float) -> None:
    found = row_hardware("H100-SXM-80GB", 8, 64, None, text)
    assert found is not None
    assert found.inter == pytest.approx(gigabytes * GIGABYTE)
    assert network_understood(text)


@pytest.mark.parametrize("text", ["InfiniBand", "8x ConnectX-7", "fast"])
def test_without_a_rate_the_usual_network_of_the_device_is_assumed(text: str) -> None:
    found, usual = row_hardware("H100-SXM-80GB", 8, 64, None, text), row_hardware("H100-SXM-80GB", 8, 64, None, None)
    assert found == usual
    assert not network_understood(text)
