"""Predicts what limits the winner, and which hardware change would help most."""

from autotune.explain.explanation.counterfactual import FREE, Counterfactual
from autotune.explain.explanation.evidence import Evidence
from autotune.explain.explanation.findings import Bound, Limits, MoreMemory, Upgrade
from autotune.explain.explanation.time_use import UNEXPLAINED
from autotune.explain.explanation.wording import limits_text

LAUNCHES = ("kernel_seconds", "collective_launch", "step_seconds")
INSIDE = ("link_seconds",)
BETWEEN = ("network_seconds", "half_message", "crossed_seconds")


def limits_of(evidence: Evidence, step: Counterfactual, memory: tuple[MoreMemory, ...]) -> Limits:
    """Each cost of the step, ordered by the time that removing it would save."""
    config, cluster = evidence.config, evidence.session.cluster
    saved = {
        "compute": step.saved({"peak": FREE}),
        "memory bandwidth": step.saved({"bandwidth": FREE}),
        "launch overhead": step.saved({}, LAUNCHES),
    }
    if cluster.linked_devices > 1:
        saved[f"the link inside a {cluster.link_domain_text}"] = step.saved({"intra": FREE}, INSIDE)
    if cluster.world_size > cluster.linked_devices:
        saved[f"the network between {cluster.link_domain_text}s"] = step.saved({"inter": FREE}, BETWEEN)
    if config.pipeline_parallel_size > 1:
        links = {"intra": FREE, "inter": FREE}
        saved["the pipeline's bubble"] = step.part("pipeline", links, (*INSIDE, *BETWEEN, "hop_seconds")) * step.scale
    if _offloads(evidence):
        saved["the host's memory and its link"] = step.saved({"host_link": FREE, "host_bandwidth": FREE})
    saved[UNEXPLAINED] = max(step.measured - step.seconds(), 0.0)
    bounds = [Bound(name=name, seconds=seconds, share=seconds / step.measured) for name, seconds in saved.items()]
    ranked = tuple(sorted(bounds, key=lambda bound: -bound.seconds))
    return Limits(bounds=ranked, memory=memory, text=limits_text(ranked, memory, UNEXPLAINED))


def upgrades_of(evidence: Evidence, step: Counterfactual, memory: tuple[MoreMemory, ...]) -> tuple[Upgrade, ...]:
    """Each single change, the most helpful first. The configuration stays the same, except for more memory."""
    cluster = evidence.session.cluster
    changes = {"twice the peak FLOP/s": "peak", "twice the memory bandwidth": "bandwidth"}
    if cluster.linked_devices > 1:
        changes[f"twice the link inside a {cluster.link_domain_text}"] = "intra"
    if cluster.world_size > cluster.linked_devices:
        changes[f"twice the network between {cluster.link_domain_text}s"] = "inter"
    if _offloads(evidence):
        changes["twice the link to the host"] = "host_link"
    found = [Upgrade(name=name, gain=step.gain({figure: 2.0}), config=None) for name, figure in changes.items()]
    for more in memory:
        if more.factor >= 1.25:
            found.append(Upgrade(name=f"{more.factor:g} times the memory of a rank", gain=more.gain, config=more.config))
    return tuple(sorted(found, key=lambda upgrade: -upgrade.gain.mean))


def _offloads(evidence: Evidence) -> bool:
    return evidence.config.offload_optimizer != "none" or evidence.config.offload_param != "none"
