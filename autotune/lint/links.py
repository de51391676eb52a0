"""Groups that lie in several link domains: tensor parallelism through our rule, experts here."""

from collections.abc import Iterator, Sequence

from autotune.lint.case import Case
from autotune.lint.changes import single_changes
from autotune.lint.legality import expert_ranks, legality, written
from autotune.lint.memory import Outlook, outlook, outlooks
from search_spaces.finding import Effect, Finding

LINKED = "NVLINK_DOMAIN_SIZE"
RULE = "experts-beyond-links"
GAIN = 1.1
"""Least predicted ratio of rates from which a slower exchange of tokens is a finding: less is within the predictions' error."""


def linked_devices(case: Case) -> int | None:
    """Devices that the fast link joins: the cluster's, else what the file states to Megatron's exchange; None: unknown."""
    cluster = case.around.cluster
    if cluster is not None:
        return cluster.linked_devices
    stated = (case.get(f"{table}.{LINKED}") for table in ("env_vars", "env"))
    return next((int(value) for value in stated if isinstance(value, int) and value > 0), None)


def beyond_links(case: Case) -> Iterator[Finding]:
    """Expert groups beyond a link domain: if the framework's exchange fails there, or a smaller group is faster."""
    linked, ranks = linked_devices(case), expert_ranks(case)
    without = case.model is not None and not case.model.num_experts
    if linked is None or case.config.expert_parallel_size == 1 or without or ranks <= linked:
        return
    why = case.framework.spans_domains(case)
    known = {one.rule for one in legality(case)}
    inside = [
        (changes, changed)
        for changes, changed in single_changes(case, ("expert_parallel_size",))
        if expert_ranks(changed) <= linked and {one.rule for one in legality(changed)} <= known
    ]
    problem = f"groups of {ranks} ranks lie in several link domains of {linked} devices"
    key = case.key_of("expert_parallel_size")
    if why is not None:
        fix = inside[0][0] if inside else {}
        remedy = written(fix) or f"choose groups of at most {linked} ranks"
        yield Finding(rule=RULE, key=key, effect=Effect.FAILS, problem=f"{why}, and {problem}", remedy=remedy, fix=fix)
        return
    yield from _faster(case, key, problem, inside)


def _faster(case: Case, key: str, problem: str, inside: Sequence[tuple[object, Case]]) -> Iterator[Finding]:
    present = outlook(case)
    if not isinstance(present, Outlook) or not inside:
        return
    others = outlooks(case, [changed for _, changed in inside])
    fitting = [(one.rate, changes) for one, (changes, _) in zip(others, inside, strict=True) if one is not None and one.fits]
    if not fitting:
        return
    rate, changes = max(fitting, key=lambda item: item[0])
    ratio = rate / present.rate
    if ratio >= GAIN:
        assert isinstance(changes, dict)
        slower = f"{problem}; groups within one are predicted {ratio:.2f} times as fast"
        yield Finding(rule=RULE, key=key, effect=Effect.SLOW, problem=slower, remedy=written(changes), fix=changes)
