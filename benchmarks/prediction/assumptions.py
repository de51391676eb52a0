"""Do predictions change with assumed values exactly as answers say? Each alternative against the command that states it.

    python -m benchmarks.prediction.assumptions [FOLDER …] [--markdown docs/results/assumptions.md]

Nothing is trained. `autotune predict` and `autotune plan` answer questions that leave values out, and `autotune lint` checks
the recipes in the folders (by default `tests/autotune/recipes/files`). For each alternative that an answer names, a second
command states the value. Exit status 1 if verdict, tokens/s or memory differ, or if the rules refuse an alternative that the
answer has, or have one that it leaves out.
"""

import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.app import run
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.question.assumption import LINKS, PLAUSIBLE
from benchmarks.common.written_page import judge, page_parser, table
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.spaces import CUDA_DEFAULTS
from search_spaces.trial_config import TrialConfig

MODELS = ("gpt2-xl", "llama-3-8b", "qwen2.5-7b", "llama-3-70b")
CLUSTERS = ("1x24GB", "8xh100", "dgx-a100:4")
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "nothing stated": (),
    "ZeRO stage stated": ("--pin", "zero_stage=3"),
    "layout stated": ("--pin", "zero_stage=3", "--pin", "micro_batch_size=2", "--pin", "activation_checkpointing=full"),
}
"""What is stated, in words -> its options."""
FIGURES = (*LINKS, "host_memory_bytes", "cores_per_node", "device")
"""What a file of a cluster states."""
RECIPES = Path("tests/autotune/recipes/files")
MACHINES = (1, 4, 16, 64)
"""Nodes of dgx-h100 on which a recipe is checked: the fewest on which it is predicted."""
RECIPE_MODEL = "llama-3-8b"
"""Of recipes that name no model."""
PLANS = (("llama-3-8b", "8xh100"), ("qwen2.5-7b", "dgx-a100:4"))
INTRODUCTION = """# What follows from assumptions

Written by `python -m benchmarks.prediction.assumptions` (`benchmarks/prediction/assumptions.py`). Predictions only; nothing was
trained.

`autotune predict`, `autotune plan` and `autotune lint` list the values that nobody stated, with the answer at their other
plausible values. Here each of these is compared with a second command that states the value.

- **flips**: alternatives with another verdict than the answer.
- **rate**: alternatives whose tokens/s are outside the answer's band.
- **refused**: alternatives that the answer leaves out, because a rule refuses them; the second command must fail too.
- **equal**: alternatives whose verdict, tokens/s and memory are those of the second command (to a relative 1e-9).
"""


@dataclass(frozen=True, kw_only=True)
class AssumptionCase:
    """One answer, and how many of its alternatives are what a second command says."""

    title: str
    words: tuple[str, ...]
    names: tuple[str, ...]
    """What was assumed, most consequential first."""
    compared: int
    equal: int
    flips: int
    rate_changes: int
    refused: int
    problems: tuple[str, ...]


def document_of(words: Sequence[str], statuses: tuple[int, ...] = (0,)) -> dict[str, Any] | None:
    """The document of a command; None: it failed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        sys.argv = ["autotune", *words, "--json"]
        status = run()
    return json.loads(out.getvalue()) if status in statuses else None


def linted(words: Sequence[str]) -> dict[str, Any] | None:
    """What `autotune lint` says of a recipe, which may not fit; None: it is not predicted."""
    document = document_of(("lint", *words), (0, 1)) or {}
    return next((file for file in document.get("files", ()) if file["predicted"] is not None), None)


def stating(words: Sequence[str], name: str, value: Any, document: dict[str, Any], folder: Path) -> list[str]:
    """The command with one more value stated."""
    cluster = document["cluster"]
    if name in FIGURES:
        file = folder / "cluster.toml"
        figures = {key: cluster[key] for key in ("nodes", "devices_per_node", *FIGURES)}
        figures |= {"device": device_name(cluster["name"]), name: value}
        lines = [f"{key} = {json.dumps(figure)}" for key, figure in figures.items()]
        file.write_text("\n".join(lines) + "\n")
        return [str(file) if word == cluster["name"] else word for word in words]
    option = ["--pin", f"{name}={value_text(value)}"] if name in KNOBS else [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *option]


def device_name(cluster: str) -> str:
    """The preset in `8xh100`."""
    return cluster.partition(":")[0].partition("x")[2]


def differences(alternative: dict[str, Any], stated: dict[str, Any]) -> list[str]:
    """In what an alternative differs from the answer of the command that states it."""
    predicted = stated["predicted"]
    fits = predicted["fit_probability"]
    verdict = "fits" if fits >= PROBABILITY else "may fit" if fits > 1 - PROBABILITY else "does not fit"
    pairs = {
        "verdict": (alternative["verdict"], verdict),
        "tokens_per_second": (alternative["tokens_per_second"], predicted["tokens_per_second"]),
        "peak_memory_bytes": (alternative["peak_memory_bytes"], predicted["peak_memory_band"]["mean"]),
    }
    return [
        f"{name} {said} instead of {is_}"
        for name, (said, is_) in pairs.items()
        if (said != is_ if isinstance(said, str) else abs(said / is_ - 1) > 1e-9)
    ]


def compared(
    title: str, words: Sequence[str], document: dict[str, Any], restated: Sequence[str], folder: Path
) -> AssumptionCase:
    """Every alternative of an answer against the command that states it. `restated`: that command without the value."""
    problems, count, refused = [], 0, 0
    for item in document["assumed"]:
        answers = {json.dumps(each["value"]): each for each in item["alternatives"]}
        plausible = PLAUSIBLE.get(item["name"], ())
        for value in dict.fromkeys((*(each["value"] for each in item["alternatives"]), *plausible)):
            if value == item["value"] or (item["name"] in FIGURES and "x24GB" in words[3]):
                continue
            alternative = answers.get(json.dumps(value))
            stated = document_of(stating(restated, item["name"], value, document, folder))
            case = f"{' '.join(words)}, {item['name']}={value}"
            if alternative is None:
                refused += 1
                beyond = item["name"] == "sequence_length" and value > document["model"]["spec"]["sequence_length"]
                problems += [f"{case}: left out, but legal"] if stated is not None and not beyond else []
                continue
            count += 1
            wrong = ["refused"] if stated is None else differences(alternative, stated)
            problems += [f"{case}: {', '.join(wrong)}"] if wrong else []
    alternatives = [each for item in document["assumed"] for each in item["alternatives"]]
    return AssumptionCase(
        title=title, words=tuple(words), names=tuple(item["name"] for item in document["assumed"]), compared=count,
        equal=count - len(problems), flips=sum(each["changes_verdict"] for each in alternatives),
        rate_changes=sum(each["changes_rate"] for each in alternatives), refused=refused, problems=tuple(problems),
    )  # fmt: skip


def cases(folder: Path) -> Iterator[AssumptionCase]:
    """Predictions that leave out more and less, then plans, whose first row is predicted again."""
    for model, cluster, (title, options) in itertools.product(MODELS, CLUSTERS, LEFT_OUT.items()):
        words = ("predict", model, "--cluster", cluster, *options)
        document = document_of(words)
        if document is None:
            continue
        yield compared(f"{model} on {cluster}, {title}", words, document, words, folder)
    for model, cluster in PLANS:
        words = ("plan", model, "--cluster", cluster, "--top", "1")
        document = document_of(words)
        assert document is not None
        config = TrialConfig().replace(document["plans"][0]["config"])
        stated = dict.fromkeys((*config.differences(TrialConfig()), *CUDA_DEFAULTS))
        pins = [word for name in stated for word in ("--pin", f"{name}={value_text(getattr(config, name))}")]
        batch = ("--global-batch-size", str(document["global_batch_size"]))
        for item in document["assumed"]:
            stated_batch = () if item["name"] == "global_batch_size" else batch
            part = {**document, "assumed": [item]}
            restated = ("predict", model, "--cluster", cluster, *pins, *stated_batch)
            yield compared(f"first plan of {model} on {cluster}, {item['name']}", words, part, restated, folder)


def recipe_cases(folders: Sequence[Path]) -> Iterator[AssumptionCase]:
    """Recipes of which something that has alternatives is not stated."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()):
        for model, nodes in itertools.product(((), ("--model", RECIPE_MODEL)), MACHINES):
            words = (str(path), "--cluster", f"dgx-h100:{nodes}", *model)
            if (document := linted(words)) is not None:
                break
        if document is None or not any(item["alternatives"] for item in document["assumed"]):
            continue
        problems, alternatives = [], [(item["name"], each) for item in document["assumed"] for each in item["alternatives"]]
        for name, alternative in alternatives:
            stated = linted((*words, "--assume", f"{name}={value_text(alternative['value'])}"))
            wrong = ["not predicted"] if stated is None else differences(alternative, stated)
            problems += [f"{path}, {name}={alternative['value']}: {', '.join(wrong)}"] if wrong else []
        yield AssumptionCase(
            title=f"`{'/'.join(path.parts[-2:])}` on {words[2]}", words=words, compared=len(alternatives), refused=0,
            names=tuple(item["name"] for item in document["assumed"]), equal=len(alternatives) - len(problems),
            flips=sum(each["changes_verdict"] for _, each in alternatives),
            rate_changes=sum(each["changes_rate"] for _, each in alternatives), problems=tuple(problems),
        )  # fmt: skip


def main() -> int:
    """Answer, compare, print and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[RECIPES], metavar="FOLDER")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_DATA_HOME"] = name
        answers = [*cases(Path(name)), *recipe_cases(arguments.folders)]
    rows = [
        [
            case.title, ", ".join(case.names), str(case.compared), str(case.flips), str(case.rate_changes), str(case.refused),
            str(case.equal),
        ]
        for case in answers
    ]  # fmt: skip
    totals = [str(sum(int(row[column]) for row in rows)) for column in range(2, 7)]
    headings = ["question", "assumed", "alternatives", "flips", "rate", "refused", "equal"]
    lines = [
        INTRODUCTION,
        *table(headings, [*rows, ["**all**", "", *totals]]),
        "",
        f"{len(answers)} answers and {totals[0]} alternatives in {time.monotonic() - started:.0f} s.",
    ]
    problems = [problem for case in answers for problem in case.problems]
    return judge("\n".join(lines) + "\n", problems, arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
