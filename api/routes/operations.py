"""Whether the service lives, is ready, and how it does."""

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from api.auth import StoreOf, needs
from storage.records import Scope
from storage.store import Store

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """How the process does."""

    status: str = "ok"


@router.get("/livez", operation_id="live")
async def live() -> Health:
    """Whether the process answers; says nothing of the database."""
    return Health()


@router.get(
    "/readyz", operation_id="ready", responses={503: {"description": "The database cannot be used."}}, response_model=Health
)
def ready(store: StoreOf) -> Health:
    """Whether the database can be used, and has the tables that this version knows."""
    store.jobs(limit=1)
    return Health()


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Figures in the text format of Prometheus."}},
    dependencies=[Depends(needs(Scope.READ))],
)
def metrics(store: StoreOf) -> Response:
    """Jobs by state and trials by outcome."""
    return Response(metrics_text(store), media_type="text/plain; version=0.0.4; charset=utf-8")


def metrics_text(store: Store) -> str:
    """The figures."""
    figures = store.figures()
    lines = ["# HELP autotune_jobs Jobs by state.", "# TYPE autotune_jobs gauge"]
    lines += [f'autotune_jobs{{state="{state}"}} {count}' for state, count in sorted(figures.jobs.items())]
    lines += ["# HELP autotune_trials_total Trials with an outcome.", "# TYPE autotune_trials_total counter"]
    lines += [f'autotune_trials_total{{outcome="{outcome}"}} {count}' for outcome, count in sorted(figures.trials.items())]
    lines += ["# HELP autotune_queue_seconds Age of the job that waits longest.", "# TYPE autotune_queue_seconds gauge"]
    lines += [f"autotune_queue_seconds {figures.longest_wait:.3f}"]
    return "\n".join(lines) + "\n"
