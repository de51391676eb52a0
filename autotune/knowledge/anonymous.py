"""Rows of tables without their words: the same facts as numbers and known words, so that nothing personal is in a bundle.

A row's names of models, software, networks and runs are free text. What predictions read from them is stated instead: the
device's preset, the network's rate, the features of the software. The result is checked: the equations get the same case.
"""

import dataclasses
import re
from functools import cache

import numpy as np

from autotune.evaluation.row_cases import adapts, case_of, described, noted_layouts, refusal
from autotune.evaluation.row_hardware import find_device, row_hardware
from autotune.evaluation.row_models import completed, named_preset
from autotune.evaluation.validation.row import Row, RowOutcome, noted_accumulation
from autotune.evaluation.validation.truth import GIB, peak_bytes, step_seconds
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.software import profile
from search_spaces.clusters.presets import device_preset
from search_spaces.preset_files import preset_tables

NUMBERS = (
    "num_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "experts", "topk", "moe_ffn", "shared_expert",
    "dense_first_layers", "vocab", "seq_len", "params_b", "num_gpus", "gpus_per_node",
    "zero_stage", "tp", "pp", "vpp", "dp", "cp", "ep", "sequence_parallel", "micro_batch", "global_batch",
)  # fmt: skip
"""Columns that are kept as they are."""
WORDS = (
    "model_name", "moe_layer_freq", "gpu_type", "intra_bw", "inter_bw", "precision", "recompute", "optimizer", "offload",
    "mem_kind", "notes",
)  # fmt: skip
"""Columns that are written anew from known words and numbers."""
MEASURED = ("samples_per_s", "step_time_s", "peak_mem_gb", "outcome")
COLUMNS = (*NUMBERS, *WORDS, *MEASURED)
"""The columns of a bundle; the others are left out."""
DIGITS = 6
"""Significant digits of measured values."""
_PRECISION = re.compile(r"nf4-dq|(?:mx|nv)?fp[48]|nf4|int8|bf16|fp16|fp32|tf32")
_OPTIMIZERS = ("adamw", "adam", "adafactor", "lamb", "lion", "muon", "sgd")
_LAYERS = re.compile(r"[\d\[\]()*+, ]+")
_DOMAIN = re.compile(r"NVL\s?\d{2,3}", re.IGNORECASE)


def anonymous(row: Row, source: str) -> Row | str:
    """The row of the source with this name in known words, or why it cannot be stated in them."""
    row = completed(row)
    why = refusal(row) or _unmeasured(row)
    if why is not None:
        return why
    stated = _stated(row, source)
    if refusal(stated) is not None or not _same_case(case_of(row), case_of(stated)) or adapts(row) != adapts(stated):
        return "its words state more than known features"
    return stated


def rounded(value: float) -> float:
    """The value with `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


def _unmeasured(row: Row) -> str | None:
    if row.batch_problem:
        return "its batch contradicts its layout"
    if row.outcome is RowOutcome.OOM or step_seconds(row) or peak_bytes(row):
        return None
    return "nothing was measured"


def _stated(row: Row, source: str) -> Row:
    seconds, peak, samples = step_seconds(row), peak_bytes(row), row.samples_per_step
    bare = Row(
        line=0,
        row_id="",
        source=source,
        **{name: getattr(row, name) for name in NUMBERS},
        model_name=named_preset(row),
        moe_layer_freq=row.moe_layer_freq if _LAYERS.fullmatch(row.moe_layer_freq or "") else None,
        gpu_type=_device_name(row.gpu_type or ""),
        intra_bw=_link(row),
        inter_bw=_network(row),
        precision="+".join(dict.fromkeys(_PRECISION.findall((row.precision or "").lower()))) or None,
        recompute=noted_layouts(row).recompute,
        optimizer=next((name for name in _OPTIMIZERS if name in (row.optimizer or "").lower()), None),
        offload="+".join(word for word in ("optimizer", "param") if word in (row.offload or "")) or None,
        mem_kind=None if peak is None else _memory_kind(row.mem_kind or ""),
        samples_per_s=rounded(samples / seconds) if samples and seconds else None,
        step_time_s=None if seconds is None else rounded(seconds),
        peak_mem_gb=None if peak is None else rounded(peak / GIB),
        outcome=row.outcome,
        notes="; ".join(_noted(row)),
    )
    wanted, known = profile(described(row).lower()), profile(described(bare).lower())
    features = [f"{name}={value:g}" for name, value in sorted(wanted.items()) if value != known.get(name)]
    return dataclasses.replace(bare, notes="; ".join([*_noted(row), *features]))


@cache
def _device_name(name: str) -> str | None:
    found = find_device(name)
    if found is None:
        return None
    return next((key for key in preset_tables("devices") if device_preset(key) == found[1]), None)


def _link(row: Row) -> str | None:
    words = f"{row.gpu_type or ''} {row.intra_bw or ''}"
    domain = _DOMAIN.search(words)
    return " ".join([*(["PCIe"] if "pcie" in words.lower() else []), *([domain[0]] if domain else [])]) or None


def _network(row: Row) -> str | None:
    """The rate of the network of one of the row's nodes, as the equations read it."""
    if row.inter_bw is None or _DOMAIN.search(f"{row.intra_bw or ''} {row.gpu_type or ''}"):
        return None
    found = row_hardware(row.gpu_type or "", row.gpus_per_node, row.num_gpus or 1, row.intra_bw, row.inter_bw)
    return None if found is None else f"{found.node_inter * 8 / 1e9:.10g} Gb/s per node"


def _memory_kind(kind: str) -> str:
    words = ("smi" in kind.lower(), "reserved" in kind.lower(), "rank 0" in kind)
    return " ".join(["GiB", *(word for word, on in zip(("nvidia-smi", "reserved", "rank 0"), words, strict=True) if on)])


def _noted(row: Row) -> list[str]:
    """What predictions read from a row's notes beside its software, in fixed words."""
    steps, noted = noted_accumulation(row.notes), noted_layouts(row)
    return [*([f"grad_acc={steps}"] if steps else []), *noted.words]


def _same_case(one: Cases, other: Cases) -> bool:
    return np.allclose(_numbers_of(one), _numbers_of(other), rtol=1e-5)


def _numbers_of(case: Cases) -> list[float]:
    parts = (case.shapes, case.hardware, case.layouts, case.software)
    return [float(getattr(part, field.name)[0]) for part in parts for field in dataclasses.fields(part)]
