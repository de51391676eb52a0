"""Seconds of collectives: latency grows with the doublings of a group; volume is divided by the group's bandwidth.

Compressed communication: messages are smaller, but compression takes time.
"""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.kernels import link_seconds
from autotune.prediction.equations.parameters import StageParameters, is_quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationGroup:
    """A communication group."""

    ranks: Array
    in_domain: Array
    """Its ranks in one link domain."""
    sharing: Array
    """Number of such groups that share a node's network; less than 1: each uses the networks of several nodes."""


def group_of(cases: Cases, ranks: Array, stride: Array) -> CommunicationGroup:
    """The group of `ranks` ranks at a stride of `stride`; ranks of a link domain are numbered consecutively."""
    linked = cases.hardware.linked_devices
    in_domain = np.clip(np.floor(linked / np.minimum(stride, linked)), 1, ranks)
    in_domain = np.where(stride >= linked, 1.0, in_domain)
    return CommunicationGroup(ranks=ranks, in_domain=in_domain, sharing=cases.hardware.devices_per_node / in_domain)


def collective_seconds(cases: Cases, group: CommunicationGroup, volume: Array, count: Array, rates: Coefficients) -> Array:
    """Seconds of `count` collectives that together move `volume` bytes through each rank.

    `volume` is what passes through a rank's link: (n - 1) / n of the message for all-gather and reduce-scatter, twice that for
    all-reduce. Across link domains (nodes, if the fast link ends at the node) the rings are limited by the group's share of the
    network: every rank adds its part of its node's network cards. Small messages reach less of it: each begins with a delay
    that does not depend on the group's share.
    """
    inside = link_seconds(volume, count, cases.hardware.intra, rates)
    across = _network_seconds(cases, group.sharing, volume, count, rates)
    return _seconds(group, count, inside, np.maximum(across, inside), rates)


def exchange_seconds(
    cases: Cases, group: CommunicationGroup, volume: Array, count: Array, rates: Coefficients, crossing: Array | float = 1.0
) -> Array:
    """Seconds of `count` exchanges (all-to-all) in which each rank sends `volume` bytes in all, as many to each other rank.

    What goes to other link domains passes through the rank's own part of its node's network: no other rank carries it. Of that
    the share `crossing` is sent, where other domains forward the rest to several of their ranks.
    """
    outside = np.maximum(group.ranks - group.in_domain, 0.0) / np.maximum(group.ranks - 1, 1.0)
    inside = link_seconds(volume * (1 - outside), count, cases.hardware.intra, rates)
    across = _network_seconds(cases, group.sharing * group.in_domain, volume * outside * crossing, count, rates)
    return _seconds(group, count, inside, np.maximum(across, inside), rates)


def _network_seconds(cases: Cases, sharing: Array, volume: Array, count: Array, rates: Coefficients) -> Array:
    """Seconds of messages of `volume` bytes in all through the network of a node that `sharing` groups divide."""
    message = volume / np.maximum(count, 1e-9)
    reached = message / (message + rates.half_message / np.maximum(sharing, 1.0))
    share = np.minimum(cases.hardware.inter / sharing, cases.hardware.intra)
    return np.asarray(volume / np.maximum(share * rates.network_efficiency * np.maximum(reached, 1e-3), 1.0))


def _seconds(group: CommunicationGroup, count: Array, inside: Array, across: Array, rates: Coefficients) -> Array:
    """Transfers in one link domain or across, with their latencies; 0 for a group of one rank."""
    crosses = group.ranks > group.in_domain
    domains = np.maximum(group.ranks / group.in_domain, 1.0)
    latency = np.where(
        crosses,
        rates.network_seconds * np.log2(1 + domains) + rates.link_seconds,
        rates.link_seconds * np.log2(1 + group.in_domain),
    )
    return np.where(group.ranks > 1, count * latency + np.where(crosses, across, inside), 0.0)


def tensor_group(cases: Cases) -> CommunicationGroup:
    """Tensor-parallel ranks: consecutive."""
    return group_of(cases, cases.layouts.tensor, np.ones(1))


def context_group(cases: Cases) -> CommunicationGroup:
    """Context-parallel ranks: outside tensor."""
    return group_of(cases, cases.layouts.context, cases.layouts.tensor)


def shard_group(cases: Cases) -> CommunicationGroup:
    """The ranks that divide the states: data x context, or the shard group of hybrid sharding."""
    return group_of(cases, cases.layouts.shard, cases.layouts.tensor)


def expert_group(cases: Cases) -> CommunicationGroup:
    """The ranks that divide the experts: neighbours among those of a stage that have the same slice of each expert."""
    return group_of(cases, cases.layouts.expert, cases.layouts.expert_tensor)


def expert_tensor_group(cases: Cases) -> CommunicationGroup:
    """The ranks that divide each expert: consecutive."""
    return group_of(cases, cases.layouts.expert_tensor, np.ones(1))


def expert_data_group(cases: Cases) -> CommunicationGroup:
    """The ranks that hold the same experts and divide their states."""
    layouts = cases.layouts
    return group_of(cases, layouts.alike, layouts.expert_tensor * layouts.expert)


def replica_group(cases: Cases) -> CommunicationGroup:
    """With hybrid sharding, the ranks that hold the same share."""
    layouts = cases.layouts
    copies = layouts.data * layouts.context / layouts.shard
    return group_of(cases, copies, layouts.tensor * layouts.shard)


def crosses_domains(cases: Cases) -> Flags:
    """Whether a pipeline stage and the next are in different link domains."""
    layouts = cases.layouts
    return (layouts.pipeline > 1) & (_replica(cases) * layouts.pipeline > cases.hardware.linked_devices)


def _replica(cases: Cases) -> Array:
    """Ranks of one stage."""
    return cases.layouts.tensor * cases.layouts.context * cases.layouts.data


def boundary_bandwidth(cases: Cases, rates: Coefficients) -> Array:
    """Bytes/s between two neighbouring pipeline ranks; across link domains each rank has its share of the node's network."""
    hardware = cases.hardware
    per_stage = _replica(cases)
    across = crosses_domains(cases)
    bandwidth = np.minimum(hardware.inter / np.minimum(hardware.devices_per_node, per_stage), hardware.intra)
    return np.where(across, bandwidth * rates.network_efficiency, hardware.intra * rates.link_efficiency)


PACK_BYTES, UNPACK_BYTES = 36.0, 22.0
"""Bytes moved per number to convert it to an integer, and back, by the engine's unfused operators."""


def sends_integers(cases: Cases) -> Flags:
    """Whether gradients are sent as 8-bit integers."""
    integers: Flags = (cases.layouts.reduce_bytes > 1) & (cases.layouts.reduce_bytes < 2)
    return integers


def sends_signs(cases: Cases) -> Flags:
    """Whether the update sends signs of momenta in place of gradients."""
    signs: Flags = cases.layouts.reduce_bytes < 1
    return signs


def gathers_integers(cases: Cases) -> Flags:
    """Whether stage 3 gathers parameters as 8-bit integers."""
    integers: Flags = (cases.layouts.zero_stage == 3) & np.isfinite(cases.layouts.gather_bytes)
    return integers


def gathered_share(cases: Cases) -> Array:
    """Bytes of a gathered parameter, as a share of its bytes in computation."""
    layouts = cases.layouts
    return np.where(gathers_integers(cases), np.minimum(layouts.gather_bytes / layouts.parameter_bytes, 1.0), 1.0)


def frozen_share(cases: Cases) -> Array:
    """The same for a frozen parameter: a quantised one is gathered as it is."""
    return np.where(is_quantised(cases), 1.0, gathered_share(cases))


def has_near(cases: Cases) -> Flags:
    """Whether parameters are gathered from a second copy, except for the first time in a step."""
    second_copy: Flags = (cases.layouts.zero_stage == 3) & (cases.layouts.secondary_shard_size > 0)
    return second_copy


def near_group(cases: Cases) -> CommunicationGroup:
    """The neighbours that share the second copy."""
    return group_of(cases, np.maximum(cases.layouts.secondary_shard_size, 1.0), cases.layouts.tensor)


def coding_seconds(
    cases: Cases, rates: Coefficients, parameter_counts: StageParameters, reductions: Array, gathers: Array
) -> Array:
    """Seconds per step to convert numbers to integers and back; for signs, this is part of the update.

    Reduce: all gradients are packed, and as many unpacked on their owners; at stage 0 the shares once more. Gather: a rank
    packs its share and unpacks everything.
    """
    layouts = cases.layouts
    if not np.any(sends_integers(cases) | gathers_integers(cases)):
        return np.zeros(1)
    ranks = layouts.shard
    packed = np.where(layouts.zero_stage == 0, 1 + 1 / ranks, 1.0) * PACK_BYTES
    unpacked = np.where(layouts.zero_stage == 0, 2.0, 1.0) * UNPACK_BYTES
    reduced = np.where(sends_integers(cases), reductions * parameter_counts.trained * (packed + unpacked), 0.0)
    elements = parameter_counts.trained + np.where(is_quantised(cases), 0.0, parameter_counts.frozen)
    # A second copy is already packed.
    packs = np.where(has_near(cases), np.minimum(gathers, 1.0), gathers)
    moved = elements * (packs * PACK_BYTES / ranks + gathers * UNPACK_BYTES)
    gathered = np.where(gathers_integers(cases), moved, 0.0)
    single = layouts.data * layouts.context == 1
    return np.where(single, 0.0, (reduced + gathered) / (cases.hardware.bandwidth * rates.update_efficiency))
