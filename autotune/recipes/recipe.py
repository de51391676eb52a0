"""A recipe that the user names (a file, a job or a best-config document), and its file with other settings."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, BestConfigError, RequestError
from autotune.frameworks.best_config import best_config_text, request_of
from autotune.frameworks.check import undecided_settings, without_idle_settings
from autotune.frameworks.export import yaml_text
from autotune.frameworks.framework import BATCH, Framework, LintCase, Option, Settings, Surroundings
from autotune.frameworks.imported import Imported, flat, nested, read_table, yaml_value
from autotune.frameworks.megatron_checks import MEGATRON_BRIDGE
from autotune.frameworks.read import BEST_CONFIG as BEST_CONFIG_KEYS
from autotune.frameworks.read import TABLES, Written, read_written
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from autotune.frameworks.torchtitan_checks import TORCHTITAN
from autotune.frameworks.trainer_launch import TRAINERS
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.candidates import LEVERS
from autotune.recipes.launch_script import edited_scripts, launch_anew, relaunched, unkept, word
from autotune.recipes.lint import case_of
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import resolve
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain
from search_spaces.rules.table import RULES
from search_spaces.trial_config import TrialConfig

BEST_CONFIG = "best-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A recipe's text for other settings."""

    text: str
    name: str
    """Of the file: the recipe's own, or another one if its format cannot state the settings."""
    anew: bool = False
    """Whether the text is written anew, without the recipe's comments and variables."""
    lost: tuple[str, ...] = ()
    """Settings that the text does not state as they are wanted."""
    notes: tuple[str, ...] = ()
    """What of the launch is of the recipe's old nodes, one line each."""


def rewritten(
    recipe: Written, settings: Settings, cluster: ClusterSpec | None, source_cluster: ClusterSpec | None
) -> Rewritten:
    """The recipe with these settings, which are all of it, for the nodes of a cluster.

    Args:
        recipe: the recipe as it is.
        settings: the wanted ones, with flat keys.
        cluster: None: its launch stays.
        source_cluster: that of the recipe; None: not known.
    """
    name = recipe.path.name
    source = recipe.path.read_text(encoding="utf-8")
    present, notes, counts = dict(flat(recipe.content)), list[str](), dict[str, int]()
    if cluster is not None and recipe.path.suffix not in (*TABLES, ".py"):
        source, notes = relaunched(source, cluster)
        before, present = present, _read_back(source, name, recipe)
        # An exported variable may be one of the counts.
        settings = {key: present.get(key) if key.startswith(ENVIRONMENT) and value == before.get(key) else value
                    for key, value in settings.items()}  # fmt: skip
        notes += unkept(source, cluster, source_cluster)
        if re.search(r"\btorchrun\b", source):  # it starts one rank on one node if nothing else is stated
            counts = {f"{LAUNCHER}nproc_per_node": cluster.devices_per_node, f"{LAUNCHER}nnodes": cluster.nodes}
            counts = {key: count for key, count in counts.items() if count > 1 and key not in present}
            settings = {**settings, **counts}
    changes = {key: settings.get(key) for key in {**present, **settings} if present.get(key) != settings.get(key)}
    for text in _edited(recipe, source, changes):
        # A script may have another launch besides, whose counts are not read.
        if all(key in counts and key.removeprefix(LAUNCHER) in text for key in _lost(text, name, recipe, settings)):
            return Rewritten(text=text, name=name, notes=tuple(note for note in notes if note.partition(": ")[0] in text))
    text, suffix = _anew(recipe, source, settings, cluster)
    name = f"{recipe.path.stem}{suffix}"
    lost = [key for key in _lost(text, name, recipe, settings) if not key.startswith(LAUNCHER)]
    return Rewritten(text=text, name=name, anew=True, lost=tuple(lost), notes=tuple(notes))


def _lost(text: str, name: str, recipe: Written, settings: Settings) -> list[str]:
    """The settings that the text states otherwise, or not at all."""
    read = _read_back(text, name, recipe)
    return [key for key in {**settings, **read} if read.get(key) != settings.get(key)]


def _read_back(text: str, name: str, recipe: Written) -> dict[str, Any]:
    """The settings that the text states; none if it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        try:
            recipes = read_written(path, recipe.format, stated=recipe.stated, beside=recipe.path)
        except AutotuneError:
            return {}
    return dict(flat(next((item for item in recipes if item.name == recipe.name), recipes[0]).content))


def _edited(recipe: Written, source: str, changes: Settings) -> Iterator[str]:
    """Texts that may be it, the one that keeps most of the source first."""
    match recipe.path.suffix:
        case ".json":
            values = {**dict(flat(recipe.content)), **changes}
            yield json.dumps(nested({k: v for k, v in values.items() if v is not None or k not in changes}), indent=2) + "\n"
        case ".toml":
            yield _toml(source, changes)
        case ".yaml" | ".yml":
            yield _yaml(source, changes)
        case ".py":
            yield _python(source, changes, recipe.lines.get("recipe", 1))
        case _:
            yield from edited_scripts(source, changes, dict(flat(recipe.content)), recipe.format == TORCHTITAN.name)


def _anew(recipe: Written, source: str, settings: Settings, cluster: ClusterSpec | None) -> tuple[str, str]:
    """All settings, and the suffix of a file with them."""
    if recipe.path.suffix in TABLES:
        return (_toml("", settings), ".toml") if recipe.path.suffix == ".toml" else (yaml_text(nested(settings)), ".yaml")
    if recipe.format in TRAINERS:
        raise RequestError("recipe", f"{recipe.name} takes settings from another file", "carry the file that it names")
    if recipe.format == MEGATRON_BRIDGE.name:
        return "\n".join(f"{key}={word(value)}" for key, value in settings.items()) + "\n", ".args"
    return launch_anew(recipe, source, settings, cluster), ".sh"


def _toml(source: str, changes: Settings) -> str:
    """Replace the values of keys in their tables; a missing key follows its table's header."""
    lines, pending, table = source.splitlines(), dict(changes), ""
    output: list[str] = []
    for line in lines:
        header = re.fullmatch(r"\s*\[([\w.\"-]+)\]\s*(#.*)?", line)
        if header:
            table = header[1].replace('"', "")
        assignment = re.match(r"\s*([\w-]+)\s*=\s*(.*)", line)
        key = f"{table}.{assignment[1]}" if assignment and table else assignment[1] if assignment else ""
        if key not in pending:
            output.append(line)
            continue
        value = pending.pop(key)
        if value is not None and assignment:
            comment = re.search(r"\s+#[^\"']*$", line)
            output.append(f"{line[: assignment.start(2)]}{json.dumps(value)}{comment[0] if comment else ''}")
    tables: dict[str, list[str]] = {}
    for key, value in pending.items():
        if value is not None:
            table, _, name = key.rpartition(".")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    for table, added in tables.items():
        header_index = next(
            (at for at, line in enumerate(output) if re.fullmatch(rf"\s*\[{re.escape(table)}\]\s*(#.*)?", line)), None
        )
        if header_index is not None:
            output[header_index + 1 : header_index + 1] = added
        elif not table:
            output[:0] = added
        else:
            output += [*([""] if output else []), f"[{table}]", *added]
    return "\n".join(output) + "\n"


def _yaml(source: str, changes: Settings) -> str:
    """Replace the values of keys in their blocks; a missing key ends up below its block's key."""
    output, pending, stated = [], dict(changes), dict(flat(yaml_value(source) or {}))
    path: list[tuple[int, str]] = []
    for line in source.splitlines():
        assignment = re.match(r"(\s*)([\w.-]+):(\s*)(.*)", line)
        if not assignment or line.lstrip().startswith("#"):
            output.append(line)
            continue
        indent = len(assignment[1])
        path = [*(item for item in path if item[0] < indent), (indent, assignment[2])]
        key = ".".join(name for _, name in path)
        if key in pending:
            value = pending.pop(key)
            if value is None:
                continue
            comment = re.search(r"\s+#.*$", assignment[4])
            line = f"{assignment[1]}{assignment[2]}: {json.dumps(value)}{comment[0] if comment else ''}"
        output.append(line)
        inside = [name for name in pending if name.rpartition(".")[0] == key and name not in stated]
        for name in inside:
            if (value := pending.pop(name)) is not None:
                output.append(f"{assignment[1]}  {name.rpartition('.')[2]}: {json.dumps(value)}")
    for key, value in pending.items():
        if value is not None:
            output.append(f"{key}: {json.dumps(value)}")
    return "\n".join(output) + "\n"


def _python(source: str, changes: Settings, first: int) -> str:
    """Replace literal values of keywords and attributes within the recipe's function; new ones follow its last assignment."""
    lines = source.splitlines(keepends=True)
    last = next((at for at in range(first, len(lines)) if lines[at].startswith(("def ", "class ", "@"))), len(lines))
    body = "".join(lines[first - 1 : last])
    added = []
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        assignment = re.compile(rf"(\b{re.escape(name)}\s*=\s*)(-?[\w.]+(?:\s*[*+]\s*[\w.]+)*|\"[^\"]*\")")
        body, count = assignment.subn(r"\g<1>" + repr(value).replace("\\", r"\\"), body)
        if not count and value is not None:
            call = re.compile(rf"(\b{re.escape(table.rpartition('.')[2])}\s*=\s*[\w.]+\()")
            body, count = call.subn(rf"\g<1>{name}={value!r}, ", body, count=1)
        added += [f".{key} = {value!r}\n"] if not count and value is not None else []
    assigned = list(re.finditer(r"^(\s+\w+)\.[\w.]+ = .*\n", body, re.MULTILINE))
    if assigned:
        end = assigned[-1].end()
        body = body[:end] + "".join(assigned[-1][1] + line for line in added) + body[end:]
    return "".join(lines[: first - 1]) + body + "".join(lines[last:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe as it is."""

    name: str
    case: LintCase
    document: Mapping[str, Any] | None
    """The best-config document; None: it is another framework's file."""
    written: Written | None
    cluster: ClusterSpec | None
    """Where it runs; None: not known."""

    def text(self, case: LintCase, outlook: StepEstimate) -> Rewritten:
        """The recipe with another layout, in its own format."""
        if self.document is not None:
            return Rewritten(text=best_config_text(document_for(self.document, case, outlook)), name="best-config.json")
        assert self.written is not None
        return rewritten(self.written, case.imported.settings, case.around.cluster, self.cluster)


def recipe_of(name: str, around: Surroundings, find_job: Callable[[str], Mapping[str, Any]]) -> Recipe:
    """Read a recipe.

    Args:
        name: a file; FILE:FUNCTION for a Python file with several recipes; a job's id.
        around: what the user says beside it; the cluster is the one that it runs on.
        find_job: the best-config document of a job.

    Raises:
        RequestError: the file cannot be read, or has several recipes.
        BestConfigError: the document cannot be read.
        StorageError: there is neither such a file nor such a job.
    """
    file, _, function = name.partition(".py:")
    path = Path(f"{file}.py" if function else name)
    try:
        is_there = path.exists()
    except OSError:  # a longer name than a file's
        is_there = False
    if not is_there and not path.suffix and "/" not in name:
        return _of_document(find_job(name), f"job {name}", around)
    if path.suffix == ".json" and is_there and read_table(path).keys() >= BEST_CONFIG_KEYS:
        return _of_document(read_table(path), path.name, around)
    recipes = [
        recipe
        for recipe in read_written(path, stated=around.variables)
        if not function or recipe.name == f"{path.name}:{function}"
    ]
    if len(recipes) != 1:
        names = ", ".join(recipe.name for recipe in (recipes or read_written(path))[:5])
        raise RequestError("recipe", f"{path} has the recipes {names}", f"name one of them, as {path}:FUNCTION")
    case = case_of(recipes[0], around)
    if undecided := undecided_settings(case):
        problem = f"{path} decides {', '.join(undecided)} when it runs"
        raise RequestError("recipe", problem, "give --set NAME=VALUE, --assume KNOB=VALUE, or write the values into it")
    case = without_idle_settings(case)
    return Recipe(name=recipes[0].name, case=case, document=None, written=recipes[0], cluster=around.cluster)


def _of_document(document: Mapping[str, Any], name: str, around: Surroundings) -> Recipe:
    settings, model, cluster = settings_of(document)
    surroundings = Surroundings(
        model=around.model or model, cluster=around.cluster or cluster, global_batch_size=around.global_batch_size,
        sequence_length=around.sequence_length or request_of(document).sequence_length,
    )  # fmt: skip
    case = LintCase(
        framework=BEST_CONFIG_FRAMEWORK, imported=BEST_CONFIG_FRAMEWORK.read(settings, name), around=surroundings, source=name
    )
    return Recipe(name=name, case=case, document=document, written=None, cluster=surroundings.cluster)


def _read(settings: Settings, source: str) -> Imported:
    del source
    knobs = {name: check_value(name, value) for name, value in settings.items() if name in KNOBS}
    keys = {name: name for name in knobs}
    if TrialConfig().replace(knobs).pipeline_parallel_size > 1:
        keys["virtual_stages"] = "virtual_stages"
    return Imported(knobs=knobs, global_batch_size=settings[BATCH], settings=settings, keys=keys)


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings:
    """Sequence parallelism goes with tensor parallelism, unless the recipe has the latter without it."""
    changes: dict[str, Value] = {knob: value}
    if knob == "tensor_parallel_size":
        changes["sequence_parallel"] = int(value) > 1 and (
            case.config.sequence_parallel or case.config.tensor_parallel_size == 1
        )
    if knob == "pipeline_parallel_size" and value == 1:
        changes |= {"virtual_stages": 1, "pipeline_schedule": TrialConfig().pipeline_schedule, "pipeline_layout": ""}
    if knob == "zero_stage" and value != 3:
        changes["hsdp_shard_size"] = 0
    return changes


BEST_CONFIG_FRAMEWORK = Framework(
    name=BEST_CONFIG, title="Autotune", checked="", read=_read, checks=(), rules=frozenset(rule.name for rule in RULES),
    options=tuple(Option(name, name) for name in (*LEVERS, BATCH)), rewrite=_rewrite,
    sizes=lambda _case, _config, batch: {BATCH: batch},
)  # fmt: skip


def settings_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], ModelSpec, Any]:
    """The document's settings, its model and its cluster.

    Raises:
        BestConfigError: its request cannot be read, or its model has no shape: a user's module or script.
    """
    request = request_of(document)
    model, cluster = request.resolved_model, request.resolved_cluster
    if not isinstance(model, ModelSpec):
        problem = "is about a module or a script, whose layouts cannot be predicted"
        raise BestConfigError("model", problem, "give a recipe of a model with a preset or a config.json")
    return {**document["best"]["config"], BATCH: request.global_batch_size}, model, cluster


def document_for(document: Mapping[str, Any], case: LintCase, outlook: StepEstimate) -> dict[str, Any]:
    """The document for another cluster: nothing is measured, so its rates are predicted.

    Args:
        document: the source.
        case: the layout on the cluster.
        outlook: its prediction.
    """
    cluster, request = case.around.cluster, request_of(document)
    assert cluster is not None and case.batch is not None
    moved = dataclasses.replace(
        request, cluster=cluster.name, ranks=None, resolved_cluster=cluster, global_batch_size=case.batch, tune_on=None,
        answer_for=None, baseline=None,
    )  # fmt: skip
    rate = outlook.samples_per_second
    best = {
        "trial": 0,
        "config": case.config.values(),
        "measured": None,
        "predicted": {
            "samples_per_second": to_plain(rate), "repeats": 0, "extrapolated": [], "step_seconds": case.batch / rate.mean,
            "peak_memory_bytes": [
                {"rank": rank.pipeline_rank, "total": round(rank.total), "by_tag": _whole(rank.by_tag)}
                for rank in outlook.ranks
            ],
            "tflops_per_device": outlook.tflops_per_device, "mfu": outlook.mfu, "hfu": None,
            "flops_convention": outlook.document(every_rank=False)["predicted"].get("flops_convention", "palm-appendix-b"),
        },
    }  # fmt: skip
    job = {
        **document["job"], "trials": 0, "tie": False, "runner_up": None, "reference_losses": [],
        "message": f"carried to {cluster.name}", "request": request_to_row(moved),
    }  # fmt: skip
    job.pop("spent", None)
    gone = ("decision", "extrapolated", "environments", "verification")
    return {
        **{key: value for key, value in document.items() if key not in gone},
        "job": job,
        "cluster": to_plain(cluster),
        "best": best,
        "baseline": None,
        "alternatives": [],
        "launch": launch_of(case.config, resolve(moved)),
        "verified": "native-only",
    }


def _whole(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}
