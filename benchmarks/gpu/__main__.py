"""Every proof that needs a GPU, in parts that run one by one, each in under ten minutes.

    python -m benchmarks.gpu --part PART --out FILE.jsonl [--resume FILE.jsonl …] [--seconds 520]
    python -m benchmarks.gpu --page FILE.jsonl … [--markdown docs/results/gpu.md]

first        own scripts, wrapped engines on two ranks, stage 3 over one, adapters, the clock: by value, with deadlines
correctness  every collective over one rank of NCCL, two ranks on one GPU, memory, graphs, all engines and families
grid         configurations of a 1B model in one warm process, time and memory of each predicted beforehand
sweep        `autotune calibrate`, then a guided `autotune sweep --runner local`; the winner against the grid's best
by-hand      our tuned configuration against a 1B model written by hand; float8, flex attention, fused kernels

Every result is a line of FILE.jsonl with its commit and its card, on disk before the next item begins. Results of the same card
in benchmarks/data/gpu-*.jsonl and in the files of `--resume` are not measured again; give all files of the session there, since
sweep and by-hand use the results of grid. An item starts if its expected time is left. Status: 0 all hold, 1 some fail or lack
something, 75 start again with --resume.

`--device cpu` runs the same code at a small size. Items that need no device (dry runs) can be run beforehand on any
machine, `--device cpu --size large --items "dry run"`, and resumed from. Torch, NumPy and SciPy are enough; the part sweep
needs the command line's packages too, or a bundle of them (`make gpu-bundle`).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import by_hand, engines, families, first, graphs, grid, memory, one_rank, pair, sweep, user_models
from benchmarks.gpu.bundle import FOLDER, ROOT
from benchmarks.gpu.lines import State, read_lines
from benchmarks.gpu.page import page
from benchmarks.gpu.proof import Item, Setting
from benchmarks.gpu.work import Ended, Worker


def _correctness(setting: Setting) -> list[Item]:
    return [
        *one_rank.items(), *memory.items(setting), *engines.items(), *families.items(setting),
        *user_models.items(), *pair.items(setting), *graphs.items(setting),
    ]  # fmt: skip


PARTS: dict[str, Callable[[Setting], list[Item]]] = {
    "first": first.items,
    "correctness": _correctness,
    "grid": grid.items,
    "sweep": lambda _: sweep.items(),
    "by-hand": by_hand.items,
}
"""Name -> its items, in the order in which they run."""
SIZES = {"cuda": "large", "cpu": "small"}
FILES = Path("build/gpu")
TRACKED = ROOT / "benchmarks" / "data"
"""Folder of gpu-*.jsonl: results that every checkout resumes, if they are of the same device."""


def main() -> int:
    """Run a part, or write the page."""
    arguments = _parser().parse_args()
    if arguments.page:
        return write_page(arguments.page, arguments.markdown, arguments.card)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device")
        return Ended.WHOLE
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    size = arguments.size or SIZES[arguments.device]
    folder = (arguments.folder or FILES / f"{arguments.device}-{size}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(device=device, size=size, folder=folder, bundle=arguments.bundle.resolve())
    if arguments.device == "cpu" and size == "small":
        torch.set_num_threads(1)  # tiny models do not gain from more
    chosen = [item for item in PARTS[arguments.part](setting) if item.name.startswith(tuple(arguments.items))]
    tracked = sorted(TRACKED.glob("gpu-*.jsonl"))
    worker = Worker(
        arguments.part, setting, arguments.out, [*tracked, *arguments.resume], [State(state) for state in arguments.again]
    )
    try:
        return worker.run(chosen, arguments.seconds)
    finally:
        setting.close()


def write_page(files: list[Path], markdown: Path | None, card: str = "") -> int:
    """Write the page of all files; return 1 if a claim fails."""
    lines = read_lines(files)
    cards = sorted({line.ran_on for line in lines if line.device == "cuda"})
    if not card and len(cards) > 1:
        print(f"the results are of {'; '.join(cards)}: choose one by --card", file=sys.stderr)
        return 2
    card = card or (cards[0] if cards else "the CPU")
    kind = "cuda" if cards else "cpu"
    setting = Setting(device=torch.device(kind), size=SIZES[kind], folder=FILES)
    names = {part: [item.name for item in items(setting)] for part, items in PARTS.items()}
    recorded = [*dict.fromkeys(line.item for line in lines if line.part == "grid" and line.size == SIZES[kind])]
    if set(recorded) - set(names["grid"]):  # of a design with other points, before a knob changed
        names["grid"] = recorded
    text, failed = page(lines, names, kind, SIZES[kind], card)
    if markdown:
        markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--part", choices=PARTS)
    what.add_argument("--page", type=Path, nargs="+", metavar="FILE", help="render these files")
    parser.add_argument("--markdown", type=Path, help="where the page is written; default: standard output")
    parser.add_argument("--card", default="", help="the device of the page, if the files have results of several")
    parser.add_argument("--out", type=Path, default=FILES / "lines.jsonl", help="file that results are appended to")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], metavar="FILE", help="files with earlier results")
    parser.add_argument("--seconds", type=float, default=520.0, help="time for this run")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--size", choices=("small", "large"), help="size of the models; default: large on a GPU")
    parser.add_argument("--items", nargs="+", default=[""], metavar="NAME", help="only items whose names begin with NAME")
    states = ("fails", "undecided", "skipped")
    parser.add_argument("--again", nargs="+", default=[], choices=states, help="run items with these results again")
    parser.add_argument("--folder", type=Path, help="for the sweep's database and packages; default: in build/gpu")
    parser.add_argument("--bundle", type=Path, default=FOLDER, help="wheels of the command line's packages")
    return parser


if __name__ == "__main__":
    sys.exit(main())
