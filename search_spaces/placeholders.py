"""What `{…}` in the words of a user's command stands for, and which knobs the command can turn by it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import ModelFormatError
from search_spaces.knob import Kind, Value
from search_spaces.knob_values import KNOBS, parse_value, value_text
from search_spaces.models.command import CommandModel, variant_values
from search_spaces.preset_files import unknown_name
from search_spaces.trial import Workload
from search_spaces.trial_config import KNOB_NAMES, SCRIPT, TrialConfig

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
"""`{{word}}` is the text `{word}` itself. Other braces, as in JSON, are left alone."""
_CONDITION = re.compile(r"\{([A-Za-z_]\w*)=([^:{}]*):(.+)\}")
"""`{knob=value:word}`: the word where the knob has the value, and none where it has another. For flags that take no value."""

FILES: Mapping[str, str] = {"config": "config.json", "accelerate": "accelerate.yaml"}
"""Placeholder -> the file that is rendered for each trial, and whose path it stands for."""

Derived = Callable[[TrialConfig, Workload, int], Value]

DERIVED: Mapping[str, Derived] = {
    "gradient_accumulation_steps": lambda config, work, ranks: config.gradient_accumulation_steps(
        work.global_batch_size, ranks
    ),
    "data_parallel_size": lambda config, _, ranks: config.data_parallel_size(ranks),
    "global_batch_size": lambda _, work, __: work.global_batch_size,
    "sequence_length": lambda _, work, __: work.sequence_length,
    "world_size": lambda _, __, ranks: ranks,
    "seed": lambda _, work, __: work.seed,
    "bf16": lambda config, _, __: config.precision == "bf16",
    "fp16": lambda config, _, __: config.precision == "fp16",
    "gradient_checkpointing": lambda config, _, __: config.activation_checkpointing != "none",
}
"""Placeholders that follow from the configuration, the workload and the number of ranks."""
SWITCHES: Mapping[str, tuple[str, tuple[Value, ...]]] = {
    "bf16": ("precision", ("fp32", "bf16")),
    "fp16": ("precision", ("fp32", "fp16")),
    "gradient_checkpointing": ("activation_checkpointing", ("none", "full")),
}
"""Placeholders that are true or false -> the knob that they turn, and its values that they tell apart."""
UNWRITTEN = frozenset({SCRIPT, ENVIRONMENT})
"""Knobs that no placeholder stands for: the script's own have names of their own, and its environment reaches it anyway."""
TELLS_BATCH = frozenset({"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "config"})
"""Placeholders by which a script learns how large a batch is."""


def names_in(words: Iterable[str]) -> tuple[str, ...]:
    """The placeholders of a command, each once."""
    return tuple(dict.fromkeys(match[2] for word in words for match in _PLACEHOLDER.finditer(word) if match[2]))


def conditions_in(words: Iterable[str]) -> list[tuple[str, str]]:
    """Knob and value of each word that depends on one."""
    return [(match[1], match[2]) for match in map(_CONDITION.fullmatch, words) if match]


def require_known(command: CommandModel) -> None:
    """Refuse a placeholder that stands for nothing, and a script's own knob that has no place in the command.

    Raises:
        UnknownNameError: a placeholder is not known; the line names the nearest.
        KnobValueError: a word depends on a value that its knob cannot have.
        ModelFormatError: a knob of the script's own has the name of another placeholder, or none in the command, or not the
            value that a word depends on.
    """
    used, built_in = names_in(command.arguments), {*KNOB_NAMES, *DERIVED, *FILES} - UNWRITTEN
    conditions = conditions_in(command.arguments)
    for name, value in conditions:
        _require_value(command, name, value)
    for name in command.script_knobs:
        if name in built_in:
            raise ModelFormatError(f"command.script_knobs.{name}", "is a placeholder already", "give it another name")
        if name not in {*used, *(own for own, _ in conditions)}:
            problem = f"the command has no {{{name}}}"
            raise ModelFormatError(f"command.script_knobs.{name}", problem, "write it where the value belongs")
    for name in used:
        if name not in built_in and name not in command.script_knobs:
            known = sorted({*built_in, *command.script_knobs})
            raise unknown_name("placeholder", f"{{{name}}}", known, f"{{{{{name}}}}} is the text itself")


def _require_value(command: CommandModel, name: str, text: str) -> None:
    if name in command.script_knobs:
        if text not in command.script_knobs[name]:
            problem = f"has no value {text!r}, on which a word of the command depends"
            raise ModelFormatError(f"command.script_knobs.{name}", problem, "give it that value, or correct the word")
    elif name not in KNOBS or name in UNWRITTEN:
        known = sorted({*KNOB_NAMES, *command.script_knobs} - UNWRITTEN)
        raise unknown_name("placeholder", f"{{{name}={text}:…}}", known, "a word can depend on any knob")
    else:
        parse_value(name, text)


def turned_by(command: CommandModel) -> dict[str, tuple[Value, ...] | None]:
    """Knob -> its values that the words of the command tell apart; None: all."""
    used = names_in(command.arguments)
    told: dict[str, tuple[Value, ...]] = {}
    for knob, values in [*(SWITCHES[name] for name in used if name in SWITCHES), *_told_by_conditions(command)]:
        told[knob] = tuple(dict.fromkeys((*told.get(knob, ()), *values)))
    turned: dict[str, tuple[Value, ...] | None] = {**told, **{name: None for name in used if name in KNOB_NAMES}}
    return turned | ({SCRIPT: command.variants} if command.variants else {})


def _told_by_conditions(command: CommandModel) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Each knob on which words depend, with the values that they name and one other: the default, or a switch's."""
    named: dict[str, list[Value]] = {}
    for name, text in conditions_in(command.arguments):
        if name in KNOBS:
            named.setdefault(name, []).append(parse_value(name, text))
    for name, values in named.items():
        knob = KNOBS[name]
        others = knob.choices if knob.kind is Kind.BOOL else ()
        yield name, tuple(dict.fromkeys((knob.default, *values, *others)))


def words_of(
    command: CommandModel, config: TrialConfig, workload: Workload, world_size: int, paths: Mapping[str, str]
) -> tuple[str, ...]:
    """The command with every placeholder filled in.

    Args:
        command: the user's.
        config: the trial's.
        workload: the job's.
        world_size: ranks of a trial.
        paths: placeholder of `FILES` -> where that file lies.
    """
    values: dict[str, Value] = {**config.every_value(), **variant_values(config.script), **paths}

    def filled(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        name = match[2]
        return value_text(DERIVED[name](config, workload, world_size) if name in DERIVED else values[name])

    return tuple(_PLACEHOLDER.sub(filled, word) for word in _chosen(command.arguments, values))


def _chosen(words: Iterable[str], values: Mapping[str, Value]) -> Iterator[str]:
    """The words but for those that depend on another value."""
    for word in words:
        condition = _CONDITION.fullmatch(word)
        if condition is None:
            yield word
        elif value_text(values[condition[1]]) == _spelled(condition[1], condition[2]):
            yield condition[3]


def _spelled(name: str, text: str) -> str:
    """The value of a condition as values are written: `True` is `true`."""
    return value_text(parse_value(name, text)) if name in KNOBS else text


def environment_of(command: CommandModel, config: TrialConfig) -> dict[str, str]:
    """The environment variables that the configuration sets."""
    values = variant_values(config.script)
    return {name: values[name] for name in command.environment_knobs if name in values}


def files_read(command: CommandModel) -> list[str]:
    """The placeholders of the files that the script reads, or its launcher on its behalf."""
    used = [name for name in names_in(command.arguments) if name in FILES]
    return used + (["config"] if command.plugin == "deepspeed" and "config" not in used else [])
