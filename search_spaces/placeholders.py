"""Placeholders `{…}` in the words of a user's command, and the knobs that the command can set with them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import ModelFormatError
from search_spaces.knob import Value, ValueKind
from search_spaces.knob_values import KNOBS, parse_value, value_text
from search_spaces.models.command import CommandModel, variant_values
from search_spaces.preset_files import unknown_name
from search_spaces.trial import Workload
from search_spaces.trial_config import KNOB_NAMES, SCRIPT, TrialConfig

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
"""`{{word}}` is the literal text `{word}`. Other braces, as in JSON, are left unchanged."""
_CONDITION = re.compile(r"\{([A-Za-z_]\w*)=([^:{}]*):(.+)\}")
"""`{knob=value:word}`: the word if the knob has the value, otherwise nothing. For flags without a value."""

FILES: Mapping[str, str] = {"config": "config.json", "accelerate": "accelerate.yaml"}
"""Placeholder -> the file that is rendered for each trial; the placeholder stands for its path."""

TRIAL_FOLDER = "trial_folder"
"""The placeholder of a folder of the trial's own, which is removed when the trial ends."""


DERIVED: Mapping[str, Callable[[TrialConfig, Workload, int], Value]] = {
    "gradient_accumulation_steps": lambda config, work, ranks: config.gradient_accumulation_steps(
        work.global_batch_size, ranks
    ),
    "total_gradient_accumulation_steps": lambda config, work, _: work.global_batch_size // config.micro_batch_size,
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
"""Boolean placeholder -> the knob that it sets, and the knob's values for false and true."""
WITHOUT_PLACEHOLDER = frozenset({SCRIPT, ENVIRONMENT})
"""Knobs without a placeholder: the script's own knobs have their own names, and its environment is set anyway."""
ACCUMULATION_PLACEHOLDERS = frozenset({
    "gradient_accumulation_steps", "total_gradient_accumulation_steps", "global_batch_size", "config",
})  # fmt: skip
"""Placeholders from which a script knows how many micro-batches a step has."""


_LITERAL_BATCH = re.compile(r"--(?:global|total)[-_]batch[-_]size[ =](\d+)")


def names_in(words: Iterable[str]) -> tuple[str, ...]:
    """The distinct placeholders of a command."""
    return tuple(dict.fromkeys(match[2] for word in words for match in _PLACEHOLDER.finditer(word) if match[2]))


def conditions_in(words: Iterable[str]) -> list[tuple[str, str]]:
    """Knob and value of each conditional word."""
    return [(match[1], match[2]) for match in map(_CONDITION.fullmatch, words) if match]


def require_known(command: CommandModel) -> None:
    """Refuse unknown placeholders, and script knobs that the command does not use.

    Raises:
        UnknownNameError: a placeholder is unknown; the message names the closest.
        KnobValueError: a word depends on a value that its knob cannot have.
        ModelFormatError: a script knob has the name of another placeholder, does not occur in the command, or lacks the value
            that a word depends on.
    """
    used, built_in = names_in(command.arguments), {*KNOB_NAMES, *DERIVED, *FILES, TRIAL_FOLDER} - WITHOUT_PLACEHOLDER
    conditions = conditions_in(command.arguments)
    for name, value in conditions:
        _require_value(command, name, value)
    for name in command.script_knobs:
        if name in built_in:
            raise ModelFormatError(f"command.script_knobs.{name}", "is a placeholder already", "give it another name")
        if name not in {*used, *(condition_name for condition_name, _ in conditions)}:
            problem = f"the command has no {{{name}}}"
            raise ModelFormatError(f"command.script_knobs.{name}", problem, "write it where the value belongs")
    for name in used:
        if name not in built_in and name not in command.script_knobs:
            placeholders = sorted({*built_in, *command.script_knobs})
            raise unknown_name("placeholder", f"{{{name}}}", placeholders, f"{{{{{name}}}}} is the text itself")


def _require_value(command: CommandModel, name: str, text: str) -> None:
    if name in command.script_knobs:
        if text not in command.script_knobs[name]:
            problem = f"has no value {text!r}, on which a word of the command depends"
            raise ModelFormatError(f"command.script_knobs.{name}", problem, "give it that value, or correct the word")
    elif name not in KNOBS or name in WITHOUT_PLACEHOLDER:
        placeholders = sorted({*KNOB_NAMES, *command.script_knobs} - WITHOUT_PLACEHOLDER)
        raise unknown_name("placeholder", f"{{{name}={text}:…}}", placeholders, "a word can depend on any knob")
    else:
        parse_value(name, text)


def expressible_values(command: CommandModel) -> dict[str, tuple[Value, ...] | None]:
    """Knob -> its values that the command can express; None: all."""
    used = names_in(command.arguments)
    distinct: dict[str, tuple[Value, ...]] = {}
    for knob, values in [*(SWITCHES[name] for name in used if name in SWITCHES), *_values_in_conditions(command)]:
        distinct[knob] = tuple(dict.fromkeys((*distinct.get(knob, ()), *values)))
    expressible: dict[str, tuple[Value, ...] | None] = {**distinct, **{name: None for name in used if name in KNOB_NAMES}}
    return expressible | ({SCRIPT: command.variants} if command.variants else {})


def _values_in_conditions(command: CommandModel) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Each knob in conditional words, with the values in the conditions and its default (for a boolean, both values)."""
    condition_values: dict[str, list[Value]] = {}
    for name, text in conditions_in(command.arguments):
        if name in KNOBS:
            condition_values.setdefault(name, []).append(parse_value(name, text))
    for name, values in condition_values.items():
        knob = KNOBS[name]
        switch_values = knob.choices if knob.kind is ValueKind.BOOL else ()
        yield name, tuple(dict.fromkeys((knob.default, *values, *switch_values)))


def words_of(
    command: CommandModel, config: TrialConfig, workload: Workload, world_size: int, paths: Mapping[str, str]
) -> tuple[str, ...]:
    """The command with every placeholder filled in.

    Args:
        command: the user's command.
        config: the trial's configuration.
        workload: the job's workload.
        world_size: ranks of a trial.
        paths: placeholder of `FILES` -> path of that file; `TRIAL_FOLDER` -> that folder. In a launch it is `run`.
    """
    values: dict[str, Value] = {TRIAL_FOLDER: "run", **config.every_value(), **variant_values(config.script), **paths}

    def filled(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        name = match[2]
        return value_text(DERIVED[name](config, workload, world_size) if name in DERIVED else values[name])

    return tuple(_PLACEHOLDER.sub(filled, word) for word in _chosen(command.arguments, values))


def _chosen(words: Iterable[str], values: Mapping[str, Value]) -> Iterator[str]:
    """The words whose condition holds, and the unconditional ones."""
    for word in words:
        condition = _CONDITION.fullmatch(word)
        if condition is None:
            yield word
        else:
            name, text, conditional_word = condition.group(1, 2, 3)
            canonical = value_text(parse_value(name, text)) if name in KNOBS else text  # `True` is `true`
            if value_text(values[name]) == canonical:
                yield conditional_word


def environment_of(command: CommandModel, config: TrialConfig) -> dict[str, str]:
    """The environment variables that the configuration sets."""
    values = variant_values(config.script)
    return {name: values[name] for name in command.environment_knobs if name in values}


def is_trainer(command: CommandModel) -> bool:
    """Whether the command starts a Hugging Face Trainer, by its argument."""
    # The Trainer fills in the "auto" values of a DeepSpeed file, and refuses conflicting ones.
    return any(word.partition("=")[0] == "--per_device_train_batch_size" for word in command.arguments)


def stated_batch(command: CommandModel) -> int | None:
    """The samples per step that the command states (`--global-batch-size 256`); None: it states none."""
    literal = _LITERAL_BATCH.search(" ".join(command.arguments))
    return int(literal[1]) if literal else None


def follows_micro_batch(command: CommandModel) -> bool:
    """Whether the script receives the micro-batch size and no accumulation, so that a step has one micro-batch on each rank."""
    used = set(names_in(command.arguments))
    accumulates = used & ACCUMULATION_PLACEHOLDERS - ({"config"} if is_trainer(command) else set())
    literal = stated_batch(command) is not None
    return "micro_batch_size" in used and not accumulates and not literal and command.launcher != "accelerate"


def samples_of_step(command: CommandModel, config: TrialConfig, workload: Workload, world_size: int) -> int:
    """Samples that the script trains in an optimizer step, over all ranks, as far as its command says.

    A number in the command (`--gradient_accumulation_steps 4`, `--global-batch-size 256`) counts like a placeholder.
    """
    if (batch := stated_batch(command)) is not None:
        return batch
    if not follows_micro_batch(command):
        return workload.global_batch_size
    accumulation = re.search(r"--[\w-]*accum[\w-]*[ =]([1-9]\d*)", " ".join(command.arguments))
    return config.micro_batch_size * config.data_parallel_size(world_size) * (int(accumulation[1]) if accumulation else 1)


def files_read(command: CommandModel) -> list[str]:
    """The placeholders of the files that the script or its launcher reads."""
    used = [name for name in names_in(command.arguments) if name in FILES]
    return used + (["config"] if command.plugin == "deepspeed" and "config" not in used else [])
