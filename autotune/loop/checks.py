"""What is refused before it costs a device."""

from autotune.loop.planned_trial import PlannedTrial
from autotune.session.nvme import lacking_room
from autotune.session.session import Session
from search_spaces.outcome import Outcome, Purpose
from search_spaces.states import states_lower_bound_bytes
from search_spaces.trial import TrialResult


def refusal(session: Session, want: PlannedTrial) -> TrialResult | None:
    """Return why the configuration cannot run at all; None: it may be tried.

    A configuration whose parameters, gradients and optimizer state alone exceed a rank's memory is INFEASIBLE: the bound is
    never above the true peak.
    """
    if want.purpose is not Purpose.SEARCH:
        return None
    least = states_lower_bound_bytes(want.config, session.model, session.world_size, session.space.capability)
    room = session.cluster.most_memory_bytes
    if least > room:
        message = f"its states alone need {least:,} bytes on a rank, over the {room:,} there are"
        return TrialResult(attempt="", outcome=Outcome.INFEASIBLE, rule="states-fit", message=message)
    lacking = lacking_room(session.request, session.cluster, session.model, want.config)
    if lacking is not None:
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule="nvme-space", message=lacking)
    refusals = session.space.check(want.config)
    if not refusals and session.extrapolation is not None and (refused := session.extrapolation.refusal(want.config)):
        refusals = [refused]
    if refusals:
        message = f"{refusals[0].message}; {refusals[0].remedy}"
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule=refusals[0].rule, message=message)
    return None
