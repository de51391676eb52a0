"""What public threads about memory ended with, and what `autotune fit` says.

    python -m benchmarks.prediction.fit_threads [--markdown docs/results/fit-threads.md]

Nothing is trained. The threads, and the words given to `autotune fit`, are those of `benchmarks/data/fit-threads.toml`.
Exit status 1 if the answer differs from a thread's end in more than one of twenty.
"""

import json
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.written_page import give, page_parser, table
from benchmarks.prediction.assumptions import document_of

THREADS = Path("benchmarks/data/fit-threads.toml")
ENDS = ("runs out", "fits")
"""Of a thread; the index is whether it fits."""
TITLE = "# Threads about memory, and what `autotune fit` says"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a thread says, and how `autotune fit` is asked about it."""

    words: str
    ends: str
    """One of `ENDS`."""


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A public thread."""

    address: str
    asked: str
    ended: str
    """Its end, quoted in a few words."""
    checks: tuple[Check, ...]
    note: str = ""
    """Why the answer differs."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What `autotune fit` says about a check."""

    check: Check
    fits: bool
    text: str

    @property
    def is_right(self) -> bool:
        """Whether it is what the thread says."""
        return ENDS[self.fits] == self.check.ends


def read_threads(path: Path = THREADS) -> tuple[list[Thread], dict[str, Any]]:
    """The threads, and the config.json of each model that is no preset."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    threads = [Thread(**{**item, "checks": tuple(Check(**check) for check in item["checks"])}) for item in content["threads"]]
    return threads, content["models"]


def said_of(check: Check, models: Mapping[str, Any], folder: Path) -> Said:
    """Ask `autotune fit`."""
    name, *options = shlex.split(check.words)
    if name in models:
        file = folder / "config.json"
        file.write_text(json.dumps(models[name]), encoding="utf-8")
        name = str(file)
    document = document_of(("fit", name, *options), (0, 3))
    if document is None:
        raise ValueError(f"autotune fit {check.words} fails")
    setup = document["setups"][document["nearest"] if document["fastest"] is None else document["fastest"]]
    how = f"{setup['method']}, {setup['sharding']}{', recomputed' if setup['recomputes'] else ''}"
    lacks = [(setup["lacks_card_bytes"], "per card"), (setup["lacks_host_bytes"], "of main memory")]
    missing = " and ".join(f"{count / 2**30:.1f} GiB {of}" for count, of in lacks if count)
    size, needed = setup["config"]["micro_batch_size"], setup["predicted"]["peak_memory_bytes"][0]["total"] / 2**30
    text = f"{how}, micro-batch {size}: {needed:.1f} GiB per card" if setup["fits"] else f"nothing; {how} lacks {missing}"
    return Said(check=check, fits=setup["fits"], text=text)


def page(answers: Mapping[str, list[Said]], threads: list[Thread]) -> list[str]:
    """The threads side by side with the answers."""
    right = [thread for thread in threads if all(said.is_right for said in answers[thread.address])]
    rows = []
    for thread in threads:
        name = "/".join(thread.address.split("/")[3:])
        said = answers[thread.address]
        texts = "<br>".join(f"{'' if item.is_right else '**wrong** '}{item.text}" for item in said)
        rows.append((f"[{name}]({thread.address})", thread.asked, thread.ended, texts))
    return [
        TITLE,
        "",
        "Written by `python -m benchmarks.prediction.fit_threads --markdown docs/results/fit-threads.md`. Nothing was trained.",
        "",
        f"Right in {len(right)} of {len(threads)} threads.",
        "",
        *table(("thread", "asked", "ended with", "`autotune fit` says"), rows),
        "",
        *(f"- {thread.address}: {' '.join(thread.note.split())}" for thread in threads if thread.note and thread not in right),
    ]


def main() -> int:
    """Print or write the page."""
    markdown = page_parser(__doc__).parse_args().markdown
    threads, models = read_threads()
    with tempfile.TemporaryDirectory() as folder:
        answers = {thread.address: [said_of(check, models, Path(folder)) for check in thread.checks] for thread in threads}
    give(page(answers, threads), markdown)
    wrong = sum(not all(said.is_right for said in answers[thread.address]) for thread in threads)
    return int(wrong > len(threads) / 20)


if __name__ == "__main__":
    sys.exit(main())
