"""The catalog: models, clusters, spaces, engines; and the content of a space."""

from fastapi import APIRouter
from pydantic import Field

from api.auth import Reader, SettingsOf
from api.choices import choices
from api.computing import Computing
from api.settings import Settings
from api.submission import JobSubmission, KnobName, KnobValue, checked, session_of_submission
from autotune.request.engines import CAPABILITIES
from autotune.wire.choices import Choices, Space, Validation
from autotune.wire.service import Descriptions, Names
from search_spaces.knob_values import KNOBS, domain_text
from search_spaces.preset_files import preset_tables
from storage.records import Scope

router = APIRouter(prefix="/v1", tags=["catalog"])


class ConfigSubmission(JobSubmission):
    """A request, and a configuration to validate under it."""

    config: dict[KnobName, KnobValue] = Field(max_length=200)
    """Knob -> value; omitted knobs have the values of the space's base."""


@router.get("/models", operation_id="list_models")
async def list_models(_: Reader) -> Names:
    """Models by name."""
    return Names(items=tuple(preset_tables("models")))


@router.get("/clusters", operation_id="list_clusters")
async def list_clusters(_: Reader) -> Names:
    """Clusters by name; NAME:NODES means several nodes of it."""
    return Names(items=("local", *preset_tables("clusters")))


@router.get("/spaces", operation_id="list_spaces")
async def list_spaces(_: Reader) -> Names:
    """Search spaces by name."""
    return Names(items=tuple(preset_tables("spaces")))


@router.get("/engines", operation_id="list_engines")
async def list_engines(_: Reader) -> Descriptions:
    """The supported and refused knobs of each engine."""
    return Descriptions(items=tuple(capability.plain() for capability in CAPABILITIES.values()))


@router.get("/knobs", operation_id="list_knobs")
async def list_knobs(_: Reader) -> Descriptions:
    """Every knob."""
    knobs = KNOBS.values()
    return Descriptions(
        items=tuple(
            {"name": k.name, "unit": k.unit, "domain": domain_text(k), "default": k.default, "description": k.description}
            for k in knobs
        )
    )


@router.get("/choices", operation_id="list_choices")
def list_choices(settings: SettingsOf, principal: Reader) -> Choices:
    """All choices that a submission form offers, in one response."""
    return choices(settings, principal.may(Scope.SUBMIT))


@router.post("/spaces/count", operation_id="count_space")
async def count_space(body: JobSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Space:
    """Count the legal configurations of a request's space, and the points that each rule refuses. 422 if it takes too long."""
    return await computing.run(_counted, body, settings)


def _counted(body: JobSubmission, settings: Settings) -> Space:
    space = session_of_submission(body, settings, settings.count_steps).space
    census = space.census()
    return Space(
        space=space.name,
        hash=space.hash,
        domains={name: tuple(values) for name, values in space.domains.items()},
        raw=census.raw,
        legal=census.legal,
        merged=census.merged,
        refused=dict(census.refused),
    )


@router.post("/spaces/validate", operation_id="validate_config")
async def validate_config(body: ConfigSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Validation:
    """Validate one configuration: whether it is legal, else which rules refuse it, with remedies."""
    return await computing.run(_validated, body, settings)


def _validated(body: ConfigSubmission, settings: Settings) -> Validation:
    submission = JobSubmission(**body.model_dump(exclude={"config"}))
    space = session_of_submission(submission, settings, settings.submission_steps).space
    config = space.canonical(space.base.replace(checked(body.config)))
    refusals = space.check(config)
    return Validation(
        legal=not refusals,
        config=config.values(),
        refusals=tuple(refusals),
    )
