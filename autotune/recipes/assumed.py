"""What a recipe leaves open: the values that are assumed, what follows from each, and where the others come from."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.check import legality
from autotune.frameworks.framework import BATCH, LintCase, Surroundings
from autotune.prediction.planning.conditional import ConditionalEstimate, Conditions
from autotune.prediction.planning.consequences import consequences, most_favourable, question_with
from autotune.prediction.planning.estimate import StepEstimate
from autotune.question.assumption import VOCABULARY, Assumption, Origin, Source, assumption
from autotune.question.field import parse_length
from autotune.recipes.outlook import outlook, question_about
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, parse_value, value_text
from search_spaces.preset_files import unknown_name

SIZES = ("sequence_length", BATCH, VOCABULARY)
"""Fields of `Surroundings` that `--assume` states beside knobs."""


def surroundings_with(around: Surroundings, texts: Sequence[str]) -> Surroundings:
    """What the user says, with what `--assume NAME=VALUE` states.

    Raises:
        RequestError: a text is not of this form.
        SearchSpaceError: there is no such knob, or the value is not in its domain.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if name not in KNOBS and name not in SIZES:
            raise unknown_name("knob or size", name, (*SIZES, *KNOBS))
        if not separator or (name in SIZES[1:] and not re.fullmatch(r"0*[1-9][0-9]{0,17}", value)):
            raise RequestError("assume", f"{text!r} is not NAME=VALUE", "write for instance micro_batch_size=4")
        if name == "sequence_length":
            values[name] = parse_length("assume", value)
        elif name in SIZES:
            values[name] = int(value)
        else:
            values[name] = parse_value(name, value)
    return _with_values(around, values)


def _with_values(around: Surroundings, values: Mapping[str, Value]) -> Surroundings:
    sizes: dict[str, Any] = {name: value for name, value in values.items() if name in SIZES}
    knobs = {name: value for name, value in values.items() if name in KNOBS}
    return dataclasses.replace(around, knobs={**around.knobs, **knobs}, **sizes)


def with_values(case: LintCase, values: Mapping[str, Value]) -> LintCase:
    """The case as if the user stated these values."""
    around, question = _with_values(case.around, values), question_about(case)
    if question is not None:  # figures of a cluster that is named by its cards
        figures = {name: value for name, value in values.items() if name in ClusterSpec.__dataclass_fields__}
        around = dataclasses.replace(around, cluster=question_with(question, figures).cluster)
    return dataclasses.replace(case, around=around)


def require_unstated(case: LintCase) -> None:
    """Refuse what the user says of the program that trains if the file states it.

    Raises:
        RequestError: it does.
    """
    around, imported = case.around, case.imported
    for name in around.knobs:
        if name in imported.knobs:
            by = f"{imported.keys.get(name, name)}, which is {value_text(imported.knobs[name])}"
            raise RequestError("assume", f"{case.source} decides {name} itself by {by}", "change the file, or leave it out")
    describes = around.model is not None or (imported.model is not None and VOCABULARY not in imported.assumed)
    if around.vocab_size is not None and describes:
        raise RequestError("assume", f"the model has its own {VOCABULARY}", "leave it out")


def assumptions(case: LintCase) -> tuple[Assumption, ...]:
    """What a prediction takes because neither the file nor the user states it."""
    question = question_about(case)
    assumed: list[Assumption] = []
    for name, value in case.assumed.items():
        if name == "reduce_dtype" and "precision" in case.imported.assumed:
            continue
        setting = case.imported.keys.get(name) or next(iter(case.framework.write(case, name, value)), "")
        item = assumption(name, value, f"{setting} or --assume" if setting else "--assume")
        # Knobs that an override of Megatron-Bridge leaves to the recipe that it begins with.
        if name in ("tensor_parallel_size", "pipeline_parallel_size") and case.ranks:
            degrees = tuple(size for size in (1, 2, 4, 8) if size != value and case.ranks % size == 0)
            item = dataclasses.replace(item, alternatives=degrees)
        assumed.append(item)
    if question is not None:
        if case.batch is None:
            assumed.append(assumption(BATCH, question.global_batch_size, "--global-batch-size"))
        assumed += question.assumed
    return tuple(assumed)


def conditional(case: LintCase, answer: StepEstimate) -> ConditionalEstimate:
    """The prediction of a case, with what it is at the alternatives of what it assumes: each as if the user stated it."""
    assumed, rules_before = assumptions(case), {finding.rule for finding in legality(case)}

    def estimate_at(values: Mapping[str, Value]) -> StepEstimate | None:
        changed = with_values(case, values)
        if not {finding.rule for finding in legality(changed)} <= rules_before:
            return None
        prediction = outlook(changed)
        return None if isinstance(prediction, str) else prediction

    results = consequences(assumed, answer, estimate_at)
    values, best = most_favourable(results, answer, estimate_at)
    return ConditionalEstimate(
        estimate=answer, conditions=Conditions(assumed=assumed, results=tuple(results)), most_favourable=best,
        favourable_values=values,
    )  # fmt: skip


def origins(case: LintCase, places: Mapping[str, str], version: str) -> dict[str, Origin]:
    """Where each value of a case comes from.

    Args:
        case: the configuration.
        places: setting of the file -> `FILE:LINE SETTING`.
        version: the framework's version.
    """
    around, imported = case.around, case.imported

    def stated(key: str, option: str = "") -> Origin:
        return Origin(Source.STATED, option or places.get(key, case.source))

    default = Origin(Source.FRAMEWORK, f"{case.framework.title} {version}".strip())
    values = {name: stated(key) if (key := case.key_of(name)) in places else default for name in imported.knobs}
    values |= {name: stated("", "--assume") for name in around.knobs if name not in imported.knobs}
    values |= {name: Origin(Source.DERIVED, "the model") for name in case.of_model}
    if case.model is not None:
        values["model"] = stated(case.key_of("model"), "--model" if around.model else "")
    if case.ranks is not None:
        values["ranks"] = stated("", "--ranks" if around.ranks else "--cluster" if around.cluster else "")
    if case.tokens is not None:
        key, option = imported.keys.get("sequence_length", ""), "--sequence-length" if around.sequence_length else ""
        values["sequence_length"] = stated(key, option) if key or option else default
    if around.global_batch_size is not None or case.key_of(BATCH) in places:
        values[BATCH] = stated(case.key_of(BATCH), "--global-batch-size" if around.global_batch_size else "")
    elif case.batch is not None:
        values[BATCH] = Origin(Source.DERIVED, "micro-batch, accumulation and ranks")
    return values | {item.name: Origin(Source.ASSUMED, item.stated_by) for item in assumptions(case)}
