"""Knowledge as users name it: a table, logs of MLPerf Training, a job of the database, or the address of a table.

A log states batch, sequence length, machine and times (lines `:::MLLOG` and `:::SYSJSON`), and not the layout. That is read
from the submission's shell scripts, `config_*.sh`, which lie beside the log, or from lines of such scripts in the log itself.
"""

import csv
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from autotune.errors import KnowledgeError
from autotune.frameworks.history import RATES
from autotune.knowledge.measurement import Collected, Measurement, job_measurements, measurements_of_rows
from autotune.knowledge.row import COLUMNS, TableRow
from autotune.knowledge.table import CsvRecord, read_records, read_table
from storage.address import default_database_url, without_password
from storage.store import open_store

FORMS = "give a table, an MLPerf log or a folder of them, a job of the database, or the address of a table"
_STUDIES = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a user's table, logs or job hold."""

    rows: tuple[TableRow, ...]
    """Of a table, or of logs."""
    notes: tuple[str, ...]
    """A line for everything that is left out."""
    trials: tuple[Measurement, ...] = ()
    """Of a job."""

    def measurements(self) -> Collected:
        """The measurements that predictions can learn from."""
        return Collected(measurements=self.trials, left_out={}) if self.trials else measurements_of_rows(self.rows)


def read_knowledge(source: str, database: str | None = None) -> Knowledge:
    """Read what the user names.

    Args:
        source: a path, an address, or a job's id.
        database: the database of the job; None: the default one.

    Raises:
        KnowledgeError: it cannot be read, or is empty.
        MeasurementsError: a table cannot be read.
        LookupError: there is no such job.
    """
    if "://" in source and not source.startswith("sqlite:"):
        return _downloaded(source)
    if Path(source).is_dir():
        files = (path for path in sorted(Path(source).iterdir()) if path.suffix in (".txt", ".log", ".out") and path.is_file())
        return _of_logs([path for path in files if has_log(path)], source)
    if Path(source).is_file():
        return _of_file(Path(source), source)
    if "/" in source or source.endswith((".csv", *_STUDIES)):
        raise KnowledgeError("knowledge", f"{source} does not exist", FORMS)
    with open_store(database or default_database_url()) as store:
        collected = job_measurements(store, store.jobs.get(source).id)
    notes = collected.lines(source)
    if not collected.measurements:
        raise KnowledgeError("knowledge", f"{source} has no measurement", "; ".join(notes) or FORMS)
    return Knowledge(rows=(), notes=notes, trials=collected.measurements)


def is_history(source: str) -> bool:
    """Whether it holds trials of the job's own model, batch and hardware: an Optuna study, or a table of knobs and rates."""
    address = source.partition("#")[0]
    if source.startswith("sqlite:") or "#" in source or address.endswith(_STUDIES):
        return True
    if "://" in source or not Path(source).is_file():
        return False
    try:
        with Path(source).open(newline="", encoding="utf-8-sig", errors="replace") as file:
            header = {name.strip() for name in next(csv.reader(file), [])}
    except (OSError, csv.Error):
        return False
    essential = {name for name, column in COLUMNS.items() if column.essential}
    return not essential <= header and bool(header & {*RATES})


def _of_file(path: Path, name: str) -> Knowledge:
    if has_log(path):
        return _of_logs([path], name)
    table = read_table(path)
    skipped = len(table.skipped)
    notes = Collected(measurements=(), left_out={"it cannot be read as a row": skipped} if skipped else {}).lines(name)
    return Knowledge(rows=table.rows, notes=notes)


def _of_logs(logs: Sequence[Path], name: str) -> Knowledge:
    if not logs:
        raise KnowledgeError("knowledge", f"{name} has no MLPerf log", FORMS)
    records, left_out = [], list[KnowledgeError]()
    for path in logs:
        try:
            records.append(read_log(path))
        except KnowledgeError as error:
            left_out.append(error)
    if not records:
        raise left_out[0]
    rows, problems = read_records(records)
    notes = (*(f"left out: {error}" for error in left_out), *(f"{name}: {problem}" for problem in problems))
    return Knowledge(rows=rows, notes=notes)


def _downloaded(address: str) -> Knowledge:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "knowledge"
        file.write_bytes(_download(address))
        return _of_file(file, address)


def _download(address: str) -> bytes:
    shown, remedy = without_password(address), "check the address, or download the file and give its path"
    if not address.startswith(("http://", "https://")):
        raise KnowledgeError("knowledge", f"{shown} is not an address of HTTP", FORMS)
    content = bytearray()
    most_bytes = 1 << 28
    try:
        with httpx2.stream("GET", address, timeout=60.0, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise KnowledgeError("knowledge", f"{shown} answers with status {answer.status_code}", remedy)
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > most_bytes:
                    raise KnowledgeError("knowledge", f"{shown} has more than {most_bytes >> 20} MiB", remedy)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = f"{shown} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
        raise KnowledgeError("knowledge", problem, remedy) from error
    return bytes(content)


PREFIX = ":::MLLOG"
REMEDY = "put the submission's config_*.sh of this run beside the log"
SYSTEM = ":::SYSJSON"
BENCHMARKS: Mapping[str, Mapping[str, object]] = {
    "gpt3": {
        "model_name": "GPT-3 175B", "num_layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "ffn_hidden": 49152,
        "vocab": 51200, "params_b": 175.0,
    },
    "llama2_70b_lora": {
        "model_name": "Llama 2 70B", "num_layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672,
        "vocab": 32000, "params_b": 69.0, "seq_len": 8192, "notes": "lora r=16",
    },
    "llama31_405b": {
        "model_name": "Llama 3.1 405B", "num_layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248,
        "vocab": 128256, "params_b": 405.9,
    },
    "llama31_8b": {
        "model_name": "Llama 3.1 8B", "num_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336,
        "vocab": 128256, "params_b": 8.03,
    },
}  # fmt: skip
"""Benchmark -> its model, as the rules of the benchmark fix it, in columns of a table."""
_SIZES = {
    "tp": ("TENSOR_MODEL_PARALLEL", "TP"), "pp": ("PIPELINE_MODEL_PARALLEL", "PP"), "cp": ("CONTEXT_PARALLEL", "CP"),
    "vpp": ("INTERLEAVED_PIPELINE", "VPP"), "micro_batch": ("MICRO_BATCH_SIZE", "MBS"),
}  # fmt: skip
"""Column -> the variables that state it."""
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+.*?/?(config_[A-Za-z0-9_]+\.sh)\s*$")


def has_log(path: Path) -> bool:
    """Whether lines of an MLPerf log begin in the first megabyte of a file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        beginning = file.read(1 << 20)
    return PREFIX in beginning or SYSTEM in beginning


def read_log(path: Path) -> CsvRecord:
    """A log as a row of a table of measurements.

    Raises:
        KnowledgeError: the benchmark is not one of language models, no time is stated, or the layout is not known.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise KnowledgeError(str(path), f"cannot be read ({error.strerror})", "give the path of a log") from error
    system, events = parsed(text)
    return CsvRecord(line=1, cells=_cells(path, system, events, _variables(path, text, system)), problem="")


def parsed(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine, and all events in order. Lines that are damaged are left out."""
    system: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    for line in text.splitlines():
        for prefix in (PREFIX, SYSTEM):
            if (at := line.find(prefix)) < 0:
                continue
            try:
                entry = json.loads(line[at + len(prefix) :])
            except ValueError:
                continue
            if not isinstance(entry, dict):
                continue
            if prefix == PREFIX:
                events.append(entry)
            else:
                system.update(entry)
    return system, events


def _cells(
    path: Path, system: Mapping[str, Any], events: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> dict[str, str]:
    values = {str(event.get("key")): event.get("value") for event in reversed(events)}
    benchmark = str(values.get("submission_benchmark"))
    if benchmark not in BENCHMARKS:
        raise KnowledgeError(str(path), f"is of {benchmark}", f"give a log of {', '.join(BENCHMARKS)}")
    nodes, per_node = _machine(system, variables)
    if not nodes or not per_node:
        raise KnowledgeError(str(path), "states no number of nodes and devices", REMEDY)
    sizes = {
        column: size
        for column, names in _SIZES.items()
        if (size := next((variables[name] for name in names if variables.get(name, "").isdigit()), None))
    }
    if "tp" not in sizes:
        raise KnowledgeError(str(path), "states no layout", REMEDY)
    cells: dict[str, Any] = {
        "source": f"MLPerf Training, {values.get('submission_org') or 'unknown'}", "source_locator": path.name,
        "seq_len": values.get("max_sequence_length"), "gpu_type": _device(system, values),
        "num_gpus": nodes * per_node, "gpus_per_node": per_node, "intra_bw": system.get("accelerator_interconnect"),
        "inter_bw": _network(system), "zero_stage": 1,
        "precision": _precision(variables), "global_batch": values.get("global_batch_size"), "recompute": "none",
        "framework": _framework(system, variables), "outcome": "ok", "row_id": f"{path.parent.name}/{path.name}", **sizes,
        **BENCHMARKS[benchmark],
    }  # fmt: skip
    graphs = next((kind for name, kind in GRAPHS.items() if variables.get(name, "").lower() in ("1", "true")), 0)
    cells["notes"] = "; ".join(filter(None, [cells.get("notes", ""), f"captured={graphs}" if graphs else ""]))
    cells |= _time(path, events, values.get("global_batch_size"), cells["seq_len"])
    return {name: str(value) for name, value in cells.items() if value not in (None, "")}


GRAPHS = {"FULL_CUDA_GRAPH": 2, "MCORE_CUDA_GRAPH": 1, "LAYER_CUDA_GRAPH": 1}
"""Variable of a script -> `Software.captured` where it is set."""


def _machine(system: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[int, int]:
    def first(system_value: object, written: str | None) -> int:
        return next((int(text) for text in (str(system_value), written or "") if text.isdigit()), 0)

    return (
        first(system.get("number_of_nodes"), variables.get("DGXNNODES")),
        first(system.get("accelerators_per_node"), variables.get("DGXNGPU")),
    )


def _device(system: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    return str(system.get("accelerator_model_name") or values.get("submission_platform") or "")


def _framework(system: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    """NeMo's recipes are those of Megatron-Bridge: the variables of the layout are theirs."""
    framework = str(system.get("framework") or "")
    return f"Megatron-Bridge ({framework})" if "TENSOR_MODEL_PARALLEL" in variables else framework


def _network(system: Mapping[str, Any]) -> str:
    """The text about the network between nodes, without those for storage and management."""
    text = str(system.get("host_networking") or "")
    match = re.search(r"Compute:\s*([^;]*?(?:b/s|bit)[^,;]*)", text, re.IGNORECASE)
    return match[1] if match else text


def _precision(variables: Mapping[str, str]) -> str:
    for name in ("FP4", "FP8"):
        if variables.get(name, "").lower() in ("true", "1"):
            return name.lower()
    return "bf16"


def _time(path: Path, events: Sequence[Mapping[str, Any]], batch: object, length: object) -> dict[str, float]:
    """The median of the steps' times; else of the rates between evaluations."""
    stats = [event["value"] for event in events if event.get("key") == "tracked_stats" and isinstance(event.get("value"), dict)]
    # Names under which logs track the seconds of steps.
    step_times = ("train_step_time", "train_step_timing in s")
    for name in step_times:
        if step_seconds := [value for stat in stats if isinstance(value := stat.get(name), int | float) and value > 0]:
            # Steps before these are not counted: they warm up.
            return {"step_time_s": median(step_seconds[5:] or step_seconds)}
    if rates := [value for stat in stats if isinstance(value := stat.get("throughput"), int | float) and value > 0]:
        return {"samples_per_s": median(rates)}
    if isinstance(batch, int) and isinstance(length, int) and (seconds := _block_steps(events, batch * length)):
        return {"step_time_s": median(seconds)}
    raise KnowledgeError(str(path), "states no time of a step", f"give a log with tracked_stats of {', '.join(step_times)}")


def _block_steps(events: Sequence[Mapping[str, Any]], tokens: int) -> list[float]:
    """Seconds of a step of each block between evaluations that states its tokens (`epoch_count`)."""
    step_seconds, begun = [], None
    for event in events:
        described, now = event.get("metadata"), event.get("time_ms")
        count = described.get("epoch_count") if isinstance(described, dict) else None
        if event.get("key") == "block_start":
            begun = now
        elif event.get("key") == "block_stop":
            if isinstance(begun, int) and isinstance(now, int) and isinstance(count, int) and count and count % tokens == 0:
                step_seconds.append((now - begun) / 1e3 / (count // tokens))
            begun = None
    return step_seconds


def _variables(path: Path, text: str, system: Mapping[str, Any]) -> dict[str, str]:
    """What the script of this run exports, and then what the log's own lines do."""
    texts = {script: script.read_text(encoding="utf-8", errors="replace") for script in sorted(path.parent.glob("config_*.sh"))}
    sourced = {
        match[1] for script_text in texts.values() for line in script_text.splitlines() if (match := _SOURCED.match(line))
    }
    runs = [script for script in texts if script.name not in sourced and "common" not in script.name]
    nodes = str(system.get("number_of_nodes") or "")
    # Those whose names state the log's number of nodes, or all if none does.
    # Nodes, in the name of a script, before its devices and the samples of a replica.
    runs = [script for script in runs if (match := re.search(r"_(\d+)x\d+x\d+", script.name)) and match[1] == nodes] or runs
    if len(runs) > 1:
        names = ", ".join(script.name for script in runs)
        raise KnowledgeError(str(path), f"may be of {names}", "leave only the script of this run beside the log")
    variables: dict[str, str] = {}
    for script in runs:
        variables |= _exports(texts[script], path.parent)
    return variables | _exports(text, path.parent)


def _exports(text: str, folder: Path, depth: int = 0) -> dict[str, str]:
    """Variable -> value, in the order of the lines; scripts of the folder that are sourced are read in their place."""
    variables: dict[str, str] = {}
    for line in text.splitlines():
        if assigned := re.match(r"^\s*(?:\+\s*)?export\s+([A-Z][A-Z0-9_]*)=(.*?)\s*(?:#.*)?$", line):
            value = assigned[2].strip().strip("\"'")
            default = re.match(r"^\$\{[A-Za-z0-9_]+:?[-=]([^}]*)\}$", value)
            variables[assigned[1]] = default[1] if default else value
        elif (sourced := _SOURCED.match(line)) and depth < 3:
            if (script := folder / sourced[1]).is_file():
                variables |= _exports(script.read_text(encoding="utf-8", errors="replace"), folder, depth + 1)
            elif not line[:1].isspace():
                raise KnowledgeError(str(folder), f"lacks {sourced[1]}, which a script sources", REMEDY)
    return variables
