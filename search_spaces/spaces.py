"""Spaces by name, from a user's file, and with pins (KNOB=VALUE)."""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.capability import Capability
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.context import SpaceContext
from search_spaces.domains import EXPRESSIONS, SOLVED, parse_domain, resolve_domains
from search_spaces.errors import IllegalConfigError, SearchSpaceError, SpaceFormatError
from search_spaces.file_kinds import SPACE_FILE, mistaken
from search_spaces.fused_kernels import FUSED_KERNELS, runs_on
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, knob
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.preset_files import preset_tables, unknown_name
from search_spaces.rules.packing import require_documents
from search_spaces.rules.table import HONOURS, check_config, rules_of
from search_spaces.space import SearchSpace
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

COMPILED = "compile_blocks"
Pin = str | Value | Sequence[Value]
"""The text of a pin (`3`, `1,2,4`, `powers_of_two`), a value, or several."""


def space_preset_names() -> tuple[str, ...]:
    """The names that `resolve_space` knows."""
    return tuple(preset_tables("spaces"))


CUDA_DEFAULTS: Mapping[str, Value] = {knob.name: knob.on_cuda for knob in KNOBS.values() if knob.on_cuda is not None}
"""Defaults on CUDA devices that differ from TrialConfig's."""


def device_defaults(cluster: ClusterSpec, capability: Capability | None = None, model: Model | None = None) -> TrialConfig:
    """Every knob at its default on this cluster: on CUDA bf16 where the GPU computes in it, expandable segments and, of our own
    models, compiled blocks. Whether a user's `model` compiles is not known before it is tried.

    Where the engine does not honour that, the knob stands at TrialConfig's default; where it does not honour that either, at
    the first value that it names.
    """
    device = cluster.device
    wanted = dict(CUDA_DEFAULTS) if device.kind == "cuda" else {}
    if not device.supports("bf16"):
        wanted.pop("precision", None)
    if isinstance(model, FactoryModel | CommandModel):
        wanted.pop(COMPILED, None)
    honoured = {name: value for name, value in wanted.items() if capability is None or capability.honours(name, value)}
    return TrialConfig().replace({**(capability.starting_values() if capability else {}), **honoured})


def settled(config: TrialConfig, context: SpaceContext, asked: Collection[str] = ()) -> TrialConfig:
    """`config` without compiled blocks, where something else in it excludes them and nobody has asked for them by name."""
    if COMPILED in asked or not config.compile_blocks:
        return config
    readers = {rule.name for rule in rules_of(context.capability) if COMPILED in rule.reads and rule is not HONOURS}
    excluded = any(refusal.rule in readers for refusal in check_config(config, context))
    return config.replace({COMPILED: False}) if excluded else config


def parse_pins(texts: Iterable[str]) -> dict[str, str]:
    """`["zero_stage=3"]` as knob and text; a text with commas is a domain.

    Raises:
        SpaceFormatError: a text is no KNOB=VALUE, or a knob comes twice.
        UnknownNameError: a knob does not exist.
        KnobValueError: a value is not in its domain.
    """
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise SpaceFormatError(text, "is no KNOB=VALUE", "write for example zero_stage=3 or zero_stage=2,3")
        parse_domain(knob(name).name, value)
        if name in pins:
            raise SpaceFormatError(name, "is set twice", f"write {name}={pins[name]},{value} to search both")
        pins[name] = value
    return pins


def resolve_space(
    text: str,
    model: Model,
    cluster: ClusterSpec,
    workload: Workload,
    capability: Capability | None = None,
    pins: Mapping[str, Pin] | None = None,
    base: TrialConfig | None = None,
    most_steps: int | None = None,
    layouts: Callable[[SearchSpace], Sequence[str]] | None = None,
) -> SearchSpace:
    """The space that `text` names, a preset or the path of a TOML file, with the pinned knobs fixed or given a domain.

    `base` holds the values of the knobs that are not searched; without it they are `device_defaults`, but blocks are not
    compiled: what is asked of a space without a job are plans, whose equations do not look at that. A knob of a preset of
    whose values the engine honours none is not searched; one that the user names is, and refused. Where `base` has compiled
    blocks, the space has others too, for what else is in it may exclude compiled ones. `layouts` proposes what
    `pipeline_layout` may be where it is written as `solved`; without it nothing is proposed.

    Raises:
        UnknownNameError: there is no such preset or knob.
        SpaceFormatError: the file cannot be read, or names an unknown knob or a bad value.
        KnobValueError: a pin's value is not in its knob's domain.
        IllegalConfigError: the pins leave nothing legal, or nothing here is trained on the workload's documents; the message
            names the rule.
        SpaceTooLargeError: finding that out takes more than `most_steps`.
    """
    context = SpaceContext(
        model=model, cluster=cluster, workload=workload, world_size=cluster.world_size, capability=capability
    )
    require_documents(context)
    written, named = _written_domains(text, context)
    pinned = {name: parse_domain(name, pin) if isinstance(pin, str) else pin for name, pin in (pins or {}).items()}
    rest = base or device_defaults(cluster, capability, model).replace({COMPILED: False})
    by_default = rest.compile_blocks and COMPILED not in written | pinned
    if by_default:
        written[COMPILED] = (True, False)

    def space(domains: Mapping[str, Any]) -> SearchSpace:
        resolved = resolve_domains(domains, context)
        asked = named | set(pinned)
        turned = {name: values for name, values in resolved.items() if name in asked or _turns(name, values, capability)}
        turned = {name: values if name in asked else _reached(name, values, context) for name, values in turned.items()}
        return SearchSpace(
            model=model, cluster=cluster, workload=workload, world_size=cluster.world_size, capability=capability,
            base=rest, domains=turned, name=text,
            most_steps=most_steps,
        )  # fmt: skip

    answer = space(written | pinned)
    if pinned and answer.is_empty() and not space(written).is_empty():
        # Of what excludes compiled blocks nobody has asked for those: another rule refuses the rest.
        raise _pins_refused(replace(answer, domains={**answer.domains, COMPILED: (False,)}) if by_default else answer, pinned)
    if layouts is not None and (written | pinned).get("pipeline_layout") == SOLVED and "pipeline_layout" in answer.domains:
        return replace(answer, domains={**answer.domains, "pipeline_layout": ("", *layouts(answer))})
    return answer


def _turns(name: str, values: Iterable[Value], capability: Capability | None) -> bool:
    return capability is None or any(capability.honours(name, value) for value in values)


def _reached(name: str, values: Sequence[Value], context: SpaceContext) -> tuple[Value, ...]:
    """Without files, where no folder is named for them, and without kernels that are not known to run there."""
    if name == FUSED_KERNELS:
        cluster = context.cluster
        return tuple(value for value in values if runs_on(str(value), cluster.device.kind, cluster.kernel_packages))
    return tuple(value for value in values if value != "nvme" or context.workload.nvme_path is not None)


def _pins_refused(space: SearchSpace, pinned: Mapping[str, Any]) -> IllegalConfigError:
    """Why nothing is left: the rule that refuses most among those that read a pinned knob.

    What no engine could do is told before what this engine does not.
    """
    census, rules = space.census(), {rule.name: rule for rule in rules_of(space.capability)}
    reading = [name for name in census.refused if set(rules[name].reads) & set(pinned)]
    own = [name for name in reading if name != HONOURS.name]
    rule = rules[(own or reading or list(census.refused))[0]]
    example = space.refused_example(rule.name)
    if rule is HONOURS and example is not None:
        further = [rules[refusal.rule] for refusal in check_config(example, space.context)]
        rule = next((other for other in further if other is not rule and set(other.reads) & set(pinned)), rule)
    message = rule.check(example, space.context) if example else None
    said = ", ".join(f"{name}={_pin_text(value)}" for name, value in pinned.items() if name in rule.reads)
    return IllegalConfigError(rule.name, f"with {said}, {message}" if said else str(message), rule.remedy)


def _pin_text(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _written_domains(text: str, context: SpaceContext) -> tuple[dict[str, Any], set[str]]:
    """The domains of a preset or a file, those that it extends first; and the knobs that the file itself names."""
    presets = preset_tables("spaces")
    if text in presets:
        return _preset_domains(text), set()
    path = Path(text).expanduser()
    if not (path.exists() or path.suffix == ".toml" or "/" in text):
        raise unknown_name("space preset", text, presets, "or give the path of a TOML file")
    table = _read(path)
    _check_file(path, table, context)
    return _collected(table), set(table.get("domains", {}))


def _collected(table: Mapping[str, Any]) -> dict[str, Any]:
    domains: dict[str, Any] = {}
    for name in table.get("extends", ()):
        domains |= _preset_domains(name)
    return domains | dict(table.get("domains", {}))


def _preset_domains(name: str) -> dict[str, Any]:
    """The domains of a preset: those of the presets that it extends, and what the knobs declare for it."""
    return _collected(preset_tables("spaces")[name]) | {
        knob.name: list(written) if isinstance(written := knob.spaces[name], tuple) else written
        for knob in KNOBS.values()
        if name in knob.spaces
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise SpaceFormatError(
            str(path), reason, f"give the path of a TOML file, or {', '.join(space_preset_names())}"
        ) from None
    except ValueError as error:
        if other := mistaken(path, SPACE_FILE):
            raise SpaceFormatError(str(path), other, f"give a TOML file, or {', '.join(space_preset_names())}") from None
        raise SpaceFormatError(str(path), f"is not TOML ({error})", "correct the file") from None


def _check_file(path: Path, table: Mapping[str, Any], context: SpaceContext) -> None:
    """Everything that can be wrong with a user's file, told with the file's name and the knob's."""
    presets = space_preset_names()
    unknown = set(table) - {"description", "extends", "domains"}
    if unknown and (other := mistaken(path, SPACE_FILE)):
        raise SpaceFormatError(str(path), other, f"give a TOML file of a space, or {', '.join(presets)}")
    if unknown:
        name = min(unknown)
        raise SpaceFormatError(f"{path}: {name}", "is no key of a space", "use description, extends and [domains]")
    extends, domains = table.get("extends", []), table.get("domains", {})
    if not isinstance(extends, list) or not set(map(str, extends)) <= set(presets):
        raise SpaceFormatError(f"{path}: extends", f"{extends!r} is no list of spaces", f"list some of {', '.join(presets)}")
    if not isinstance(domains, Mapping):
        raise SpaceFormatError(f"{path}: domains", "is no table", "write [domains] and a line for each knob")
    for name, written in domains.items():
        _check_domain(path, name, written, context)


def _check_domain(path: Path, name: str, written: Any, context: SpaceContext) -> None:
    if isinstance(written, str) and name in KNOBS and not KNOBS[name].choices and written not in EXPRESSIONS:
        raise SpaceFormatError(
            f"{path}: {name}", f"{written!r} is no expression", f"list values, or write {', '.join(EXPRESSIONS)}"
        )
    try:
        resolve_domains({name: written}, context)
    except SearchSpaceError as error:
        raise SpaceFormatError(f"{path}: {name}", error.problem, error.remedy) from None
