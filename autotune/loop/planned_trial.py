"""A trial that a job plans to run, and the refusal of its configuration before it uses a device."""

from dataclasses import dataclass

from autotune.session.nvme import space_problem
from autotune.session.session import Session
from search_spaces.outcome import Outcome, Purpose
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A trial to run, before it has a row in the store."""

    config: TrialConfig
    purpose: Purpose = Purpose.SEARCH
    repeat: int = 0
    fidelity: str = FULL


def refusal(session: Session, planned: PlannedTrial) -> TrialResult | None:
    """Return why the configuration cannot run at all; None: it may be tried.

    A configuration is INFEASIBLE if its parameters, gradients and optimizer state already exceed a rank's memory. Their size is
    a lower bound of the peak.
    """
    if planned.purpose is not Purpose.SEARCH:
        return None
    least = states_lower_bound_bytes(planned.config, session.model, session.world_size, session.space.capability)
    available = session.cluster.most_memory_bytes
    if least > available:
        message = f"its states need at least {least:,} bytes on a rank, which has {available:,}"
        return TrialResult(attempt="", outcome=Outcome.INFEASIBLE, rule="states-fit", message=message)
    problem = space_problem(session.request, session.cluster, session.model, planned.config)
    if problem is not None:
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule="nvme-space", message=problem)
    refusals = session.space.check(planned.config)
    if not refusals and session.extrapolation is not None and (refused := session.extrapolation.refusal(planned.config)):
        refusals = [refused]
    if refusals:
        message = f"{refusals[0].message}; {refusals[0].remedy}"
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule=refusals[0].rule, message=message)
    return None
