"""Parts of `make gpu` killed at any point and resumed, out of time, hung; the page of whatever there is."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import work
from benchmarks.gpu.intervals import median_of, rank_correlation, share
from benchmarks.gpu.lines import Claim, Line, LineFile, State, commit_of, read_lines, results
from benchmarks.gpu.page import page
from benchmarks.gpu.proof import Item, Proof, Setting, at_least, at_most, ratio
from benchmarks.gpu.work import Ended, Worker
from search_spaces.trial import Interval

ROOT = Path(__file__).parents[2]
ITEMS = 12

# Imports once, and forks for each run of the part, which kills itself in the middle of a line that it writes.
DRIVER = """
import json, os, random, signal, sys
from pathlib import Path
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import work
from benchmarks.gpu.lines import Line, LineFile, State
from benchmarks.gpu.proof import Item, Setting

out, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)

def show(number):
    return lambda proof: proof.measured(f"figure {number}", figure=number)

items = [Item(name=f"item {number}", show=show(number), seconds=1.0) for number in range(int(sys.argv[4]))]

def run(after, share):
    '''Die in the write after so many, with that share of the line on the disk.'''
    add, written = LineFile.add, 0
    def add_or_die(self, line):
        nonlocal written
        written += 1
        if written > after:
            before = self.path.stat().st_size
            add(self, line)
            size = self.path.stat().st_size
            os.truncate(self.path, before + int(share * (size - before)))
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, line)
    LineFile.add = add_or_die
    setting = Setting(device=torch.device("cpu"), size="small", folder=out.parent)
    os._exit(work.Worker("part", setting, out, [out]).run(items, 600.0))

ended = []
for number in range(kills + 1):
    # At least one item is finished by each.
    after, share = (draw.randint(2, 7), draw.random()) if number < kills else (10**6, 1.0)
    child = os.fork()
    if not child:
        run(after, share)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

# One that never ends: the worker gives it up, and the next run goes on behind it.
hung = out.with_name("hung.jsonl")
def wait(proof):
    signal.pause()
two = [Item(name="hangs", show=wait, seconds=1.0), Item(name="follows", show=show(0), seconds=1.0)]
for _ in range(2):
    child = os.fork()
    if not child:
        setting = Setting(device=torch.device("cpu"), size="small", folder=out.parent)
        worker = work.Worker("part", setting, hung, [hung])
        run_one = worker._run
        worker._run = lambda item, limit, hard: run_one(item, 0.2 if item.name == "hangs" else limit, hard)
        os._exit(worker.run(two, 600.0))
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The file of a part that was killed at eight points, and how each run ended; the last two are of the one that hangs."""
    out = tmp_path_factory.mktemp("lines") / "part.jsonl"
    command = [sys.executable, "-c", DRIVER, str(out), str(random.SystemRandom().randrange(10**6)), "8", str(ITEMS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.prove
def test_killed_anywhere_and_resumed_every_item_has_one_result(driven: tuple[Path, list[int]]) -> None:
    out, ended = driven
    assert ended[0] == -9, "the first was killed"
    assert ended[8] == Ended.WHOLE
    lines = read_lines([out])
    counts = Counter(line.item for line in lines if line.state is not State.BEGUN)
    assert counts == {f"item {number}": 1 for number in range(ITEMS)}
    assert {line.item: line.values["figure"] for line in results(lines).values()} == {
        f"item {number}": number for number in range(ITEMS)
    }


@pytest.mark.prove
def test_an_item_that_hangs_is_given_up_and_the_next_run_goes_on(driven: tuple[Path, list[int]]) -> None:
    out, ended = driven
    assert ended[-2:] == [Ended.AGAIN, Ended.FAILS]
    found = results(read_lines([out.with_name("hung.jsonl")]))
    assert found["part", "hangs"].state is State.FAILS
    assert found["part", "hangs"].claims[0].text.startswith("it hung: ")
    assert found["part", "follows"].state is State.MEASURED


class Clock:
    """Time that passes where an item says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(device=torch.device("cpu"), size="small", folder=tmp_path)


def test_no_item_begins_that_would_not_end_in_time(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), tmp_path / "lines.jsonl"
    monkeypatch.setattr(work, "time", clock)

    def take(proof: Proof) -> None:
        clock.now += 40.0
        proof.measured("done")

    items = [Item(name=name, show=take, seconds=1.0, group="alike") for name in "abc"]
    assert Worker("part", setting, out, [out]).run(items, 100.0) is Ended.AGAIN
    assert [line.item for line in read_lines([out]) if line.state is State.MEASURED] == ["a", "b"]
    assert Worker("part", setting, out, [out]).run(items, 100.0) is Ended.WHOLE
    assert [line.item for line in read_lines([out]) if line.state is State.MEASURED] == ["a", "b", "c"]


def test_an_item_that_never_fits_is_told_and_tried_again(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    items = [Item(name="long", show=lambda proof: proof.measured("done"), seconds=1.0)]
    assert Worker("part", setting, out, [out]).run(items, 5.0) is Ended.FAILS
    assert results(read_lines([out]))["part", "long"].state is State.NOT_RUN
    assert Worker("part", setting, out, [out]).run(items, 60.0) is Ended.WHOLE


def test_an_item_in_which_processes_end_again_and_again_fails(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    for _ in range(work.MOST_STARTS):
        LineFile(out).add(Line(part="part", item="crashes", state=State.BEGUN, card="the CPU"))
    items = [Item(name="crashes", show=lambda proof: proof.measured("done"), seconds=1.0)]
    assert Worker("part", setting, out, [out]).run(items, 60.0) is Ended.FAILS
    assert results(read_lines([out]))["part", "crashes"].state is State.FAILS


def test_what_raises_fails_alone_and_is_run_again_where_that_is_asked_for(setting: Setting, tmp_path: Path) -> None:
    out, broken = tmp_path / "lines.jsonl", [True]

    def show(proof: Proof) -> None:
        if broken:
            raise RuntimeError("no such kernel")
        proof.claim(True, "it runs")

    items = [Item(name="a", show=show, seconds=1.0), Item(name="b", show=lambda proof: proof.measured("done"), seconds=1.0)]
    assert Worker("part", setting, out, [out]).run(items, 60.0) is Ended.FAILS
    assert results(read_lines([out]))["part", "a"].claims[0].text == "it ended early: RuntimeError: no such kernel"
    broken.clear()
    assert Worker("part", setting, out, [out]).run(items, 60.0) is Ended.FAILS
    assert Worker("part", setting, out, [out], again=[State.FAILS]).run(items, 60.0) is Ended.WHOLE


def test_what_needs_no_device_is_taken_over_from_any(setting: Setting, tmp_path: Path) -> None:
    ahead, out = tmp_path / "ahead.jsonl", tmp_path / "lines.jsonl"
    for item, device in (("dry run", "any"), ("trial", "cuda")):
        LineFile(ahead).add(Line(part="part", item=item, state=State.MEASURED, device=device))

    def show(proof: Proof) -> None:
        proof.measured("done")

    items = [Item(name="dry run", show=show, seconds=1.0, needs_device=False), Item(name="trial", show=show, seconds=1.0)]
    assert Worker("part", setting, out, [ahead]).run(items, 60.0) is Ended.WHOLE
    assert [line.item for line in read_lines([out]) if line.state is not State.BEGUN] == ["trial"]


def test_results_of_another_card_are_not_taken_over(setting: Setting, tmp_path: Path) -> None:
    earlier, out = tmp_path / "earlier.jsonl", tmp_path / "lines.jsonl"
    items = [Item(name=name, show=lambda proof: proof.measured("done"), seconds=1.0) for name in ("here", "there")]
    for item, card in (("here", setting.card), ("there", "NVIDIA H100 80GB HBM3")):
        LineFile(earlier).add(Line(part="part", item=item, state=State.MEASURED, card=card))
    assert Worker("part", setting, out, [earlier]).run(items, 60.0) is Ended.WHOLE
    (line,) = (line for line in read_lines([out]) if line.state is not State.BEGUN)
    assert (line.item, line.card, line.commit) == ("there", "the CPU", commit_of(ROOT))


def test_the_card_of_older_lines_is_that_of_their_machine() -> None:
    tracked = read_lines(sorted((ROOT / "benchmarks" / "data").glob("gpu-*.jsonl")))
    assert {line.ran_on for line in tracked if line.device == "cuda"} == {"NVIDIA H200"}


def test_items_run_by_value_and_end_at_their_deadline(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}
    run = Worker._run

    def noted(self: Worker, item: Item, limit: float, hard: float) -> bool:
        limits[item.name] = limit
        return run(self, item, limit, hard)

    monkeypatch.setattr(Worker, "_run", noted)
    made = [
        Item(name=name, show=lambda proof: proof.measured("done"), seconds=1.0, value=value, deadline=deadline)
        for name, value, deadline in (("low", 1.0, 0.0), ("high", 2.0, 30.0), ("also low", 1.0, 40.0))
    ]
    assert Worker("part", setting, tmp_path / "lines.jsonl", []).run(made, 600.0) is Ended.WHOLE
    assert [*limits] == ["high", "low", "also low"]
    assert (limits["high"], limits["also low"]) == (30.0, 40.0) and limits["low"] > 600.0


def test_a_fresh_checkout_resumes_what_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = tmp_path / "tracked"
    for number in range(2):
        line = Line(part="first", item=f"item {number}", state=State.MEASURED, card="the CPU")
        LineFile(tracked / f"gpu-{number}.jsonl").add(line)
    items = [Item(name=f"item {number}", show=lambda proof: proof.measured("done"), seconds=1.0) for number in range(3)]
    monkeypatch.setattr(command, "TRACKED", tracked)
    monkeypatch.setitem(command.PARTS, "first", lambda _: items)
    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sys, "argv", [
        "gpu", "--device", "cpu", "--part", "first", "--out", str(out), "--folder", str(tmp_path / "folder"),
    ])  # fmt: skip
    assert command.main() is Ended.WHOLE
    assert {line.item for line in read_lines([out])} == {"item 2"}


def test_pages_of_several_cards_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        LineFile(file).add(Line(part="first", item="item", state=State.MEASURED, device="cuda", size="large", card=card))
    assert command.write_page([file], None) == 2
    assert "choose one by --card" in capsys.readouterr().err


def test_an_interval_on_both_sides_of_the_bound_decides_nothing() -> None:
    wide, above, below = (Interval(mean=1.0, low=low, high=high) for low, high in ((0.5, 2.0), (1.0, 1.1), (0.8, 0.99)))
    assert [at_least(each, 1.0) for each in (wide, above, below)] == [State.UNDECIDED, State.HOLDS, State.FAILS]
    assert [at_most(each, 1.0) for each in (wide, above, below)] == [State.UNDECIDED, State.UNDECIDED, State.HOLDS]
    assert at_most(above, 0.9) is State.FAILS


def test_a_wide_ratio_of_times_is_undecided_on_a_gpu_and_no_claim_on_a_cpu(setting: Setting) -> None:
    proof = Proof(setting)
    proof.at_least(ratio([1.0, 2.0], [1.0, 1.0]), 1.0, "speed")
    assert proof.state is State.MEASURED
    setting.device = torch.device("cuda")
    proof = Proof(setting)
    proof.at_least(ratio([1.0, 2.0], [1.0, 1.0]), 1.0, "speed")
    assert proof.state is State.UNDECIDED


@pytest.mark.prove
def test_statistics_of_few_points_say_nothing() -> None:
    assert (rank_correlation([1, 2, 3], [1, 2, 3]).low, median_of([0.01]).high) == (-1.0, float("inf"))
    many = [float(number) for number in range(20)]
    assert rank_correlation(many, many).low == pytest.approx(1.0)
    assert rank_correlation(many, [-value for value in many]).mean == pytest.approx(-1.0)
    half = share(10, 20)
    assert (half.low, half.high) == (pytest.approx(0.2720, abs=1e-4), pytest.approx(0.7280, abs=1e-4))
    assert share(20, 20).high == 1.0 > share(20, 20).low > 0.8


NAMES = {
    "correctness": ["kernels", "graphs"],
    "grid": ["measured: micro 2", "measured: micro 4"],
    "sweep": ["guided sweep"],
    "by-hand": [],
}


def test_the_page_of_partial_files_says_what_was_not_run(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    wide = Claim(state=State.UNDECIDED, text="a ratio of 1.000 [0.500, 2.000]")
    LineFile(one).add(Line(part="correctness", item="kernels", state=State.UNDECIDED, claims=(wide,), card="the CPU"))
    values = {"outcome": "OK", "config": {}, "rate": {"mean": 2.0}, "seconds": 2.0, "peak": 2**20}
    LineFile(other).add(Line(part="grid", item="measured: micro 2", state=State.MEASURED, values=values, card="the CPU"))
    with other.open("a") as file:
        file.write('{"part": "grid", "item": "measured: mi')
    text, failed = page(read_lines([one, other, tmp_path / "absent.jsonl"]), NAMES, "cpu", "small", "the CPU")
    assert not failed
    assert "- **undecided**: kernels: a ratio of 1.000 [0.500, 2.000]" in text
    assert "- *not run*: graphs" in text
    assert "- *not run*: guided sweep" in text
    assert "| micro 2 | 2.000 | 2.000 |" in text
    assert "- *not run*: 1 of 2 items, from `measured: micro 4` on" in text
    assert "- **fails**" not in text
    page_of_nothing, _ = page([], NAMES, "cpu", "small", "the CPU")
    assert "| grid |  |  |  |" in page_of_nothing


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("no JSON\n{}\n")
    with pytest.raises(ValueError, match=r"lines.jsonl:1 is not a result .* remove the line"):
        read_lines([path])
