"""Machines named by their cards: `8xH100`, `4x8xH100`, `2x24GB:3`; and what is assumed of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.clusters.cluster import PCIE_COPIES, ClusterSpec, DeviceSpec
from search_spaces.clusters.devices import MODULE, device_preset, device_words, devices_named, has_nominal_memory, link_of
from search_spaces.errors import ClusterFormatError, SearchSpaceError
from search_spaces.preset_files import preset_tables, unknown_name

_MEMORY = re.compile(r"([1-9][0-9]{0,3}(?:\.[0-9]{1,3})?)gi?b?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedFigure:
    """A figure of a cluster that its name does not state."""

    name: str
    """A field of ClusterSpec; `device` has the name of a preset."""
    value: float | str
    alternatives: tuple[float | str, ...] = ()
    """What other machines with these cards have."""
    text: str
    stated_by: str = "--cluster FILE.toml"


def count_and_cards(text: str) -> tuple[int, int, str] | None:
    """Cards of a machine, machines, and the card as it is written; None: the text does not have this format."""
    plain = re.sub(r"\s*\bx\b\s*|(?<=\d)x\s+", "x", text.strip().lower().replace("×", "x").replace("*", "x"))
    if match := re.fullmatch(r"(?:([1-9][0-9]{0,4})x)?([1-9][0-9]{0,3})x([^:/]+)", plain):
        return int(match[2]), int(match[1] or 1), match[3]
    if match := re.fullmatch(r"((?!0+x)[^:/]*[^:/x])x([1-9][0-9]{0,3})", plain):
        return int(match[2]), 1, match[1]
    return None


def machines_of_cards(text: str) -> ClusterSpec | None:
    """Machines of such cards, with what `assumed_figures` names; None: the text does not name any.

    Raises:
        ClusterFormatError: no machine has as many of them.
    """
    if (parts := count_and_cards(text)) is None:
        return None
    count, nodes, written = parts
    memory, devices = _MEMORY.fullmatch(written), devices_named(written)
    if memory is None and not devices:
        return None
    word = f"{memory[1]}GB" if memory else "-".join(re.findall(r"[a-z0-9]+", written))
    # Of a machine, unless a preset has more.
    if count > max([16, *(table["devices_per_node"] for name in devices for table in _machines_with(name))]):
        problem = f"a machine with {count} of these cards is not known"
        raise ClusterFormatError("cluster", problem, f"write MACHINESxCARDSx{word}, such as {-(-count // 8)}x8x{word}")
    device = _card(word, float(memory[1])) if memory else device_preset(devices[0])
    link = PCIE_COPIES if memory else link_of(devices[0])[1]
    machines = _machines_with(device.name)
    share = machines[0]["host_memory_bytes"] // machines[0]["devices_per_node"] if machines else 0
    racks = [table for table in machines if "link_domain_size" in table and count <= table["devices_per_node"]]
    return ClusterSpec(
        name=f"{count}x{word}" + (f":{nodes}" if nodes > 1 else ""), nodes=nodes, devices_per_node=count, device=device,
        intra_node_bandwidth=link, inter_node_bandwidth=_networks(device.name, count)[0],
        host_memory_bytes=share * count or max(3 * count * device.memory_bytes, 64 * 2**30),  # 3: typical of machines on sale
        cores_per_node=8 * count,
        link_domain_size=racks[0]["link_domain_size"] // racks[0]["devices_per_node"] * count if racks else None,
    )  # fmt: skip


def unknown_cards(text: str) -> SearchSpaceError | None:
    """The error for a number of cards that no preset has; None: the text does not have this format."""
    if (parts := count_and_cards(text)) is None:
        return None
    count, _, written = parts
    names = [
        f"{count}x{written}GB" if re.fullmatch(r"\d{1,3}", written) else "",
        *(f"{count}x{name}" for name in preset_tables("devices")),
    ]
    otherwise = f"or give {count}xMEMORY, such as {count}x24GB"
    return unknown_name("device preset", text, filter(None, names), otherwise, listed_by="autotune clusters")


def assumed_figures(cluster: ClusterSpec) -> tuple[AssumedFigure, ...]:
    """What is assumed of machines named by their cards, most consequential first; empty: of another cluster."""
    if cluster.name in ("local", "ray") and cluster.device.kind != "cpu":
        return _found_links(cluster)
    name = cluster.name.partition(":")[0]
    parts, machine = count_and_cards(name), machines_of_cards(name)
    if parts is None or machine is None:
        return ()
    count, _, written = parts
    figures, memory_alone = [], _MEMORY.fullmatch(written)
    devices, extremes = ((), _extremes(float(memory_alone[1]))) if memory_alone else (devices_named(written), ())
    if not devices:
        card, state = machine.device, f"--cluster {count}xDEVICE"
        text = f"{card.name} has {card.memory_bytes / 2**30:.4g} GiB for use and {card.peak_flops['bf16'] / 1e12:g} TFLOP/s"
        figures.append(AssumedFigure(name="device", value=card.name, alternatives=extremes, text=text, stated_by=state))
    elif len(devices) > 1:
        state = f"--cluster {count}x{devices[1]}"
        figures.append(
            AssumedFigure(name="device", value=devices[0], alternatives=devices[1:], text=devices[0], stated_by=state)
        )
    if count > 1:
        link, rate, others = link_of(devices[0]) if devices else ("PCIe", PCIE_COPIES, _other_links(extremes))
        if any(map(MODULE.fullmatch, device_words(written))) and not link.startswith("PCIe"):
            others = ()  # the name of a module means its links
        text = f"{link}, {rate / 1e9:g} GB/s between the cards of a machine"
        figures.append(AssumedFigure(name="intra_node_bandwidth", value=rate, alternatives=others, text=text))
    if cluster.nodes > 1 and (linked := machine.link_domain_size) is not None:
        text = f"NVLink joins {linked} cards, of {linked // count} machines"
        figures.append(AssumedFigure(name="link_domain_size", value=linked, alternatives=(count,), text=text))
    if cluster.nodes > 1:
        network, *networks = _networks(machine.device.name, count)
        text = f"{network * 8 / 1e9:g} Gbit/s from a machine to the others"
        figures.append(AssumedFigure(name="inter_node_bandwidth", value=network, alternatives=tuple(networks), text=text))
    memory = machine.host_memory_bytes
    text = f"{memory / 2**30:,.0f} GiB of main memory per machine"
    figures.append(AssumedFigure(name="host_memory_bytes", value=memory, alternatives=(memory // 2, memory * 2), text=text))
    # A file may describe a cluster with such a name.
    actual = {"device": cluster.device.name}
    return tuple(figure for figure in figures if actual.get(figure.name, getattr(cluster, figure.name)) == figure.value)


def _found_links(cluster: ClusterSpec) -> tuple[AssumedFigure, ...]:
    """The link between GPUs that were found: their driver does not say how fast it is."""
    if cluster.devices_per_node == 1:
        return ()
    devices, rate = devices_named(cluster.device.name, whole=False), cluster.intra_node_bandwidth
    link, _, others = link_of(devices[0]) if devices else ("PCIe", rate, (12.5e9, 5e10))
    text = f"{link}, {rate / 1e9:g} GB/s between the GPUs of a machine"
    by = "`autotune calibrate` measures it; --cluster FILE.toml"
    return (AssumedFigure(name="intra_node_bandwidth", value=rate, alternatives=others, text=text, stated_by=by),)


def _machines_with(device: str) -> list[dict[str, Any]]:
    """The presets of clusters of these devices."""
    return [table for table in preset_tables("clusters").values() if table["device"] == device]


def _networks(device: str, count: int) -> tuple[float, ...]:
    """Bytes/s of a machine to others, assumed and plausible ones: as much for each card as the presets of clusters have."""
    tables = _machines_with(device)
    # 10 Gbit/s, between machines of which nothing is known.
    rates = [table["inter_node_bandwidth"] / table["devices_per_node"] * count for table in tables] or [1.25e9]
    return tuple(dict.fromkeys([*rates, 12.5e9]))


def _extremes(memory: float) -> tuple[str, ...]:
    """Of the presets with so many GB of memory the slowest and the fastest."""
    peaks = {name: table["peak_flops"].get("bf16") for name, table in preset_tables("devices").items()}
    names = [name for name, peak in peaks.items() if peak and has_nominal_memory(name, memory)]
    return tuple(dict.fromkeys(choose(names, key=peaks.__getitem__) for choose in (min, max) if names))


def _other_links(devices: Sequence[str]) -> tuple[float, ...]:
    """The slowest and the fastest links between such devices, besides the assumed copies over PCIe."""
    rates = {rate for device in devices for rate in (link_of(device)[1], *link_of(device)[2])} or {12.5e9, 5e10}
    return tuple(sorted({min(rates), max(rates)} - {PCIE_COPIES}))


def _card(name: str, memory: float) -> DeviceSpec:
    """A card of which only the nominal memory is known, in GiB (what card makers call GB)."""
    # Share of the nominal memory that most drivers report (devices.toml); with error correction in GDDR memory it is 0.92.
    return DeviceSpec(
        name=f"a {name} card", kind="cuda", memory_bytes=int(memory * 0.988 * 2**30), memory_bandwidth=9e11,
        peak_flops={"bf16": 1e14, "fp16": 1e14, "fp32": 2.5e13},
        source="memory as it was said; speed of no card in particular, name a device for its own",
    )  # fmt: skip
