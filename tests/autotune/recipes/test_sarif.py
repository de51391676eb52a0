"""SARIF logs against the published format: what SARIF 2.1.0 [OASIS 2020] requires and allows of the objects that lint writes.

The published schema has 3,000 lines; stated here is its part about these objects: required properties, allowed names (the
schema allows no others), types, and enumerations.
"""

from typing import Any

import jsonschema
import pytest
from lint_recipes import CASES, RecipeCase

from autotune.recipes.lint import sarif


def closed(required: list[str], allowed: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties; `allowed`: names of further ones of the published schema, of any type."""
    names = {**{name: {} for name in allowed.split()}, "properties": {"type": "object"}, **properties}
    return {"type": "object", "properties": names, "required": required, "additionalProperties": False}


TEXT = {"type": "string"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
MESSAGE = {
    **closed([], "markdown arguments", text=TEXT, id=TEXT),
    "anyOf": [{"required": ["text"]}, {"required": ["id"]}],
}
MULTIFORMAT = closed(["text"], "markdown", text=TEXT)
INDEX = {"type": "integer", "minimum": -1}
LINE = {"type": "integer", "minimum": 1}
RULE = closed(
    ["id"],
    "deprecatedIds guid deprecatedGuids name deprecatedNames fullDescription messageStrings defaultConfiguration helpUri help "
    "relationships",
    id=TEXT, shortDescription=MULTIFORMAT,
)  # fmt: skip
DRIVER = closed(
    ["name"],
    "guid organization product productSuite shortDescription fullDescription fullName version semanticVersion "
    "dottedQuadFileVersion releaseDateUtc downloadUri informationUri globalMessageStrings notifications taxa locations "
    "language contents isComprehensive localizedDataSemanticVersion minimumRequiredLocalizedDataSemanticVersion "
    "associatedComponent translationMetadata supportedTaxonomies",
    name=TEXT, rules={"type": "array", "items": RULE, "uniqueItems": True},
)  # fmt: skip
REGION = closed(
    [], "startColumn endColumn charOffset charLength byteOffset byteLength snippet message sourceLanguage", startLine=LINE,
    endLine=LINE,
)  # fmt: skip
ARTIFACT = closed([], "uriBaseId description", uri={"type": "string", "format": "uri-reference"}, index=INDEX)
PHYSICAL = {
    **closed([], "address contextRegion", artifactLocation=ARTIFACT, region=REGION),
    "anyOf": [{"required": ["address"]}, {"required": ["artifactLocation"]}],
}
LOCATION = closed([], "id logicalLocations message annotations relationships", physicalLocation=PHYSICAL)
RESULT = closed(
    ["message"],
    "rule kind guid correlationGuid occurrenceCount partialFingerprints fingerprints stacks codeFlows graphs graphTraversals "
    "relatedLocations suppressions baselineState rank attachments hostedViewerUri workItemUris provenance fixes taxa "
    "webRequest webResponse analysisTarget",
    ruleId=TEXT, ruleIndex=INDEX, level=LEVEL, message=MESSAGE, locations={"type": "array", "items": LOCATION},
)  # fmt: skip
NOTIFICATION = closed(
    ["message"], "locations threadId timeUtc exception descriptor associatedRule", message=MESSAGE, level=LEVEL
)  # fmt: skip
INVOCATION = closed(
    ["executionSuccessful"],
    "commandLine arguments responseFiles startTimeUtc endTimeUtc exitCode ruleConfigurationOverrides "
    "notificationConfigurationOverrides toolConfigurationNotifications exitCodeDescription exitSignalName exitSignalNumber "
    "processStartFailureMessage machine account processId executableLocation workingDirectory environmentVariables stdin "
    "stdout stderr stdoutStderr",
    executionSuccessful={"type": "boolean"}, toolExecutionNotifications={"type": "array", "items": NOTIFICATION},
)  # fmt: skip
RUN = closed(
    ["tool"],
    "conversion language versionControlProvenance originalUriBaseIds artifacts logicalLocations graphs automationDetails "
    "runAggregates baselineGuid redactionTokens defaultEncoding defaultSourceLanguage newlineSequences columnKind "
    "externalPropertyFileReferences threadFlowLocations taxonomies addresses translations policies webRequests webResponses "
    "specialLocations",
    tool=closed(["driver"], "extensions", driver=DRIVER), invocations={"type": "array", "items": INVOCATION},
    results={"type": ["array", "null"], "items": RESULT},
)  # fmt: skip
LOG = closed(
    ["version", "runs"], "inlineExternalProperties", version={"enum": ["2.1.0"]},
    runs={"type": ["array", "null"], "items": RUN},
    **{"$schema": {"type": "string", "format": "uri"}},
)  # fmt: skip


def written(*cases: RecipeCase, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    return sarif([case.linted() for case in cases], unread)


def require_valid(log: dict[str, Any]) -> None:
    jsonschema.validate(log, LOG, format_checker=jsonschema.FormatChecker())
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]  # 3.27.6


def test_a_log_of_every_format_is_as_published() -> None:
    first = {case.file.split("-")[0].split("_")[0]: case for case in CASES if case.expected}
    log = written(*first.values(), unread=("broken.toml: from: broken.toml is not TOML",))
    assert len(log["runs"][0]["results"]) >= len(first) >= 5
    require_valid(log)


def test_a_log_without_findings_is_as_published() -> None:
    require_valid(written(next(case for case in CASES if not case.fault)))
    require_valid(sarif([], ()))


@pytest.mark.prove(every=6)
@pytest.mark.parametrize(
    "damage",
    [
        lambda log: log.update(version="2.0.0"),
        lambda log: log["runs"][0].pop("tool"),
        lambda log: log["runs"][0]["results"][0].pop("message"),
        lambda log: log["runs"][0]["results"][0].update(level="fatal"),
        lambda log: log["runs"][0]["results"][0].update(severity="high"),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
    ],
)
def test_what_is_not_as_published_is_found(damage: Any) -> None:
    log = written(next(case for case in CASES if case.expected))
    damage(log)
    with pytest.raises(jsonschema.ValidationError):
        require_valid(log)
