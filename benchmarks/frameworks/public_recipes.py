"""Public recipes, read by us and by the frameworks that they are for: is each accepted by both, and are the values the same?

    python -m benchmarks.frameworks.public_recipes --mirror FOLDER --judges PYTHON [--only FRAMEWORK …] [--markdown FILE]

FOLDER has snapshots of public repositories (`OWNER+NAME/repo`, git directories); PYTHON has the frameworks installed. The files
are chosen by the rules of `SELECTIONS`: all that match, or, of more than a rule's limit, those with the least hash of their
path. No file is kept: they are extracted into a temporary folder; the page names repository, commit and path. Exit code 1 if a
legal file is refused, a refusal is missed, or a value is read otherwise without a note.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frameworks.cases import ask
from search_spaces.trial_config import TrialConfig

JUDGE = Path(__file__).with_name("framework_judges.py")
LARGEST = 2_000_000
"""Bytes of a file that is extracted."""
RANKS = 8
"""Ranks of a recipe that does not state them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A rule that chooses files of a repository."""

    repository: str
    path: str
    """Pattern of the path."""
    content: str = ""
    """Pattern that the file must have."""
    revision: str = "HEAD"
    limit: int = 12
    judge: tuple[str, str] | None = None
    """Repository and revision of the framework's source; None: those of the file."""
    commands: bool = False
    """The recipes are the commands in the file's first docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicFile:
    """One recipe."""

    selection: Selection
    commit: str
    path: str
    """In the repository; with `#N` for the N-th command of a file."""
    local: Path
    tree: Path


MEGATRON = ("NVIDIA/Megatron-LM", "HEAD")
SELECTIONS: Mapping[str, tuple[Selection, ...]] = {
    "deepspeed": tuple(
        Selection(
            repository=repository, path=path, content=r'"(zero_optimization|train_(micro_)?batch_size\w*)"\s*:', limit=limit
        )
        for repository, path, limit in (
            ("deepspeedai/DeepSpeedExamples", r"^(?!.*(infer|benchmarks)).*\.json$", 20),
            ("axolotl-ai-cloud/axolotl", r"^deepspeed_configs/.*\.json$", 12),
            ("hiyouga/LLaMA-Factory", r"^examples/deepspeed/.*\.json$", 12),
            ("allenai/open-instruct", r"^configs/ds_configs/.*", 12),
            ("huggingface/accelerate", r"^examples/.*\.json$", 12),
        )
    ),
    "accelerate": tuple(
        Selection(repository=repository, path=r"\.ya?ml$", content=r"(?m)^(distributed_type|compute_environment):", limit=limit)
        for repository, limit in (
            ("huggingface/accelerate", 14),
            ("huggingface/trl", 10),
            ("huggingface/alignment-handbook", 10),
            ("hiyouga/LLaMA-Factory", 10),
            ("allenai/open-instruct", 10),
        )
    ),
    "torchtitan": tuple(
        Selection(repository="pytorch/torchtitan", revision=revision, path=r"^torchtitan/.*\.toml$", limit=30)
        for revision in ("v0.1.0", "v0.2.2")
    ),
    "megatron": tuple(
        Selection(repository=repository, path=r"\.(sh|sbatch|slurm)$", content=r"pretrain_\w+\.py", limit=20, judge=MEGATRON)
        for repository in ("NVIDIA/Megatron-LM", "swiss-ai/Megatron-LM", "deepspeedai/DeepSpeedExamples")
    ),
    "axolotl": (
        Selection(repository="axolotl-ai-cloud/axolotl", path=r"^examples/.*\.ya?ml$", content=r"(?m)^base_model:", limit=30),
    ),
    "llama-factory": (
        Selection(
            repository="hiyouga/LLaMA-Factory", path=r"^examples/(?!v1/).*\.ya?ml$", content=r"(?m)^do_train: true", limit=30
        ),
    ),
    "trl": (
        Selection(repository="huggingface/alignment-handbook", path=r"^recipes/.*/(sft|dpo)/.*\.yaml$", limit=20),
        Selection(
            repository="huggingface/trl",
            path=r"^(trl/scripts|examples/scripts)/(sft|dpo|grpo|kto|reward)\w*\.py$",
            content="per_device_train_batch_size",
            limit=20,
            commands=True,
        ),
    ),
}


class Mirror:
    """Snapshots of public repositories, and their trees as they are needed."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder = folder
        self._place = place

    def _git(self, repository: str, *words: str, feed: bytes = b"") -> bytes:
        git = self._folder / repository.replace("/", "+") / "repo"
        return subprocess.run(["git", f"--git-dir={git}", *words], input=feed, capture_output=True, check=True).stdout

    def commit(self, repository: str, revision: str) -> str:
        return self._git(repository, "rev-list", "-1", revision).decode().strip()

    def tree(self, repository: str, revision: str) -> Path:
        """The files of a commit, extracted once, but for large ones, which snapshots may lack."""
        target = self._place / f"{repository.replace('/', '+')}@{self.commit(repository, revision)[:12]}"
        if not target.is_dir():
            entries = (
                line.split(None, 4) for line in self._git(repository, "ls-tree", "-r", "-l", revision).decode().splitlines()
            )
            texts = [(entry[2], entry[4]) for entry in entries if entry[3].isdigit() and int(entry[3]) < LARGEST]
            blobs = self._git(repository, "cat-file", "--batch", feed="".join(f"{blob}\n" for blob, _ in texts).encode())
            at = 0
            for _, name in texts:
                header, at = blobs[at : blobs.index(b"\n", at)], blobs.index(b"\n", at) + 1
                if header.endswith(b"missing"):
                    continue
                size = int(header.split()[2])
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(blobs[at : at + size])
                at += size + 1
            for folder in (target, *target.rglob("*/")):
                folder.chmod(0o777)  # scripts run as a user without rights
        return target

    def files(self, selection: Selection) -> list[PublicFile]:
        """The files that a rule chooses."""
        tree = self.tree(selection.repository, selection.revision)
        commit = self.commit(selection.repository, selection.revision)
        paths = [path for path in tree.rglob("*") if path.is_file() and re.search(selection.path, str(path.relative_to(tree)))]
        matching = [path for path in paths if re.search(selection.content, path.read_text(encoding="utf-8", errors="replace"))]
        chosen = sorted(matching, key=lambda path: _hash(str(path.relative_to(tree))))[: selection.limit]
        source = self.tree(*selection.judge) if selection.judge else tree
        recipes = []
        for path in sorted(chosen):
            name = str(path.relative_to(tree))
            parts = _commands(path) if selection.commands else {"": path}
            recipes += [
                PublicFile(selection=selection, commit=commit, path=name + suffix, local=local, tree=source)
                for suffix, local in parts.items()
            ]
        return recipes


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _commands(path: Path) -> dict[str, Path]:
    """The commands in a program's text that start a training, each in a script beside the program."""
    text = path.read_text(encoding="utf-8")
    pattern = r"^(?:\w+=\S+ )?(?:accelerate launch|python|trl \w+|torchrun)\b(?:[^\n]*\\\n)*[^\n]*"
    scripts = {}
    for number, match in enumerate(re.finditer(pattern, text, re.MULTILINE), 1):
        if "per_device_train_batch_size" in match[0]:
            script = path.with_name(f"{path.stem}-{number}.sh")
            script.write_text("#!/bin/bash\n" + match[0] + "\n", encoding="utf-8")
            scripts[f"#{number}"] = script
    return scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one side says of a file."""

    verdict: str
    """accepted, refused, unread (by us), or unjudged (by the framework's parser)."""
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    remarks: str = ""
    """Notes and what was assumed, of our reading."""
    keys: Set[str] = frozenset()
    """Settings that we refuse."""


def judged(framework: str, files: Sequence[PublicFile], python: str) -> list[Reading]:
    """The framework's verdicts; one process judges all files of a tree."""
    readings: dict[Path, Reading] = {}
    for tree in dict.fromkeys(file.tree for file in files):
        paths = [file.local for file in files if file.tree == tree]
        requests = "".join(json.dumps({"path": str(path), "tree": str(tree), "ranks": RANKS}) + "\n" for path in paths)
        answer = subprocess.run([python, str(JUDGE), framework], input=requests, capture_output=True, text=True, check=False)
        answers = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{"verdict"')]
        if len(answers) != len(paths):
            raise SystemExit(f"{framework}: {len(answers)} verdicts of {len(paths)} files: {answer.stderr[-2000:]}")
        readings |= {path: Reading(**each) for path, each in zip(paths, answers, strict=True)}
    return [readings[file.local] for file in files]


def ours(file: PublicFile, framework: str, judge: Reading) -> Reading:
    """Our reading, by `autotune lint --json`."""
    ranks = judge.values.get("world", RANKS)
    words = ["lint", str(file.local), "--json"]
    if framework not in ("accelerate", "megatron") and (framework != "torchtitan" or "world" in judge.values):
        words += ["--ranks", str(ranks)]
    with tempfile.TemporaryDirectory() as place:
        answer = ask(words, Path(place))
    try:
        document = json.loads(answer.text)
        (linted,) = document["files"]
    except (ValueError, KeyError):
        return Reading(verdict="unread", reason=" ".join(answer.text.replace(f"{file.local.parent}/", "").split())[:300])
    stops = [finding for finding in linted["findings"] if finding["effect"] in ("refused", "fails")]
    others = [finding for finding in linted["findings"] if finding["effect"] not in ("refused", "fails")]
    values = {**linted["knobs"], "global_batch_size": linted["global_batch_size"], "sequence_length": linted["sequence_length"]}
    assumed = " ".join(f"{item['name']}={item['value']}" for item in linted.get("assumed", ()))
    remarks = " ".join([*linted["notes"], assumed, linted["not_predicted"] or "", *map(_said, others)])
    reason = "; ".join(map(_said, stops or others))
    return Reading(
        verdict="refused" if stops else "accepted",
        reason=f"[{linted['format']}] {reason}",
        values=values,
        remarks=remarks,
        keys={finding["key"] for finding in stops},
    )


def _said(finding: Mapping[str, Any]) -> str:
    return f"{finding['key']}: {finding['effect']}: {finding['problem']}"


def differences(judge: Reading, own: Reading) -> Iterator[str]:
    """Where the two readings differ, but for what a note of ours says."""
    if judge.verdict == "unjudged":
        return
    if judge.verdict == "refused" and own.verdict == "accepted" and not _names_unknown_keys(judge, own):
        yield "missed refusal"
    if judge.verdict == "accepted" and own.verdict != "accepted" and not (own.keys and own.keys <= _older(judge)):
        yield f"legal, but {own.verdict}"
    if judge.verdict != "accepted" or own.verdict == "unread":
        return
    defaults = TrialConfig()
    values = dict(judge.values)
    world, per_rank = values.pop("world", RANKS), values.pop("samples_per_rank", None)
    if per_rank is not None:
        degrees = [
            values.get(name) or 1 for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
        ]
        values["global_batch_size"] = per_rank * (world // (degrees[0] * degrees[1] * degrees[2]))
    for name, wanted in values.items():
        read = own.values.get(name, getattr(defaults, name, None))
        if read == wanted or wanted is None:
            continue
        unknown = read is None or name not in own.values
        noted = name in own.remarks or any(word in own.remarks for word in SPELLINGS.get(name, ()))
        if not (unknown and noted) and not (noted and name == "global_batch_size" and "micro_batch_size" not in own.values):
            yield f"{name}: {read}, the framework {wanted}"


def _names_unknown_keys(judge: Reading, own: Reading) -> bool:
    """Whether what the framework does not know is named in our notes: programs may add arguments of their own."""
    words = re.findall(r"--[\w-]+", judge.reason.partition("unrecognized arguments")[2])
    return bool(words) and all(word in own.remarks for word in words)


def _older(judge: Reading) -> set[str]:
    return set(judge.reason.removeprefix("with older names: ").split(", "))


SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "activation_checkpointing": ("recompute", "activation_checkpoint", "gradient_checkpointing"),
    "micro_batch_size": ("micro-batch", "per_device_train_batch_size"),
    "global_batch_size": ("global-batch", "gradient_accumulation_steps"),
    "sequence_length": ("seq-length", "max_length", "--sequence-length"),
    "precision": ("mixed_precision", "bf16", "fp16"),
    "tensor_parallel_size": ("tensor-model-parallel-size", "tp_size"),
    "pipeline_parallel_size": ("pipeline-model-parallel-size",),
    "context_parallel_size": ("context-parallel-size", "cp_size"),
    "expert_parallel_size": ("expert-model-parallel-size",),
    "zero_stage": ("sharding", "fsdp"),
    "lora_rank": ("lora", "peft", "adapter"),
}
"""Value -> other words by which a note may name it."""


def page(rows: Sequence[tuple[str, PublicFile, Reading, Reading, list[str]]], versions: str) -> list[str]:
    """The page: counts by framework, and a line for each file."""
    lines = [
        "# Public recipes, read by us and by their frameworks",
        "",
        "Written by `python -m benchmarks.frameworks.public_recipes --mirror FOLDER --judges PYTHON --markdown FILE`.",
        "Each file is read by the framework's own parser and by `autotune lint`. Rules choose the files: all that match,",
        "or those with the least SHA-256 of their path. *accepted* and *refused* are the framework's verdict; values are",
        f"compared where it accepts. A difference without a note of ours is listed as wrong. Versions: {versions}; torchtitan,",
        "Megatron-LM, Axolotl and LLaMA-Factory as of the commits that are named. A file that a parser could not be asked",
        "about is neither right nor wrong. *With older names*: the versions above refuse these keys, which the recipe's",
        "program allows in older ones; they were replaced before it was asked. A value that we do not read counts as right",
        "if a note names it.",
        "",
    ]
    by_framework = {
        framework: [row for row in rows if row[0] == framework] for framework in dict.fromkeys(row[0] for row in rows)
    }
    lines += [
        "| framework | files | accepted by it | refused by it | not judged | right | wrong |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for framework, own_rows in by_framework.items():
        count = Counter(row[2].verdict for row in own_rows)
        wrong = sum(bool(row[4]) for row in own_rows)
        cells = [
            len(own_rows),
            count["accepted"],
            count["refused"],
            count["unjudged"],
            len(own_rows) - wrong - count["unjudged"],
            wrong,
        ]
        lines.append(f"| {framework} | {' | '.join(map(str, cells))} |")
    for framework, own_rows in by_framework.items():
        lines += ["", f"## {framework}", "", "| file | framework | autotune | wrong |", "|---|---|---|---|"]
        lines += [" | ".join(_cells(row)) for row in own_rows]
    return lines


def _cells(row: tuple[str, PublicFile, Reading, Reading, list[str]]) -> Iterator[str]:
    _, file, judge, own, wrong = row
    yield f"| {file.selection.repository}@{file.commit[:8]} `{file.path}`"
    yield _cell(f"{judge.verdict}{': ' + judge.reason if judge.reason else ''}")
    yield _cell(f"{own.verdict}{': ' + own.reason if own.reason else ''}")
    yield _cell("; ".join(wrong) or "–") + " |"


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= 240 else f"{text[:237]}…"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--judges", required=True, metavar="PYTHON")
    parser.add_argument("--only", nargs="+", choices=[*SELECTIONS], default=[*SELECTIONS], metavar="FRAMEWORK")
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help="Keep the frameworks' verdicts here, and reuse them.")
    parser.add_argument("--trees", type=Path, metavar="FOLDER", help="Extract into this folder, and reuse what is there.")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        mirror = Mirror(arguments.mirror, arguments.trees or Path(place))
        rows = [row for framework in arguments.only for row in _rows(framework, mirror, arguments)]
    names = ("deepspeed", "accelerate", "transformers", "trl")
    question = f"from importlib.metadata import version; print(', '.join(f'{{name}} {{version(name)}}' for name in {names}))"
    answer = subprocess.run([arguments.judges, "-c", question], capture_output=True, text=True, check=True)
    lines = page(rows, answer.stdout.strip())
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = sum(bool(row[4]) for row in rows)
    print(f"{len(rows)} files, {wrong} wrong")
    return 1 if wrong else 0


def _rows(
    framework: str, mirror: Mirror, arguments: argparse.Namespace
) -> Iterator[tuple[str, PublicFile, Reading, Reading, list[str]]]:
    files = [file for selection in SELECTIONS[framework] for file in mirror.files(selection)]
    for file, judge in zip(files, _verdicts(framework, files, arguments), strict=True):
        own = ours(file, framework, judge)
        wrong = list(differences(judge, own))
        name = f"{file.selection.repository}:{file.path}"
        print(f"{framework} {name}: {judge.verdict} / {own.verdict}{' WRONG ' + '; '.join(wrong) if wrong else ''}", flush=True)
        if wrong or judge.verdict == "unjudged":
            print(
                f"    framework: {judge.reason} {dict(judge.values)}\n    autotune:  {own.reason[:300]} {dict(own.values)}",
                flush=True,
            )
        yield framework, file, judge, own, wrong


def _verdicts(framework: str, files: Sequence[PublicFile], arguments: argparse.Namespace) -> list[Reading]:
    stored: dict[str, Any] = {}
    if arguments.verdicts and arguments.verdicts.exists():
        stored = json.loads(arguments.verdicts.read_text(encoding="utf-8"))
    names = [f"{framework} {file.selection.repository}@{file.commit}:{file.path}" for file in files]
    if not all(name in stored for name in names):
        verdicts = judged(framework, files, arguments.judges)
        stored |= {
            name: {"verdict": each.verdict, "reason": each.reason, "values": dict(each.values)}
            for name, each in zip(names, verdicts, strict=True)
        }
        if arguments.verdicts:
            arguments.verdicts.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    return [Reading(**stored[name]) for name in names]


if __name__ == "__main__":
    sys.exit(main())
