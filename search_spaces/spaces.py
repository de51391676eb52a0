"""Spaces by name, from a user's file, and with pins (KNOB=VALUE)."""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.capability import Capability, SpaceContext
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import IllegalConfigError, SearchSpaceError, SpaceFormatError
from search_spaces.file_kinds import SPACE_FILE, mistaken
from search_spaces.kernels import FUSED_KERNELS, runs_on
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, knob
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec, block_parameters
from search_spaces.preset_files import preset_tables, unknown_name
from search_spaces.rules.table import HONOURS, check_config, rules_of
from search_spaces.rules.training import DOCUMENT_RULES
from search_spaces.space import EXPRESSIONS, SOLVED, SearchSpace, parse_domain, resolve_domains
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

COMPILED = "compile_blocks"
Pin = str | Value | Sequence[Value]
"""The text of a pin (`3`, `1,2,4`, `powers_of_two`), a value, or several."""


def space_preset_names() -> tuple[str, ...]:
    """The preset names that `resolve_space` accepts."""
    return tuple(preset_tables("spaces"))


CUDA_DEFAULTS: Mapping[str, Value] = {knob.name: knob.on_cuda for knob in KNOBS.values() if knob.on_cuda is not None}
"""Defaults on CUDA devices that differ from TrialConfig's."""


def device_defaults(cluster: ClusterSpec, capability: Capability | None = None, model: Model | None = None) -> TrialConfig:
    """Every knob at its default on this cluster: on CUDA bf16 if the GPU supports it, expandable segments and, for our own
    models, compiled blocks. Whether a user's `model` compiles is unknown before it is tried. One that is not all in fp32 keeps
    its types. At stage 3 at least one block is prefetched, next to one in use; not one of
    experts, which ranks usually divide.

    If the engine does not honour such a value, the knob has TrialConfig's default; if the engine does not honour that either,
    the first value that the engine lists.
    """
    device = cluster.device
    defaults = dict(CUDA_DEFAULTS) if device.kind == "cuda" else {}
    if not device.supports("bf16"):
        defaults.pop("precision", None)
    if isinstance(model, FactoryModel | CommandModel):
        defaults.pop(COMPILED, None)
    if isinstance(model, FactoryModel) and model.default_precision:
        defaults["precision"] = model.default_precision
    standard, block = TrialConfig(), 0 if isinstance(model, ModelSpec) and model.num_experts else block_parameters(model)
    defaults["prefetch_bucket_size"] = max(standard.prefetch_bucket_size, block)
    defaults["max_live_parameters"] = max(standard.max_live_parameters, 2 * block)
    honoured = {name: value for name, value in defaults.items() if capability is None or capability.honours(name, value)}
    return standard.replace({**(capability.starting_values() if capability else {}), **honoured})


def settled(config: TrialConfig, context: SpaceContext, explicit: Collection[str] = ()) -> TrialConfig:
    """`config` without compiled blocks if something else in it excludes them and they were not requested explicitly."""
    if COMPILED in explicit or not config.compile_blocks:
        return config
    readers = {rule.name for rule in rules_of(context.capability) if COMPILED in rule.reads and rule is not HONOURS}
    excluded = any(refusal.rule in readers for refusal in check_config(config, context))
    return config.replace({COMPILED: False}) if excluded else config


def parse_pins(texts: Iterable[str]) -> dict[str, str]:
    """Parse `["zero_stage=3"]` to knob and text; a text with commas is a domain.

    Raises:
        SpaceFormatError: a text is not KNOB=VALUE, or a knob is repeated.
        UnknownNameError: a knob does not exist.
        KnobValueError: a value is not in its domain.
    """
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise SpaceFormatError(text, "is not KNOB=VALUE", "write for example zero_stage=3 or zero_stage=2,3")
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
    """The space that `text` names, a preset or the path of a TOML file, with pinned knobs set to a value or domain.

    `base` has the values of the knobs that are not searched; by default `device_defaults` without compiled blocks, because
    spaces without a job are used for plans, whose order compilation hardly changes. A preset's knob is not searched if the
    engine honours none of its values; a knob that the user names is searched, and refused. If `base` has compiled blocks, the
    space includes uncompiled blocks too, because other values may exclude compiled ones. `layouts` proposes values of
    `pipeline_layout` if its domain is `solved`; without it nothing is proposed.

    Raises:
        UnknownNameError: there is no such preset or knob.
        SpaceFormatError: the file cannot be read, or names an unknown knob or a bad value.
        KnobValueError: a pin's value is not in its knob's domain.
        IllegalConfigError: the pins leave no legal configuration, or the workload's documents are not supported; the message
            names the rule.
        SpaceTooLargeError: determining that takes more than `most_steps`.
    """
    context = SpaceContext(
        model=model, cluster=cluster, workload=workload, world_size=cluster.world_size, capability=capability
    )
    for rule in DOCUMENT_RULES:
        if (message := rule.check(TrialConfig(), context)) is not None:
            raise IllegalConfigError(rule.name, message, rule.remedy, ("document_lengths",))
    written, explicit_names = _written_domains(text, context)
    pinned = {name: parse_domain(name, pin) if isinstance(pin, str) else pin for name, pin in (pins or {}).items()}
    base_config = base or device_defaults(cluster, capability, model).replace({COMPILED: False})
    by_default = base_config.compile_blocks and COMPILED not in written | pinned
    if by_default:
        written[COMPILED] = (True, False)

    def space(domains: Mapping[str, Any]) -> SearchSpace:
        resolved = resolve_domains(domains, context)
        explicit = explicit_names | set(pinned)
        searched = {
            name: values if name in explicit else _available_values(name, values, context)
            for name, values in resolved.items()
            if name in explicit or capability is None or any(capability.honours(name, value) for value in values)
        }
        return SearchSpace(
            model=model, cluster=cluster, workload=workload, world_size=cluster.world_size, capability=capability,
            base=base_config, domains=searched, name=text,
            most_steps=most_steps,
        )  # fmt: skip

    answer = space(written | pinned)
    if pinned and answer.is_empty() and not space(written).is_empty():
        # Compiled blocks were not requested, so the message must not name what excludes them: another rule refuses the rest.
        raise _pins_refused(replace(answer, domains={**answer.domains, COMPILED: (False,)}) if by_default else answer, pinned)
    if layouts is not None and (written | pinned).get("pipeline_layout") == SOLVED and "pipeline_layout" in answer.domains:
        return replace(answer, domains={**answer.domains, "pipeline_layout": ("", *layouts(answer))})
    return answer


def _available_values(name: str, values: Sequence[Value], context: SpaceContext) -> tuple[Value, ...]:
    """The values without files if no folder is given for them, and without kernels that are not known to run there."""
    if name == FUSED_KERNELS:
        cluster = context.cluster
        return tuple(value for value in values if runs_on(str(value), cluster.device.kind, cluster.kernel_packages))
    return tuple(value for value in values if value != "nvme" or context.workload.nvme_path is not None)


def _pins_refused(space: SearchSpace, pinned: Mapping[str, Any]) -> IllegalConfigError:
    """Why no configuration is left: the rule that refuses the most among those that read a pinned knob.

    Rules of all engines take precedence over the values that this engine does not honour.
    """
    census, rules = space.census(), {rule.name: rule for rule in rules_of(space.capability)}
    reading = [name for name in census.refused if set(rules[name].reads) & set(pinned)]
    general_rules = [name for name in reading if name != HONOURS.name]
    rule = rules[(general_rules or reading or list(census.refused))[0]]
    example = space.refused_example(rule.name)
    if rule is HONOURS and example is not None:
        further = [rules[refusal.rule] for refusal in check_config(example, space.context)]
        rule = next((other for other in further if other is not rule and set(other.reads) & set(pinned)), rule)
    message = rule.check(example, space.context) if example else None
    values = {name: value if isinstance(value, list | tuple) else [value] for name, value in pinned.items()}
    read = [name for name in pinned if name in rule.reads]
    pins = ", ".join(f"{name}={','.join(map(str, values[name]))}" for name in read)
    fields = map("pins.{}".format, read or pinned)
    return IllegalConfigError(rule.name, f"with {pins}, {message}" if pins else str(message), rule.remedy, fields)


def _written_domains(text: str, context: SpaceContext) -> tuple[dict[str, Any], set[str]]:
    """The domains of a preset or a file, those of extended presets first, and the knobs named in the file itself."""
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
    """The domains of a preset: those of the presets that it extends, and the domains that knobs declare for it."""
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
    """Check a user's file. Errors name the file and the knob."""
    presets = space_preset_names()
    unknown = set(table) - {"description", "extends", "domains"}
    if unknown and (other := mistaken(path, SPACE_FILE)):
        raise SpaceFormatError(str(path), other, f"give a TOML file of a space, or {', '.join(presets)}")
    if unknown:
        name = min(unknown)
        raise SpaceFormatError(f"{path}: {name}", "is not a key of a space", "use description, extends and [domains]")
    extends, domains = table.get("extends", []), table.get("domains", {})
    if not isinstance(extends, list) or not set(map(str, extends)) <= set(presets):
        raise SpaceFormatError(f"{path}: extends", f"{extends!r} is not a list of spaces", f"list some of {', '.join(presets)}")
    if not isinstance(domains, Mapping):
        raise SpaceFormatError(f"{path}: domains", "is not a table", "write [domains] and a line for each knob")
    for name, written in domains.items():
        _check_domain(path, name, written, context)


def _check_domain(path: Path, name: str, written: Any, context: SpaceContext) -> None:
    if isinstance(written, str) and name in KNOBS and not KNOBS[name].choices and written not in EXPRESSIONS:
        raise SpaceFormatError(
            f"{path}: {name}", f"{written!r} is not an expression", f"list values, or write {', '.join(EXPRESSIONS)}"
        )
    try:
        resolve_domains({name: written}, context)
    except SearchSpaceError as error:
        raise SpaceFormatError(f"{path}: {name}", error.problem, error.remedy) from None
