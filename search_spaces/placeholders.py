"""Placeholders `{…}` in the words of a user's command, and the knobs that the command can set with them."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import ModelFormatError
from search_spaces.knob import Value, ValueKind
from search_spaces.knob_values import KNOBS, parse_value, value_text
from search_spaces.models.command import CommandModel, variant_values
from search_spaces.models.model import Model
from search_spaces.preset_files import unknown_name
from search_spaces.trial import Workload
from search_spaces.trial_config import KNOB_NAMES, SCRIPT, TrialConfig

_PLACEHOLDER = re.compile(r"\{\{([\w\s+*()/-]+)\}\}|\{((?:[(\d][(\d\s+*/-]*(?<=[\s(+*/-]))?[A-Za-z_][\w\s+*()/-]*)\}")
"""`{{word}}` is the literal text `{word}`. Other braces, as in JSON, are left unchanged."""
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
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
TEMPLATE = "template"
"""The placeholder of the path of the command's template, filled in for each trial."""
ACCUMULATION_PLACEHOLDERS = frozenset({
    "gradient_accumulation_steps", "total_gradient_accumulation_steps", "global_batch_size", "config",
})  # fmt: skip
"""Placeholders from which a script knows how many micro-batches a step has."""


_LITERAL_BATCH = re.compile(r"--(?:global|total)[-_]batch[-_]size[ =](\d+)")
MOST_SAMPLES = 100_000
"""Samples of a step up to which a number in a command is taken for them; larger ones are tokens (llm.c, nanochat)."""
_LITERAL_ACCUMULATION = re.compile(
    r"(?:^|\s)(?:--(?:[\w.-]*accum(?:ulat(?:e|ion))?(?:[-_](?:steps?|iters?|iterations|freq|grad[-_]batches))?"
    r"|update[-_]freq)[ =]"
    r"|[\w.]*accum(?:ulat(?:e|ion))?(?:_(?:steps?|iters?|iterations|freq|grad_batches))?=)([1-9]\d*)(?!\S)"
)
"""`--grad-accum 4`, `trainer.accumulate_grad_batches=4`, `--update-freq 4`; not `--log_accumulated_loss 50`."""


def names_in(command: CommandModel) -> tuple[str, ...]:
    """The distinct placeholders of a command and of its template."""
    texts = _expressions((*command.arguments, command.template))
    return tuple(dict.fromkeys(name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)))


def _expressions(words: Iterable[str]) -> Iterator[str]:
    """What stands between the braces of each placeholder: a name, or arithmetic with names."""
    return (match[2] for word in words for match in _PLACEHOLDER.finditer(word) if match[2])


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
    used, built_in = names_in(command), {*KNOB_NAMES, *DERIVED, *FILES, TRIAL_FOLDER, TEMPLATE} - WITHOUT_PLACEHOLDER
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
    if bool(command.template) != (TEMPLATE in used):
        remedy = "write {template} in it for the path" if command.template else "give the template's file (--template)"
        raise ModelFormatError("command.template", "a template and the placeholder {template} need each other", remedy)
    for text in _expressions((*command.arguments, command.template)):
        if not text.isidentifier():
            _evaluate(text, lambda name: _whole_number(command, name))


def _whole_number(command: CommandModel, name: str) -> int:
    """A whole number among the values of a placeholder."""
    is_whole = (name in DERIVED and name not in SWITCHES) or (name in KNOBS and KNOBS[name].kind is ValueKind.INT)
    if is_whole or all(value.isdecimal() for value in command.script_knobs.get(name, ("",))):
        return 1
    raise ModelFormatError("command.arguments", f"{name} is no whole number", "compute with numbers only")


def _evaluate(text: str, value_of: Callable[[str], int]) -> int:
    """The value of arithmetic with whole numbers.

    Raises:
        ModelFormatError: it has other operators, or divides by zero.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Name(id=name):
                return value_of(name)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise SyntaxError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        remedy = f"use whole numbers, +, -, *, // and parentheses, or {{{{{text}}}}} for the text itself"
        raise ModelFormatError("command.arguments", f"{{{text}}} cannot be computed", remedy) from None


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
    used = names_in(command)
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
        paths: placeholder of `FILES`, `TEMPLATE` -> path of that file; `TRIAL_FOLDER` -> that folder. In a launch it is `run`.
    """
    chosen = _chosen(command.arguments, {**config.every_value(), **variant_values(config.script)})
    return tuple(_filled(word, config, workload, world_size, paths) for word in chosen)


def template_of(
    command: CommandModel, config: TrialConfig, workload: Workload, world_size: int, paths: Mapping[str, str]
) -> str:
    """The template with every placeholder filled in; see `words_of`."""
    return _filled(command.template, config, workload, world_size, paths)


def _filled(text: str, config: TrialConfig, workload: Workload, world_size: int, paths: Mapping[str, str]) -> str:
    values: dict[str, Value] = {TRIAL_FOLDER: "run", **config.every_value(), **variant_values(config.script), **paths}

    def value_of(name: str) -> Value:
        return DERIVED[name](config, workload, world_size) if name in DERIVED else values[name]

    def filled(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2].isidentifier():
            return value_text(value_of(match[2]))
        return str(_evaluate(match[2], lambda name: int(value_of(name))))

    return _PLACEHOLDER.sub(filled, text)


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
    return int(literal[1]) if literal and int(literal[1]) <= MOST_SAMPLES else None


def follows_micro_batch(command: CommandModel) -> bool:
    """Whether the script receives the micro-batch size and no accumulation, so that a step has one micro-batch on each rank."""
    used = set(names_in(command))
    accumulates = used & ACCUMULATION_PLACEHOLDERS - ({"config"} if is_trainer(command) else set())
    literal = stated_batch(command) is not None
    return "micro_batch_size" in used and not accumulates and not literal and command.launcher != "accelerate"


def accelerate_accumulation(command: CommandModel, config: TrialConfig, global_batch_size: int, world_size: int) -> int:
    """Micro-batches of a step that Accelerate is told: its default, 1, if the script receives neither their size nor number."""
    receives = {"micro_batch_size", "gradient_accumulation_steps", *FILES} & set(names_in(command))
    return config.gradient_accumulation_steps(global_batch_size, world_size) if receives or command.plugin == "deepspeed" else 1


def samples_of_step(command: CommandModel, config: TrialConfig, workload: Workload, world_size: int) -> int:
    """Samples that the script trains in an optimizer step, over all ranks, as far as its command says.

    A number in the command (`--gradient_accumulation_steps 4`, `--global-batch-size 256`) counts like a placeholder.
    """
    if (batch := stated_batch(command)) is not None:
        return batch
    if not follows_micro_batch(command):
        return workload.global_batch_size
    accumulation = _LITERAL_ACCUMULATION.search(" ".join(command.arguments))
    return config.micro_batch_size * config.data_parallel_size(world_size) * (int(accumulation[1]) if accumulation else 1)


def launch_paths(command: CommandModel) -> dict[str, str]:
    """Placeholder -> name of its file in a launch."""
    return {**FILES, TEMPLATE: command.template_name}


def files_read(command: CommandModel) -> list[str]:
    """The placeholders of the files that the script or its launcher reads."""
    used = [name for name in names_in(command) if name in FILES]
    return used + (["config"] if command.plugin == "deepspeed" and "config" not in used else [])


def waiting_text(share: float, model: Model, prefix: str = "") -> str:
    """The message for a trial that waits for this share of its step; empty: too small to report.

    The remedy contains only what this command supports: the number of workers is searched only if the command passes one on.
    """
    if share <= 0.05:  # not worth a report
        return ""
    finding = f"{prefix}waits for data in {share:.0%} of the step, which no layout changes"
    script_knobs = (*model.script_knobs, *model.environment_knobs) if isinstance(model, CommandModel) else ()
    if workers := next((name for name in script_knobs if "worker" in name.lower()), None):
        return f"{finding}: search larger values of {workers}, or prepare samples beforehand"
    passed = "if a DataLoader loads them, pass it {num_workers} and search --script-knob num_workers=0,2,4"
    return f"{finding}: prepare samples beforehand, or {passed}"
