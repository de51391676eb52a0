"""Tests of failure rates: presets and logs."""

from pathlib import Path

import pytest

from autotune.errors import RequestError
from autotune.goodput.failures import failure_rates, preset_names, read_log
from autotune.goodput.run import Bandwidths, Checkpoint, CheckpointKind, SavedState, checkpoint_of


def log(folder: Path, *rows: str) -> Path:
    path = folder / "log.csv"
    path.write_text("\n".join(("hours,kind", *rows)) + "\n")
    return path


def test_presets_reproduce_their_publications() -> None:
    llama = failure_rates("llama3", 2048)
    assert llama.per_second(2048) * 54 * 86400 == pytest.approx(419, rel=1e-3)
    assert failure_rates("rsc1", 2048).mean_hours_between(2048) == pytest.approx(1.8, rel=0.01)
    assert failure_rates("rsc1-jobs-1024", 128).mean_hours_between(128) == pytest.approx(7.9, rel=0.01)
    assert all(failure_rates(name, 1).source for name in preset_names())


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(RequestError, match="failures: 'llama5' is not known; use one of llama3, "):
        failure_rates("llama5", 1)


def test_a_log_is_counted_by_kind(tmp_path: Path) -> None:
    rows = ["0,start", "10,gpu", "30,network", "48,planned", "60,gpu", "72,end"]
    rates = failure_rates(str(log(tmp_path, *rows)), 4)
    assert {kind.name: (kind.per_node_day, kind.takes_node) for kind in rates.kinds} == {
        "gpu": (pytest.approx(2 / 12), True), "network": (pytest.approx(1 / 12), False),
    }  # fmt: skip
    assert (rates.planned_per_day, rates.events) == (pytest.approx(1 / 3), 3)


def test_pauses_do_not_count(tmp_path: Path) -> None:
    rates = read_log(log(tmp_path, "0,start", "6,gpu", "12,paused", "500,resumed", "506,gpu", "512,end"), 1)
    assert rates.per_node_day == pytest.approx(2)


EVERY_HOUR = tuple(f"{hour},gpu" for hour in range(1, 50))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("-1,start", "5,end"), "line 2 has -1 hours; give hours since the start, 0 or more"),
        (("0,start", "5,gpu", "4,gpu", "9,end"), "line 4 is at 4 h, before the line above it; sort the rows by hours"),
        (("0,start", "5,gpu"), "its last row is not an `end`; add when the recording ended"),
        (("5,gpu", "9,end"), "its first row is not a `start`; add when the recording started"),
        (("0,start", "five,gpu", "9,end"), "line 3 is not HOURS,KIND; write for example 12.5,gpu"),
        (("0,start", "nan,gpu", "9,end"), "line 3 has nan hours; give hours since the start, 0 or more"),
        (("0,start", "2,paused", "3,gpu", "9,end"), "the row at 3 h .gpu. is in a pause; add a row `resumed` before it"),
        (("0,start", "0,end"), "it covers no time; give rows `start` and `end` at different hours"),
        (
            ("0,start", *EVERY_HOUR, "250,gpu", "251,end"),
            "it has no entry for 201 h after 49 h, with one every 5.02 h on average; add rows `paused` and `resumed`",
        ),
    ],
)  # fmt: skip
def test_a_faulty_log_is_refused_in_one_line(tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=rf"^failures: log\.csv: {message}") as error:
        read_log(log(tmp_path, *rows), 1)
    assert "\n" not in str(error.value)


def test_a_missing_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"failures: none\.csv: it cannot be read"):
        failure_rates(str(tmp_path / "none.csv"), 1)


STATE = SavedState(total_bytes=6e12, saved_bytes_per_device=1e9, loaded_bytes_per_device=4e9)


def times(kind: CheckpointKind) -> Checkpoint:
    paths = Bandwidths(write=100e9, read=200e9, node=10e9, host=5e9)
    return checkpoint_of(STATE, paths, kind, devices_per_node=8, slowdown=0.01)


def test_the_file_system_or_the_node_limits_a_synchronous_checkpoint() -> None:
    found = times(CheckpointKind.SYNCHRONOUS)
    assert (found.blocking_seconds, found.durable_seconds, found.load_seconds) == (60.0, 0.0, 30.0)


def test_an_asynchronous_checkpoint_stops_for_the_copy_to_the_host() -> None:
    found = times(CheckpointKind.ASYNCHRONOUS)
    assert (found.blocking_seconds, found.durable_seconds) == (pytest.approx(0.2 + 0.6), 60.0)


def test_peers_need_no_file_system() -> None:
    found = times(CheckpointKind.PEERS)
    assert (found.durable_seconds, found.load_seconds) == (pytest.approx(0.8), pytest.approx(3.2))


def test_a_bandwidth_of_zero_is_refused() -> None:
    with pytest.raises(RequestError, match="write_bandwidth: 0 is not positive; give bytes per second"):
        Bandwidths(write=0)
