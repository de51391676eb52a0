"""Signs of predicted changes against runs that NVIDIA published with and without one change.

    python -m benchmarks.prediction.bridge_pairs [--markdown docs/results/bridge-pairs.md]

Each run is written as overrides of Megatron-Bridge, read by the import that `autotune lint` uses, and predicted as it predicts.
"""

import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.recipes.lint import lint
from benchmarks.common.written_page import give, page_parser, table
from search_spaces.clusters.presets import resolve_cluster

PAIRS = Path(__file__).parents[1] / "data" / "bridge-pairs.toml"
NOTHING = 0.005
"""Relative change, of what was measured, that counts as none: then the predicted change must be below `SMALL`."""
SMALL = 0.02
WANTED = 0.9
"""Share of signs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of a run."""

    gb: float
    seconds: float
    probability: float
    """That it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity of a run relative to the first run of its group."""

    group: str
    run: str
    quantity: str
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the predicted change has the sign of the measured one."""
        if abs(self.measured) < NOTHING:
            return abs(self.predicted) < SMALL
        return self.measured * self.predicted > 0


def predicted(group: Mapping[str, Any], run: Mapping[str, Any]) -> Predicted:
    """The prediction of a run.

    Raises:
        SystemExit: there is none; the reason is in the message.
    """
    stated = dict(word.partition("=")[::2] for word in f"{group['settings']} {run['settings']}".split())
    words = " ".join(f'"{name}={value}"' for name, value in stated.items() if value != "null" or name == "model.q_lora_rank")
    cluster = resolve_cluster(group["cluster"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.sh"
        file.write_text(f"torchrun --nproc_per_node {cluster.devices_per_node} run.py {words}\n", encoding="utf-8")
        (written,) = read_written(file, "megatron-bridge")
        outlook = lint(written, Surroundings(cluster=cluster)).outlook
    if isinstance(outlook, str):
        raise SystemExit(f"{group['name']}, {run['name']}: {outlook}")
    allocated = sum(size for tag, size in outlook.fullest.by_tag.items() if tag not in ("reserved", "context"))
    return Predicted(gb=allocated / 1e9, seconds=outlook.step_seconds.mean, probability=outlook.fit_probability)


def changes(group: Mapping[str, Any], answers: Mapping[str, Predicted]) -> Iterator[Change]:
    """Of every compared run: its peak, and the time of its step."""
    first, *others = group["runs"]
    before = answers[first["name"]]
    for run in others:
        if "unlike" in run or run["name"] not in answers:
            continue
        after = answers[run["name"]]
        named = {"group": group["name"], "run": run["name"]}
        if "gb" in run:
            yield Change(**named, quantity="peak", measured=run["gb"] / first["gb"] - 1, predicted=after.gb / before.gb - 1)
        if "rate" in run or "seconds" in run:
            slower = first["rate"] / run["rate"] if "rate" in run else run["seconds"] / first["seconds"]
            yield Change(**named, quantity="step", measured=slower - 1, predicted=after.seconds / before.seconds - 1)


INTRODUCTION = """\
Written by `python -m benchmarks.prediction.bridge_pairs --markdown docs/results/bridge-pairs.md`: runs with and without one
change, from the skills of NVIDIA-NeMo/Megatron-Bridge (Apache-2.0), on H100. Each run is written as overrides of its settings,
read by the import of `autotune lint`, and predicted. No coefficient is fitted to them. A change is relative to the first run of
its group. The sign is right if predicted and measured change agree in direction; a measured change below {nothing:.1%} is none,
and then the predicted one has to be below {small:.0%}.

Settings that the pages do not state are those of the repository's recipe of the same model and devices. Three things were
changed after a first look: the time of modules that Megatron-LM's arguments name is that of these modules, memory includes what
the layer in backward has recomputed, and the import reads whether the exchange of experts is overlapped."""


def page(groups: list[dict[str, Any]], answers: Mapping[str, Mapping[str, Predicted]]) -> tuple[list[str], bool]:
    """The page, and whether both targets are met."""
    rows = [change for group in groups for change in changes(group, answers[group["name"]])]
    right = sum(change.right for change in rows)
    verdicts = [
        (group["name"], run["name"], run["ran"], answers[group["name"]][run["name"]].probability)
        for group in groups for run in group["runs"] if "ran" in run
    ]  # fmt: skip
    open_verdicts = [verdict for verdict in verdicts if 1 - PROBABILITY < verdict[3] < PROBABILITY]
    wrong = [verdict for verdict in verdicts if verdict not in open_verdicts and verdict[2] != (verdict[3] > 0.5)]
    lines = ["# Predictions against Megatron-Bridge's pairs of runs", ""]
    lines += [*INTRODUCTION.format(nothing=NOTHING, small=SMALL).splitlines(), ""]
    met = right >= WANTED * len(rows)
    lines.append(f"- {'holds' if met else '**DOES NOT HOLD**'}: {right} of {len(rows)} signs are right ({WANTED:.0%} wanted)")
    sure = len(verdicts) - len(open_verdicts)
    lines.append(
        f"- {'**DOES NOT HOLD**' if wrong else 'holds'}: of {len(verdicts)} verdicts {sure} have a probability of at least "
        f"{PROBABILITY:.0%}, and {sure - len(wrong)} of these are right"
    )
    lines += [
        f"    - {group}, {run}: it fits with a probability of {probability:.2f}; it {'ran' if ran else 'ran out of memory'}"
        for group, run, ran, probability in (*wrong, *open_verdicts)
    ]
    for group in groups:
        cells = [
            [
                change.run, change.quantity, f"{change.measured:+.1%}", f"{change.predicted:+.1%}",
                "right" if change.right else "**wrong**",
            ]
            for change in rows if change.group == group["name"]
        ]  # fmt: skip
        lines += ["", f"## {group['name']}", "", f"skills/{group['page']}, on {group['cluster']}.", ""]
        lines += table(["run", "quantity", "measured", "predicted", "sign"], cells)
        absent = [f"Not compared: {run['name']}, because {run['unlike']}." for run in group["runs"] if "unlike" in run]
        lines += ["", *absent] if absent else []
    lines += [
        "",
        "## Not described",
        "",
        "Nemotron 3 Nano: half of its layers are Mamba layers, which no model of this product has.",
    ]
    lines += ["Inputs gathered again in adapters: no knob means it."]
    return lines, met and not wrong


def main() -> int:
    options = page_parser(__doc__).parse_args()
    groups = tomllib.loads(PAIRS.read_text("utf-8"))["group"]
    answers = {
        group["name"]: {run["name"]: predicted(group, run) for run in group["runs"] if "unlike" not in run} for group in groups
    }
    lines, holds = page(groups, answers)
    give(lines, options.markdown)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
