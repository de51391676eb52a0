"""The hardware and the model of a row of a table, by their names.

A table has the layers, widths and heads of a model, and may have its experts. If a row has the name of a preset that columns do
not describe, it is that preset, with the sizes that the row states in place of the preset's.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autotune.knowledge.row import TableRow
from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.devices import device_family, device_preset, link_of
from search_spaces.models.huggingface import model_preset_names, resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.preset_files import plain_name, preset_tables

_RATE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([TtGg])(?:(b(?:it)?(?:/s|ps)|bE\b|igabit|\b)|B(?:/s|ps))")
"""400 Gb/s, 400Gbps, 3.2 Tb/s, 400G, 100GbE, or bytes: 50 GB/s."""

_INTRA = {
    family: rate
    for family, (name, rate) in {key.partition("-")[0]: link_of(key)[:2] for key in reversed(preset_tables("devices"))}.items()
    if not name.startswith("PCIe")
}
"""Family -> bytes/s that a device sends in its node over the family's own link, of its first preset; others: PCIe."""
_PCIE = 25e9
_INTER = {"v100": 12.5e9, "a100": 6.25e9, "a800": 6.25e9, "mi250x": 25e9}
"""Network bytes/s per device if a table does not state it: 400 Gb/s with Hopper and later families.

Nodes of eight A100 are sold with 200 Gb/s to eight times that: the mean time over that range, uniform in the logarithm, is that
of 470; 400 is a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHardware:
    """A row's description of its cluster."""

    device: DeviceSpec
    family: str
    devices_per_node: int
    intra: float
    inter: float
    """Of one of `devices_per_node` devices: a link domain."""


@cache
def find_device(name: str) -> tuple[str, DeviceSpec] | None:
    """The preset whose family the name contains, with the stated memory; None: unknown device."""
    words = re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower())
    several = [key for key in preset_tables("devices") if len(device_family(key)) > 1]
    families = {key.partition("-")[0] for key in preset_tables("devices") if key not in several}
    family = (
        next((word for word in words if word in families), None)
        or next((key.partition("-")[0] for key in several if device_family(key) <= {*words}), None)
        or ("titan" if "titan" in words else None)
    )
    if family is None:
        return None
    candidates = [key for key in preset_tables("devices") if key.partition("-")[0] == family]
    pcie = "pcie" in words
    right = [key for key in candidates if ("pcie" in key) == pcie] or candidates
    memory_sizes = [float(size) for size in re.findall(r"(\d{2,3})\s*G(?:i?B)?\b", name, re.IGNORECASE)]
    if not memory_sizes:
        return family, device_preset(right[0])
    nearest = min(right, key=lambda key: abs(device_preset(key).memory_bytes / 2**30 - memory_sizes[0]))
    return family, device_preset(nearest)


def row_hardware(
    gpu_type: str, gpus_per_node: int | None, world: int, intra: str | None, inter: str | None
) -> RowHardware | None:
    """The cluster of a row; None: unknown device."""
    preset = find_device(gpu_type)
    if preset is None:
        return None
    family, device = preset
    per_node = gpus_per_node or min(8, world)
    pcie = "pcie" in f"{gpu_type} {intra or ''}".lower()
    link = _PCIE if pcie else _INTRA.get(family, _PCIE)
    node_bandwidth = _rate(inter, per_node) or _INTER.get(family, 50e9 if family in _INTRA else 12.5e9) * per_node
    domain = re.search(r"NVL\s?(\d{2,3})", f"{intra or ''} {gpu_type}", re.IGNORECASE)
    linked = int(domain[1]) if domain else 72 if family in ("gb200", "gb300") else per_node
    return RowHardware(
        device=device, family=family, devices_per_node=linked, intra=link, inter=node_bandwidth / per_node * linked
    )  # fmt: skip


def network_understood(text: str | None) -> bool:
    """Whether a description of the network states a rate that is read; nothing stated: yes."""
    return not text or _rate(text, 1) is not None


def _rate(text: str | None, per_node: int) -> float | None:
    """Bytes/s of a node; None: not stated, or not understood.

    `1600 Gb/s per node`, `8x400 Gb/s IB per node`, `8x ConnectX-7 400 Gb/s`, `400 Gb/s per GPU`, `4 Omni-Path 100 Gb/s links`,
    `400G x 8`, `8x NDR`, `3.2 Tb/s`, `EFA` (400 Gb/s for each device).
    """
    if not text:
        return None
    match = _RATE.search(text) or re.search(r"\b(EDR|HDR|NDR|XDR)(\d{3})?\b", text, re.IGNORECASE)
    if match is None:
        return 50e9 * per_node if re.search(r"\befa", text, re.IGNORECASE) else None
    if match.re is _RATE:
        link_rate = float(match[1]) * (1e12 if match[2] in "Tt" else 1e9) / (1 if match[3] is None else 8)
    else:
        # Of an InfiniBand port of four lanes, by its generation.
        generation_rates = {"edr": 12.5e9, "hdr": 25e9, "ndr": 50e9, "xdr": 100e9}
        link_rate = float(match[2]) * 1e9 / 8 if match[2] else generation_rates[match[1].lower()]
    beside = text[: match.start()] + " " + text[match.end() :]
    if re.search(r"(?:per|/)\s*(?:GPU|device|accelerator)\b", beside, re.IGNORECASE):
        return link_rate * per_node
    count = re.search(
        r"(?<![\w.-])(\d{1,2})\s*(?:[x×*](?!\w)|[x×*](?=\d)|links?\b|ports?\b|rails?\b|NICs?\b|HCAs?\b|cards?\b|Omni-Path)"
        r"|[x×*]\s*(\d{1,2})(?![\w.])",
        beside,
        re.IGNORECASE,
    )
    return link_rate * int(count[1] or count[2]) if count else link_rate


STATED = {
    "num_layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}  # fmt: skip
"""Column -> field of a model."""


def named_model(row: TableRow) -> ModelSpec | None:
    """The preset that a row names, with the sizes that the row states, if columns do not describe it or the row states none of
    them; None: the columns suffice.

    Raises:
        ModelFormatError: the preset cannot have these sizes.
    """
    name = _preset(plain_name((row.model_name or "").rpartition("/")[2]))
    if name is None or (row.experts == 0 and resolve_model(name).num_experts):
        return None
    preset = resolve_model(name)
    if (row.num_layers or row.hidden or row.heads) and not beyond_columns(preset):
        return None
    fields = STATED | {
        "experts": "num_experts", "topk": "experts_per_token",
        "moe_ffn": "ffn_hidden_size", "shared_expert": "shared_expert_size",
    }  # fmt: skip
    sizes: dict[str, Any] = {
        field: getattr(row, column) for column, field in fields.items() if getattr(row, column) is not None
    }
    # Sources state either width as `ffn_hidden` where dense layers have another width than experts.
    two_widths = {"moe_intermediate_size", "intermediate_size_mlp"} & set(preset_tables("models")[name])
    if row.ffn_hidden and "ffn_hidden_size" not in sizes and not two_widths:
        sizes["ffn_hidden_size"] = row.ffn_hidden
    hidden, heads = row.hidden or preset.hidden_size, row.heads or preset.num_attention_heads
    if preset.latent:  # sources state one key-value head, or as many as heads
        sizes["num_key_value_heads"] = heads
    elif preset.head_dim * preset.num_attention_heads == preset.hidden_size:
        sizes["head_dim"] = hidden // heads
    if row.dense_first_layers is not None and preset.dense_ffn_size:
        layers = row.num_layers or preset.num_layers
        sizes["dense_layers"] = tuple(layer < row.dense_first_layers for layer in range(layers))
    if row.experts and row.experts % preset.router_groups:
        sizes |= {"router_groups": 1, "router_groups_kept": 1}
    return replace(preset, **sizes)


def completed(row: TableRow) -> TableRow:
    """The row with the columns of the model that it names, where it states none.

    Raises:
        ModelFormatError: as `named_model`.
    """
    model = named_model(row)
    if model is None:
        return row
    columns = {column: getattr(model, field) for column, field in STATED.items() if getattr(row, column) is None}
    return replace(row, **columns) if columns else row


def beyond_columns(model: ModelSpec) -> bool:
    """Whether the columns that every table has cannot describe the model."""
    width = model.num_attention_heads * model.head_dim
    return bool(model.num_experts or model.latent or model.sliding_window or width != model.hidden_size)


def layers_with_experts(row: TableRow) -> list[bool]:
    """Whether each layer has experts, by columns: a pattern of 0 and 1 as Megatron-LM writes it, every so many layers, or all
    but the first."""
    layers, pattern = row.num_layers or 1, row.moe_layer_freq or "1"
    terms = re.findall(r"\[([01,\s]+)\](?:\s*\*\s*(\d+))?", pattern)
    flags = "".join(re.sub(r"[^01]", "", values) * int(times or 1) for values, times in terms)
    if not row.experts:
        return [False] * layers
    if flags:
        return [flag == "1" for flag in flags]
    every = int(pattern) if pattern.isdigit() else 1
    return [layer % every == 0 and layer >= (row.dense_first_layers or 0) for layer in range(layers)]


@cache
def _preset(letters: str) -> str | None:
    """The preset with the longest name at the beginning of these letters, unless a number goes on behind it."""
    names = {plain_name(name): name for name in model_preset_names()}
    matching = [name for name in names if letters.startswith(name) and not letters[len(name) :][:1].isdigit()]
    return names[max(matching, key=len)] if matching else None
