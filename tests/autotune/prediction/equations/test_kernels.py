"""Kernels by shape: the form of the equations, and the constants that were fitted to published measurements."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.kernels import (
    attention_slowdown,
    link_seconds,
    nearest,
    product_efficiency,
    product_seconds,
    sustained_share,
)
from benchmarks.prediction import kernel_model
from search_spaces.clusters.devices import device_preset
from search_spaces.preset_files import preset_tables

RATES = Coefficients()
DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[5] / "shared" / "data")) / "operators"


def product(rows: float, inner: float, outer: float, bandwidth: float = np.inf) -> float:
    sizes = (np.full(1, size) for size in (rows, inner, outer))
    return float(product_seconds(*sizes, np.full(1, 1e12), np.full(1, bandwidth), np.full(1, 2.0), RATES)[0])


def test_half_of_the_speed_is_reached_at_the_half_sizes() -> None:
    large = 1e9
    whole = 2 * large**3 / (1e12 * RATES.matrix_efficiency)
    assert product(large, large, large) == pytest.approx(whole, rel=1e-5)
    assert product(RATES.rows_half, large, large) == pytest.approx(2 * whole * RATES.rows_half / large, rel=1e-5)
    for sizes in ((large, RATES.width_half, large), (large, large, RATES.width_half)):
        assert product(*sizes) == pytest.approx(2 * whole * RATES.width_half / large, rel=1e-5)


def test_a_narrow_product_takes_as_long_as_its_bytes() -> None:
    moved = 2.0 * (4096 * 4096 + 2 * 4096)
    assert product(1.0, 4096.0, 4096.0, bandwidth=1e6) == pytest.approx(moved / 1e6, rel=1e-6)


def test_attention_is_fastest_with_long_sequences_and_wide_heads() -> None:
    assert attention_slowdown(np.full(1, 4096.0), np.full(1, 128.0))[0] == pytest.approx(1.0)
    lengths, widths = np.array([256.0, 1024.0, 8192.0]), np.array([32.0, 64.0, 256.0])
    assert np.all(np.diff(attention_slowdown(lengths, np.full(3, 128.0))) < 0)
    assert np.all(np.diff(attention_slowdown(np.full(3, 4096.0), widths)) < 0)
    narrow, usual = (attention_slowdown(np.full(1, 4096.0), np.full(1, width), 1e15)[0] for width in (64.0, 128.0))
    assert narrow > attention_slowdown(np.full(1, 4096.0), np.full(1, 64.0))[0] and usual == pytest.approx(1.0)


def test_many_messages_take_longer_than_one_of_their_size() -> None:
    volume, rates = np.full(1, 1e8), dataclasses.replace(RATES, link_efficiency=1.0)
    streamed = 1e8 / 1e11
    one, four = (float(link_seconds(volume, np.full(1, count), np.full(1, 1e11), rates)[0]) for count in (1.0, 4.0))
    assert one - streamed == pytest.approx((rates.chunk_seconds * streamed) ** 0.5)
    assert four - streamed == pytest.approx(2 * (one - streamed))


def test_a_device_that_was_not_measured_borrows_from_the_nearest() -> None:
    measured = {name: product_efficiency(device_preset(name)) for name in kernel_model.DEVICES.values()}
    h800 = device_preset("h800")
    assert nearest(h800, [*map(device_preset, measured)]).name == "h100"
    assert product_efficiency(h800) == measured["h100"]
    unnamed = dataclasses.replace(device_preset("b200"), name="a card of somebody's")
    assert product_efficiency(unnamed) == measured["b200"] < 1.0
    for name in preset_tables("devices"):
        assert 0.6 < product_efficiency(device_preset(name)) < 1.5, name


@pytest.mark.prove
@pytest.mark.skipif(not DATA.is_dir(), reason="the measurements are not here; AUTOTUNE_DATA names their folder")
@pytest.mark.parametrize("kind", kernel_model.KINDS, ids=lambda kind: kind.own)
def test_what_is_shipped_was_fitted_to_the_measurements(kind: kernel_model.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_model, "SAMPLE", 400)
    generator = np.random.default_rng(1)
    tables = {name: table[generator.permutation(len(table))[:400]] for name, table in kind.read(DATA).items()}
    own, shared = kernel_model.fit(kind, tables)
    for name, value in zip(kind.shared, shared, strict=True):
        if name in kind.shipped:
            assert value == pytest.approx(kind.shipped[name], rel=1.2 if name == "narrow_head" else 0.35), name
    if kind.own == "matrix_efficiency":
        usual = np.mean([own[name] for name in kernel_model.PEERS])
        for name, value in own.items():
            assert value / usual == pytest.approx(product_efficiency(device_preset(name)), rel=0.06), name


def test_a_power_limit_slows_lasting_products_in_16_bits() -> None:
    blackwell, hopper = device_preset("b200"), device_preset("h100")
    assert sustained_share(hopper, "bf16") == sustained_share(blackwell, "fp8") == 1.0
    unnamed = dataclasses.replace(blackwell, name="a card of somebody's")
    assert sustained_share(unnamed, "bf16") == sustained_share(blackwell, "bf16") < 0.8
    turing = device_preset("t4")
    assert product_efficiency(turing) == 1.0 > sustained_share(turing, "fp16") == pytest.approx(0.5, abs=0.01)


def test_consumer_cards_exceed_their_stated_peak_and_lend_to_no_other() -> None:
    card = device_preset("4090")
    assert product_efficiency(card) > 1.2
    assert product_efficiency(dataclasses.replace(card, name="a card of somebody's")) < 1.1
