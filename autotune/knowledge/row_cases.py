"""A row of a table of measurements as a case: missing values are derived from the names of the model and the device, from the
model's size, and from what the notes state in words."""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import RequestError
from autotune.frameworks.megatron import layout_stages
from autotune.knowledge.row import TableRow
from autotune.knowledge.row_names import RowHardware, completed, find_device, layers_with_experts, named_model, row_hardware
from autotune.prediction.cases.config_cases import shapes_of
from autotune.prediction.equations.cases import (
    CONTEXT_METHODS,
    RECOMPUTE,
    SCHEDULES,
    Cases,
    Hardware,
    Layouts,
    Shapes,
    scalar,
    stacked,
)
from autotune.prediction.equations.kernels import product_efficiency, sustained_share
from autotune.prediction.equations.software import (
    MEASURED_RANKS,
    MEGATRON_HOST_WORK,
    UNFUSED,
    Megatron,
    Software,
    Transformers,
    megatron_of,
    software_of,
    transformers_of,
    with_numbers,
)
from search_spaces.clusters.cluster import PCIE_COPIES
from search_spaces.errors import ModelFormatError
from search_spaces.optimizers import moment_bytes

_NEGATED = r"(?<!no )(?<!not )(?<!without )"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Model properties inferred from a row's parameter count."""

    gated: bool
    tied: bool


def refusal(row: TableRow) -> str | None:
    """Why a row cannot be represented; None: it can."""
    try:
        row = completed(row)
    except ModelFormatError as error:
        return f"states sizes that {row.model_name} cannot have: {error.field} {error.problem}"
    for name in ("num_layers", "hidden", "heads", "seq_len", "num_gpus", "gpu_type", "micro_batch"):
        if getattr(row, name) in (None, 0):
            return f"has no {name}"
    if row_hardware(row.gpu_type or "", None, 1, None, None) is None:
        return f"device {row.gpu_type!r} is not known"
    if row.recompute and _recompute(row) is None:
        return f"recompute {row.recompute!r} is none of {', '.join(RECOMPUTE)}"
    if (row.num_layers or 0) < (row.pp or 1):
        return f"{row.num_layers} layers do not fill {row.pp} pipeline stages"
    if (row.seq_len or 0) < 2:
        return f"seq_len {row.seq_len} is too short to train a language model"
    if row.experts and named_model(row) is None and not 1 <= (row.topk or 0) <= row.experts:
        return f"topk {row.topk} is not between 1 and {row.experts} experts"
    try:
        if row.arguments:
            _described_shapes(row, _shapes(row, _family(row))), _layouts(row, Software()), _megatron(row, "")
    except (ValueError, IndexError, RequestError) as error:
        return f"states arguments of Megatron-LM that do not belong together: {error}"
    return None


def _recompute(row: TableRow) -> str | None:
    """The kind of recomputation named in the cell, with any other words around it; None: unknown."""
    words = re.findall(r"[a-z]+", (row.recompute or "none").lower())
    return next((kind for kind in RECOMPUTE if kind in words), None)


def noted_recompute(notes: str) -> str | None:
    """none, selective or full; None: the notes do not state it, or state several."""
    pattern = (
        r"(?:\b(?P<before>none|no|full|selective)\s+(?:activation\s+)?(?:re-?comput\w*|checkpoint\w*)"
        r"|\b(?:activation[ _]checkpointing|re-?comput\w*|act_ckpt)\s*[=:]\s*(?P<after>none|off|full|selective)\b)(?!\s*\+)"
    )
    words = {(match["before"] or match["after"]).lower() for match in re.finditer(pattern, notes, re.IGNORECASE)}
    kinds = {"none" if kind in ("no", "off") else kind for kind in words}
    return kinds.pop() if len(kinds) == 1 else None


def noted_software(notes: str, optimizer: str | None) -> list[str]:
    """Words of software profiles (`row_software.toml`): stated features, a fused attention kernel, moments in 8 bits."""
    words = ["=".join(feature) for feature in stated_features(notes)]
    if re.search(_NEGATED + r"\b(?:flash|memory-efficient|sdpa)[ _-]?(?:att\w*)?", notes, re.IGNORECASE):
        words.append("flash attention")
    if re.search(r"(?:adamw?[ _-]?8[ _-]?bit|8[ _-]?bit[ _-]?adamw?)", f"{optimizer or ''} {notes}", re.IGNORECASE):
        words.append("adam 8bit")
    return words


def noted_precision(notes: str) -> str | None:
    """8 or 4 bits, if the notes state them; None: they do not."""
    match = re.search(_NEGATED + r"\b(?:mx|nv)?fp[48]\b(?!\s*(?:kv|cache))", notes, re.IGNORECASE)
    return match[0].lower() if match else None


def noted_adapters(notes: str) -> int | None:
    """The rank of LoRA adapters; 0: it is not stated; None: no adapters."""
    match = re.search(_NEGATED + r"\bq?lora\b", notes, re.IGNORECASE)
    if match is None:
        return None
    rank = re.search(r"\b(?:lora[ _-]?)?(?:r|rank)\s*[=:]?\s*(\d{1,4})\b", notes[match.end() :], re.IGNORECASE)
    return int(rank[1]) if rank else 0


def described(row: TableRow) -> str:
    """The row's description of its software, and whether its device is recent: software of its time has fused attention."""
    framework = row.framework or ""
    parts = [framework if framework.startswith("engine=") else f"framework={framework}", f"precision={row.precision or ''}"]
    # Parts of notes that describe the software; the others may describe the result, which a predictor must not see.
    about_software = r"kernel=[^;]*|method=[^;]*|(?<!no )(?:torch\.)?compile|async ?tp"
    parts += re.findall(about_software, f"{framework}; {row.notes}", re.IGNORECASE)
    parts += noted_software(row.notes, row.optimizer)
    device = find_device(row.gpu_type or "")
    if device is not None and "fp8" in device[1].peak_flops:
        parts.append("device=recent")  # it multiplies in 8 bits: sold since 2022
    return "; ".join(parts)


def adapts(row: TableRow) -> bool:
    """Whether a row's software chooses recomputation and sharding by memory if the row does not state them."""
    return bool(row_software(described(row)).adapts[0])


def case_of(row: TableRow) -> Cases:
    """The case of a row that `refusal` does not refuse."""
    row = completed(row)
    model = None if row.arguments else named_model(row)
    software = row_software(described(row))
    hardware = row_hardware(row.gpu_type or "", row.gpus_per_node, row.num_gpus or 1, row.intra_bw, row.inter_bw)
    assert hardware is not None  # checked by refusal()
    if model is None:
        shapes = _shapes(row, _family(row))
        shapes = _described_shapes(row, shapes) if row.arguments else shapes
    else:
        adapter, frozen = _adapter(row)
        shapes = replace(shapes_of(model, row.seq_len or 1), adapter=scalar(adapter), frozen_bytes=scalar(frozen))
    megatron = Megatron()
    if row.arguments:
        megatron = _megatron(row, hardware.family)
        unfused = megatron.attention_backend >= UNFUSED
        software = replace(
            software, scores=np.where(unfused, 5.0, 0.0), dropout=np.where(megatron.hidden_dropout > 0, 1.0, 0.0),
            # accumulate_allreduce_grads_in_fp32 is the default of bf16 only.
            gradient_bytes=scalar(2.0 if row.precision == "fp16" else 4.0), host_work=scalar(MEGATRON_HOST_WORK),
        )  # fmt: skip
    kind = row.mem_kind or ""
    measured = "first" if "rank 0" in kind else "last" if "rank world_size-1" in kind else "fullest"
    return Cases(
        shapes=replace(shapes, dropout=software.dropout),
        hardware=_hardware(row, hardware),
        layouts=_layouts(row, software),
        software=replace(software, measured_rank=scalar(MEASURED_RANKS.index(measured))),
        megatron=megatron,
        transformers=transformers_of(words, hardware.family) if (words := _transformers_words(row)) else Transformers(),
    )


def _transformers_words(row: TableRow) -> dict[str, str]:
    """What the row states of Transformers and its libraries: by stacks, then by parts of its notes with names of fields; empty:
    it does not use them."""
    words: dict[str, str] = {}
    text = f"{described(row)}; source={row.source_locator}; model={row.model_name}; ranks={row.num_gpus}; {row.notes}"
    for stack in _matching(text):
        words |= {name: str(word) for name, word in stack.get("transformers", {}).items()}
    if "states" not in words:  # other software has the same precisions and sharding
        return {}
    names = {item.name for item in dataclasses.fields(Transformers)}
    stated = (part.strip().partition("=") for part in row.notes.split(";"))
    return words | {name: word for name, _, word in stated if name in names}


def _described_shapes(row: TableRow, shapes: Shapes) -> Shapes:
    """The shape with what the arguments of Megatron-LM state of the model."""

    def number(name: str) -> float:
        return float(row.arguments.get(name) or 0)

    heads, states, latent = row.heads or 1, row.arguments, row.arguments.get("mla") == "true"
    head = number("qk_head_dim") + number("qk_pos_dim") if latent else number("kv_channels") or (row.hidden or 1) / heads
    sizes = {
        "query": heads * head, "key_value": (row.kv_heads or heads) * head, "modules": number("mtp_layers"),
        "matrices": 3.0 if states.get("swiglu") == "true" else 2.0, "tied": float(states.get("tied_embeddings") != "false"),
        "rms_norm": float(states.get("normalization") == "RMSNorm"),
        "positions": number("max_positions") if states.get("position") == "learned" else 0.0,
    }  # fmt: skip
    if latent:
        sizes |= {"query_rank": number("q_lora_rank"), "key_value_rank": number("kv_lora_rank")}
        sizes |= {"rotated": number("qk_pos_dim"), "value": heads * number("v_head_dim")}
    return replace(shapes, **{name: scalar(size) for name, size in sizes.items()})


def _megatron(row: TableRow, family: str) -> Megatron:
    """The arguments of Megatron-LM, with the layers of the first and of the last rank."""
    flags, ranks, layers = layers_with_experts(row), row.pp or 1, row.num_layers or 1
    stages, micro_batches = _stages(row, layers, ranks), row.gradient_accumulation_steps or 1
    rank_layers, kept_layers = np.zeros((1, 2, 2)), np.zeros((1, 2, 2))
    for end, rank in enumerate((0, ranks - 1)):
        chunks = [(len(chunk), sum(flags[layer] for layer in chunk)) for chunk in stages[rank::ranks]]
        # Before its first backward a looped rank runs all but its last chunk for as many micro-batches as there are ranks.
        ahead = ranks - rank if len(chunks) == 1 else 2 * (ranks - rank - 1) + (len(chunks) - 1) * ranks + 1
        passes = range(min(ahead, micro_batches * len(chunks)))
        alive = [chunks[index % (ranks * len(chunks)) // ranks] for index in passes]
        rank_layers[0, end], kept_layers[0, end] = np.sum(chunks, axis=0), np.sum(alive, axis=0)
    return replace(megatron_of(row.arguments, family), rank_layers=rank_layers, kept_layers=kept_layers)


def _stages(row: TableRow, layers: int, ranks: int) -> list[range]:
    """The layers of each stage, in order: as a layout states them, else equal ones of which the embedding and the loss can
    each take the place of a layer, and the first and the last rank can have a number of their own."""
    states, looped = row.arguments, row.vpp or 1
    if layout := layout_stages(states.get("pipeline_layout")):
        counts = [stage.count("t") for stage in layout]
    else:
        before, after = (states.get(f"account_{end}") == "true" for end in ("embedding", "loss"))
        stated = {rank: int(states[f"{end}_stage_layers"]) for rank, end in ((0, "first"), (ranks - 1, "last"))
                  if f"{end}_stage_layers" in states}  # fmt: skip
        even = (layers + before + after - sum(stated.values())) // max(ranks - len(stated), 1)
        counts = [stated.get(rank, even) // looped for _ in range(looped) for rank in range(ranks)]
        counts[0], counts[-1] = counts[0] - before, counts[-1] - after
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def cases_of_rows(rows: Sequence[TableRow]) -> Cases:
    """The cases of rows that `refusal` does not refuse."""
    return stacked([case_of(row) for row in rows])


def _family(row: TableRow) -> _Family:
    """Gated or not, tied or not: as stated in the notes, else the combination closest to the stated number of parameters."""
    noted = re.search(r"tied_embeddings=(True|False)", row.notes, re.IGNORECASE)
    hidden, layers, vocabulary = row.hidden or 1, row.num_layers or 1, row.vocab or 50_000
    query_key = 2 * hidden * hidden * (1 + (row.kv_heads or row.heads or 1) / (row.heads or 1))
    ffn = row.ffn_hidden or 4 * hidden
    share = float(np.mean(layers_with_experts(row))) if row.experts else 0.0
    expert = (row.experts or 0) * (row.moe_ffn or ffn) + (row.shared_expert or 0)
    width = share * expert + (1 - share) * ffn
    best, choice = np.inf, _Family(gated=ffn % hidden != 0, tied=False)
    if row.params_b is None:
        return choice
    for gated, tied in product((False, True), (False, True)):
        if noted and tied != (noted[1].lower() == "true"):
            continue
        count = layers * (query_key + (3 if gated else 2) * hidden * width) + (1 if tied else 2) * vocabulary * hidden
        error = abs(np.log(count / (row.params_b * 1e9)))
        if error < best - 0.01:
            best, choice = error, _Family(gated=gated, tied=tied)
    return choice


def _shapes(row: TableRow, family: _Family) -> Shapes:
    hidden, heads = row.hidden or 1, row.heads or 1
    adapter, frozen = _adapter(row)
    ffn = row.ffn_hidden or 4 * hidden
    share = float(np.mean(layers_with_experts(row))) if row.experts else 1.0
    return Shapes(
        layers=scalar(row.num_layers or 1),
        hidden=scalar(hidden),
        heads=scalar(heads),
        query=scalar(hidden),
        key_value=scalar(hidden * (row.kv_heads or heads) / heads),
        ffn=scalar((row.moe_ffn or ffn) if row.experts else ffn),
        matrices=scalar(3 if family.gated else 2),
        vocabulary=scalar(row.vocab or 50_000),
        positions=scalar(0),
        sequence=scalar(row.seq_len or 1),
        window=scalar(row.seq_len or 1),
        tied=scalar(float(family.tied)),
        experts=scalar(row.experts or 0),
        experts_per_token=scalar(row.topk or 0 if row.experts else 0),
        expert_share=scalar(share),
        dense_ffn=scalar(ffn if share < 1 else 0),
        shared_ffn=scalar(row.shared_expert or 0 if row.experts else 0),
        adapter=scalar(adapter),
        adapter_divided=scalar(0.0),
        frozen_bytes=scalar(frozen),
        dropout=scalar(0),
    )


def _adapter(row: TableRow) -> tuple[float, float]:
    """Trainable parameters per layer and bytes per frozen one; zeros if all is trained.

    Four bits with a scale per 64 values take 0.57 bytes, with quantised scales 0.52 [Dettmers 2023, QLoRA, 3].
    """
    noted, rank = re.search(r"trainable=([\d,]+)", row.notes), noted_adapters(row.notes)
    if not noted and rank is None:
        return 0.0, 0.0
    precision = row.precision or ""
    four = "nf4" in precision or "qlora" in row.notes.lower()
    frozen = 0.52 if "nf4-dq" in precision else 0.57 if four else 2.0
    hidden, layers = row.hidden or 1, row.num_layers or 1
    tables = 2.0 * (row.vocab or 0) * hidden if "embedding and head trained" in row.notes else 0.0
    trained = (
        float(noted[1].replace(",", "")) if noted else (rank or 16) * layers * (8 * hidden + 3 * (row.ffn_hidden or 4 * hidden))
    )
    return (trained - tables) / layers, frozen


FP8_GAIN = 1.6
"""Speed of training in fp8 relative to bf16, of rows that do not state a recipe: products are twice as fast; casts, scales and
attention are not."""


def _hardware(row: TableRow, hardware: RowHardware) -> Hardware:
    precision = (row.precision or "bf16").lower()
    peaks = hardware.device.peak_flops
    base = peaks.get("fp16" if "fp16" in precision else "bf16", peaks.get("fp16", peaks.get("fp32", 1e13)))
    # Products in 4 bits are four times as fast as in bf16, training 2.1 times.
    gain = 2.1 if "fp4" in precision else FP8_GAIN if "fp8" in precision else 1.0
    if "fp32" in precision and not ("bf16" in precision or "fp16" in precision):
        base = peaks.get("tf32", peaks.get("fp32", base))
    host_link = hardware.device.host_link
    if host_link == PCIE_COPIES:
        host_link = {"v100": 12e9, "a100": 25e9, "a800": 25e9}.get(hardware.family, 50e9)
    return Hardware(
        peak=scalar(base * gain * product_efficiency(hardware.device)),
        bandwidth=scalar(hardware.device.memory_bandwidth or 1e12),
        capacity=scalar(hardware.device.memory_bytes),
        devices_per_node=scalar(hardware.devices_per_node),
        linked_devices=scalar(hardware.devices_per_node),
        intra=scalar(hardware.intra),
        inter=scalar(hardware.inter),
        host_link=scalar(host_link),
        host_bandwidth=scalar(300e9),
        scatter_volume=scalar(1.0),
        idle_cost=scalar(1.0),
        sustained=scalar(sustained_share(hardware.device, "bf16" if gain == 1.0 else precision)),
    )


def _layouts(row: TableRow, software: Software) -> Layouts:
    world, tp, pp, cp = row.num_gpus or 1, row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max(world // (tp * pp * cp), 1)
    virtual = row.vpp or 1
    schedule = "interleaved_1f1b" if virtual > 1 and pp > 1 else "1f1b"
    sharding = float(software.sequence_parallel[0]) if row.sequence_parallel is None else float(row.sequence_parallel)
    divides = dp * cp % (row.ep or 1) == 0 and not (row.ep and row.ep > 1 and software.whole_experts[0])
    skips_layers = _recompute(row) == "selective" and re.search(
        r"selective layer|every (second|other) layer", row.notes, re.IGNORECASE
    )
    return Layouts(
        data=scalar(dp),
        tensor=scalar(tp),
        pipeline=scalar(pp),
        context=scalar(cp),
        expert=scalar(row.ep or 1),
        expert_tensor=scalar(int(row.arguments.get("etp") or (tp if divides else 1))),
        shard=scalar(_shard(row, dp * cp)),
        zero_stage=scalar(_stage(row)),
        micro_batch_size=scalar(row.micro_batch or 1),
        accumulation=scalar(row.gradient_accumulation_steps or 1),
        sequence_parallel=scalar(sharding if tp > 1 else 0.0),
        virtual_stages=scalar(virtual if pp > 1 else 1),
        pipeline_schedule=scalar(SCHEDULES.index(schedule)),
        activation_checkpointing=scalar(RECOMPUTE.index(_recompute(row) or "none")),
        checkpoint_every_k=scalar(2.0 if skips_layers else 1.0),
        offload_optimizer=scalar(1.0 if row.offload and "optimizer" in row.offload else 0.0),
        offload_parameters=scalar(1.0 if row.offload and "param" in row.offload else 0.0),
        offload_activations=scalar(1.0 if row.offload and "activation" in row.offload else 0.0),
        parameter_bytes=scalar(4.0 if (row.precision or "").lower() == "fp32" else 2.0),
        reduce_bytes=np.where(software.reduce_bytes > 0, software.reduce_bytes, software.gradient_bytes),
        reduce_bucket_size=software.reduce_bucket,
        prefetch_bucket_size=scalar(5e7),
        param_persistence_threshold=scalar(0),
        max_live_parameters=scalar(1e9),
        overlap_comm=scalar(1),
        defer_gradient_reduction=scalar(0),
        reshard_after_forward=scalar(1),
        loss_chunk_size=scalar(0),
        balanced=software.balanced,
        context_parallel_method=scalar(
            CONTEXT_METHODS.index("ulysses" if "a2a" in row.arguments.get("cp_comm_type", "") else "ring")
        ),
        moment_bytes=scalar(moment_bytes("muon", 4.0)[0] if row.arguments and row.optimizer == "muon" else 8.0),
    )


def _stage(row: TableRow) -> int:
    return 1 if row.zero_stage is None else row.zero_stage


def _shard(row: TableRow, ranks: int) -> int:
    """HSDP shards inside a node."""
    return min(ranks, row.gpus_per_node or 8) if "HSDP" in row.notes else ranks


FEATURES = frozenset(field.name for field in dataclasses.fields(Software) if field.name != "measured_rank")
"""What a row can state of its software."""


def row_software(text: str) -> Software:
    """The software that a row describes: the defaults, or our own engine, overridden by every stack whose words all match
    `text`, then by the features that it states.

    `text` has parts between semicolons: `framework=NAME`, `precision=TYPE`, `kernel=NAME`, and so on; parts without a name are
    notes. A word of a stack matches whole words of the parts with its name. A feature is stated as `name=number`, with a name
    of `FEATURES`; names of software only give the others.
    """
    values: dict[str, Any] = {} if text.startswith("engine=") else {"untuned": 1.0}
    for stack in _matching(text):
        values |= {name: value for name, value in stack.items() if name in FEATURES}
    values |= {name: float(number) for name, number in stated_features(text)}
    engine = re.search(r"(?:^|;)\s*engine=([^;]*)", text)
    return with_numbers(software_of(engine[1].strip(), "") if engine else Software(), values)


def _matching(text: str) -> list[dict[str, Any]]:
    """The stacks whose words all match."""
    parts = dict[str, str]()
    for part in text.lower().split(";"):
        name, equals, value = part.strip().partition("=")
        key = name if equals and re.fullmatch(r"\w+", name) else "notes"
        parts[key] = f"{parts.get(key, '')}; {value if key == name else part.strip()}"

    def matches(word: str) -> bool:
        name, _, pattern = word.partition("=")
        return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", parts.get(name, "")) is not None

    return [stack for stack in _stacks() if all(map(matches, stack["words"]))]


def numbers_of(software: Software) -> dict[str, float]:
    """What a row can state, of one case."""
    return {name: float(getattr(software, name)[0]) for name in sorted(FEATURES)}


def stated_features(text: str) -> list[tuple[str, str]]:
    """The features that `text` states, with their numbers."""
    stated = re.findall(r"\b([a-z_]+)=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.,])", text.lower())
    return [(name, number) for name, number in stated if name in FEATURES]


@cache
def _stacks() -> list[dict[str, Any]]:
    stacks: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("row_software.toml").read_text(encoding="utf-8"))[
        "stack"
    ]
    return stacks
