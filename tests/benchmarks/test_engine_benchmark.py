"""The benchmark of engines: its counts against closed forms, and the link that it makes and removes."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.shaped_link import NAMESPACES, PREFIX, why_not
from benchmarks.engines.engine import RANKS, Setting, llama, rows, run
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly

TINY = Setting(
    name="tiny",
    model=llama("tiny", layers=2, hidden=64, ffn=128, vocabulary=256),
    workload=Workload(global_batch_size=4, sequence_length=32),
    config=TrialConfig(micro_batch_size=2),
)
MISSING = why_not()


def namespaces() -> set[str]:
    return {path.name for path in Path(NAMESPACES).glob(f"{PREFIX}-{os.getpid()}-*")}


@pytest.fixture(scope="module")
def ran() -> dict[str, dict[str, Any]]:
    arguments = argparse.Namespace(
        contests=["stage 0", "stage 3"], engines=None, rounds=2, steps=1, rate="none" if MISSING else "500mbit", set={}
    )
    return run(TINY, arguments)


@pytest.fixture(scope="module")
def found(ran: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: ran["stage 0"][name] for name in ("native", "ddp")}


def test_an_all_reduced_model_is_counted_alike_for_every_engine(found: dict[str, Any]) -> None:
    for row in rows(found, TINY.workload.global_batch_size):
        assert row.collectives["allreduce"][1] == 4 * TINY.model.parameter_count
        assert row.sent_bytes == 4 * TINY.model.parameter_count * 2 * (RANKS - 1) / RANKS


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_link_carries_what_is_counted_and_goes_away(found: dict[str, Any]) -> None:
    for row in rows(found, TINY.workload.global_batch_size):
        assert RANKS * row.sent_bytes <= row.wire_bytes <= 1.05 * RANKS * row.sent_bytes + 20_000
    assert not namespaces()


def test_fsdp2_waits_for_its_collectives_where_it_calls_them(ran: dict[str, dict[str, Any]]) -> None:
    """Gathers and reductions; at its own setting that starts gathers first, reductions alone."""
    waits = {row.engine: row.waited for row in rows(ran["stage 3"], TINY.workload.global_batch_size)}
    assert waits["native"][0] == 0 < waits["native"][1]
    assert waits["fsdp2"][0] == waits["fsdp2"][1] > waits["fsdp2, root kept"][1] == waits["fsdp2, prefetch"][0]
    units = TINY.model.num_layers + 1
    assert waits["fsdp2, prefetch beside"] == (units, waits["fsdp2, prefetch"][1])


def test_other_losses_refuse_the_comparison(found: dict[str, Any]) -> None:
    wrong = found["ddp"] | {"losses": [loss * 1.01 for loss in found["ddp"]["losses"]]}
    with pytest.raises(SystemExit, match="no comparison"):
        rows(found | {"ddp": wrong}, TINY.workload.global_batch_size)
