"""The page of the GPU proofs, from the lines of their files, complete or not."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gpu.conclusions import Known, of_grid, of_sweep, points_of
from benchmarks.gpu.lines import ANY, Claim, Line, State, results, worst
from benchmarks.gpu.manual import MANUAL

ORDER = (State.HOLDS, State.FAILS, State.UNDECIDED, State.NOT_RUN, State.SKIPPED, State.MEASURED)
MEANING = (
    "Every claim **holds**, **fails**, or is **undecided**: its 95 % interval has values on both sides of the bound.",
    "*Measured* figures have no claim, this device cannot show *skipped* items, and *not run* items have no result yet.",
)
COVERAGE = """
What ran, and what did not, whatever holds below:

- Nothing ran on two devices. `one rank` calls NCCL in a group of one rank: its operations and streams, no traffic.
- `two ranks` and `wrapped pair` are two processes on one device, joined by gloo through host memory.
- `losses: ENGINE` trains on one rank, where DDP and FSDP2 wrap nothing and DeepSpeed divides nothing; only `wrapped pair` has
  engines that wrap the model and send.
- An item that is *not run* or *skipped* shows nothing. Results without a commit are of older code.
"""
DESCRIPTIONS = {
    "first": "What users run, in the order of its value.",
    "correctness": "What the engine computes, sends and allocates.",
    "grid": "A screening design (`benchmarks/gpu/design.py`): each point covers pairs of values that earlier ones do not. "
    "Every point was predicted before it was measured, in one warm process.",
    "sweep": "The command line, as a user runs it.",
    "by-hand": "Our engine against plain PyTorch, and operators that only a GPU has.",
}


def page(lines: Sequence[Line], names: Mapping[str, Sequence[str]], device: str, size: str, card: str) -> tuple[str, bool]:
    """The page's text, and whether a claim fails.

    Args:
        lines: lines of all files; those of other devices and sizes are ignored.
        names: part -> its items, in order.
        device: cuda or cpu; only its results are shown.
        size: size of the models.
        card: name of the device; results of other devices are ignored.
    """
    known = results(
        line for line in lines if line.size == size and (line.device == ANY or (line.device == device and line.ran_on == card))
    )
    together = {"grid": of_grid(known, size, device == "cuda"), "sweep": of_sweep(known, device == "cuda")}
    states = {
        part: [_state(known, part, item) for item in items] + [claim.state for claim in together.get(part, ())]
        for part, items in names.items()
    }
    text = ["# On a GPU", "", *_head(known, device), "", *MEANING, *COVERAGE.splitlines(), "", *_summary(states)]
    for part, items in names.items():
        text += ["", f"## {part.capitalize()}", "", DESCRIPTIONS.get(part, ""), ""]
        if part == "grid":
            text += [*_table(known), ""]
        text += [line for claim in together.get(part, ()) for line in _bullet(claim)]
        shown = [item for item in items if part != "grid" or _state(known, part, item) in (State.FAILS, State.UNDECIDED)]
        text += [line for item in shown for line in _item(known, part, item)]
        if left := [item for item in items if part == "grid" and (part, item) not in known]:
            text += [f"- *not run*: {len(left)} of {len(items)} items, from `{left[0]}` on"]
    text += ["", MANUAL.strip(), ""]
    failed = any(State.FAILS in found for found in states.values())
    return "\n".join(text), failed


def _head(known: Known, device: str) -> list[str]:
    machines = sorted({line.machine for line in known.values() if line.device == device and line.machine})
    seconds = sum(line.seconds for line in known.values())
    source = f"Written by `python -m benchmarks.gpu --page` from {len(known)} results, {seconds / 60:.0f} minutes of work"
    commits = sorted({line.commit for line in known.values() if line.commit})
    unnamed = sum(line.state is not State.SKIPPED and not line.commit for line in known.values())
    of = f", of commit {', '.join(commits)}" if commits else ""
    of += f" ({unnamed} results do not name their commit)" if unnamed else ""
    where = f" on {'; '.join(machines)}{of}." if machines else f"{of}."
    if device == "cpu":
        note = (
            "**These results are from a CPU and tiny models**: they show that the proofs themselves run, without claims about "
            "times."
        )
        return [source + where, "", note]
    return [source + where]


def _summary(states: Mapping[str, Sequence[State]]) -> list[str]:
    rows = ["| part | " + " | ".join(ORDER) + " |", "|---" * (len(ORDER) + 1) + "|"]
    for part, found in states.items():
        counts = Counter(found)
        rows.append(f"| {part} | " + " | ".join(str(counts[state] or "") for state in ORDER) + " |")
    return rows


def _state(known: Known, part: str, item: str) -> State:
    line = known.get((part, item))
    return State.NOT_RUN if line is None else line.state


def _item(known: Known, part: str, item: str) -> list[str]:
    line = known.get((part, item))
    if line is None:
        return [f"- *not run*: {item}"]
    if len(line.claims) == 1:
        return _bullet(Claim(state=line.state, text=f"{item}: {line.claims[0].text}"))
    text = [f"- {_word(worst([line.state]))}: {item} ({line.seconds:.0f} s)"]
    return text + [f"  {bullet}" for claim in line.claims for bullet in _bullet(claim)]


def _bullet(claim: Claim) -> list[str]:
    return [f"- {_word(claim.state)}: {claim.text}"]


def _word(state: State) -> str:
    return f"**{state}**" if state in (State.HOLDS, State.FAILS, State.UNDECIDED) else f"*{state}*"


def _table(known: Known) -> list[str]:
    """A row for each point that was predicted or measured, fastest first."""
    points = points_of(known)
    if not points:
        return ["No point was predicted or measured."]
    rows = [
        "| configuration | samples/s | step, s | predicted | peak, MiB | dry run | predicted |",
        "|---|---|---|---|---|---|---|",
    ]

    def rate(label: str) -> float:
        measured = points[label]["measured"] or {}
        return float(measured.get("rate", {}).get("mean", 0.0))

    for label in sorted(points, key=rate, reverse=True):
        predicted, dry = points[label]["predicted"] or {}, points[label]["dry"] or {}
        measured = points[label]["measured"]
        outcome = "not run" if measured is None else str(measured.get("outcome", "fails"))
        ran = measured is not None and "rate" in measured
        cells = [
            f"{rate(label):.3f}" if ran else outcome,
            f"{measured['seconds']:.3f}" if measured and ran else "",
            _band(predicted.get("seconds"), 1.0, 3),
            f"{measured['peak'] / 2**20:,.1f}" if measured and ran else "",
            f"{dry['peak'] / 2**20:,.1f}" if "peak" in dry else "",
            _band(predicted.get("peak"), 2**20, 1),
        ]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


def _band(value: Mapping[str, float] | None, unit: float, digits: int) -> str:
    if not value:
        return ""
    mean, low, high = (f"{value[name] / unit:,.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
