"""Reads the options of a launch script without running it: its assignments, conditions, loops and functions are carried out.

What the script decides when it runs stays undecided: its arguments, variables that nothing sets, outputs of commands, and what
differs between the branches of a condition that is not known.
"""

import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autotune.frameworks.shell_syntax import (
    AndOr,
    Commands,
    Conditional,
    Piped,
    Selection,
    ShellArithmetic,
    ShellCommand,
    ShellFunction,
    ShellGroup,
    ShellLoop,
    SimpleCommand,
    parse_commands,
)
from autotune.frameworks.shell_values import (
    ASSIGNMENT,
    BRANCH,
    COMPUTED,
    REFERENCE,
    ShellValue,
    ShellVariables,
    decided_by,
    is_open,
    is_unset,
    output_of,
    plain,
    reference,
)

LAUNCHER = "launcher."
"""Prefix of the launcher's own options, such as `launcher.nproc_per_node`."""
ENVIRONMENT = "env."
"""Prefix of exported variables."""
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
PROGRAM = re.compile(
    r".*\.py|(?:torchtitan|openrlhf|verl|xtuner)\.\S+|axolotl\.cli\.train|(?:.*/)?(?:llamafactory-cli|axolotl|trl|swift)"
)
"""The word after which options are the program's."""
LAUNCH = re.compile(r"(?:^|\s)(?:torchrun|accelerate|deepspeed|\S+\.py|torchtitan\.\S+|axolotl|trl|swift|llamafactory-cli)\s")
"""In a text that is a script of its own: an argument of `bash -c`, or a here-document."""
SLURM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",), "gpus": ("SLURM_GPUS",), "gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}  # fmt: skip
"""Option of sbatch -> the variables of the job that have its value [sbatch(1), output environment variables]."""
MOST_COMMANDS, MOST_ROUNDS, DEEPEST_CALL = 20_000, 256, 20
"""After so many commands loops end; a script may have five times as many."""


class ShellFlow(StrEnum):
    """How a command ends: normally, or by the command of this name."""

    NORMAL = "normal"
    CONTINUED = "continue"
    BROKEN = "break"
    RETURNED = "return"
    EXITED = "exited"


@dataclass(slots=True)
class Script:
    """What was read of a script."""

    settings: dict[str, Any] = field(default_factory=dict)
    """`--option` -> its value (True: it has none; several words are joined by spaces), `launcher.OPTION`, `env.NAME`."""
    words: list[str] = field(default_factory=list)
    """All words, with variables replaced."""
    open: dict[str, str] = field(default_factory=dict)
    """Option, or variable of further options, whose value is decided when the script runs -> what decides it."""
    sourced: list[str] = field(default_factory=list)
    """Files that the script sources and that are not there: they may set and export variables."""
    program: str = ""
    """The launched program: a file or a module; empty: there is none."""
    arguments: tuple[str, ...] = ()
    """The words after the program."""
    ranks: int | None = None
    """Tasks that srun starts as `#SBATCH` lines state, each a rank; None: not known, or a launcher starts further ones."""
    unused: tuple[str, ...] = ()
    """Stated variables and arguments that the script does not read, or sets itself."""
    stray: tuple[str, ...] = ()
    """Options that bash takes for a command, because a comment or a line without a backslash ends the launch before."""


def read_options(text: str, path: Path | None = None, stated: Mapping[str, str] | None = None) -> Script:
    """Read the launch with the most options in a script, or in a plain list of options.

    Args:
        text: the script.
        path: its file, beside which sourced files are looked for; None: none is read.
        stated: variables, and arguments by their numbers, with the user's values.

    Raises:
        RequestError: its values are too long.
        RecursionError: it is nested too deeply.
    """
    run = _ScriptRun(path, stated or {})
    run.take_sbatch(text)
    run.run(parse_commands(text.replace("\r\n", "\n")))
    script, variables = run.script, run.variables
    script.unused = tuple(name for name in run.variables.stated if name not in variables.read)
    launches = run.merged_launches()
    fragments = [list(value) if isinstance(value, tuple) else value.split() for value in variables.values.values()
                 if isinstance(value, str | tuple)]  # fmt: skip
    script.words += [word for words in fragments for word in words]
    for name in sorted(variables.exported):
        value = variables.values.get(name)
        if value is not None:
            _take_variable(script, name, value if isinstance(value, str) else " ".join(value))
    starting = sorted((words for words in launches if any(map(PROGRAM.fullmatch, words))), key=_options_in)
    options = [words for words in (*launches, *fragments) if _options_in(words)[0]]
    if starting and (_options_in(starting[-1])[0] or not options):
        chosen = starting[-1]
        script.stray = tuple(words[0] for words in launches if words[0].startswith("--"))
    else:  # arguments that another script, or a job that this one submits, launches
        lists = [words for words in options if words not in launches or words[0].startswith("--")]
        chosen = [word for words in lists or options for word in words]
    _options(chosen, script)
    before = list(itertools.takewhile(lambda word: not PROGRAM.fullmatch(word), chosen))
    tasks = str(variables.values.get("SLURM_NTASKS"))
    counted = any(word.startswith(("-n", "-N", "--ntasks", "--nodes")) for word in before)
    if "srun" in before and not counted and tasks.isdecimal() and not {Path(word).name for word in before} & {*LAUNCHERS}:
        script.ranks = int(tasks)
    return script


def _options_in(words: Sequence[str]) -> tuple[int, int]:
    """The number of options, and that of words."""
    return sum(word.startswith("--") for word in words), len(words)


class _ScriptRun:
    """Carries out a script, command by command."""

    def __init__(self, path: Path | None, stated: Mapping[str, str]) -> None:
        self.variables, self.script, self.path = ShellVariables(stated, self._output), Script(), path
        if path is not None:
            self.variables.values |= {"0": str(path), "BASH_SOURCE": (str(path),)}
        self._functions: dict[str, ShellCommand] = {}
        self._launches: dict[int, list[list[str]]] = {}
        """Command -> its words, at each time that it runs."""
        self._conditional: dict[int, bool] = {}
        """Launching command -> whether it may not run."""
        self._trees: dict[str, Commands] = {}
        self._before_launch: list[str] = []
        """Words of the command that runs this text."""
        self._truth: bool | None = True
        """Whether the last command succeeds; None: not known."""
        self._truth_before: bool | None = True
        """The same of the command before a simple one, while that is carried out."""
        self._empty = ""
        """The variable that the last test asked about, if it was whether it is empty."""
        self._locals: list[dict[str, ShellValue | None]] = []
        """Of each function that runs: its local variables, with their values outside."""
        self._commands = self._depth = self._doubt = self._ended_loops = 0

    def take_sbatch(self, text: str) -> None:
        """Set the variables that Slurm sets for the `#SBATCH` lines before the first command."""
        values: dict[str, str] = {}
        long_names = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                break
            words = re.sub(r"\s#.*|\([^)]*\)", "", line.removeprefix("#SBATCH")).split() if line.startswith("#SBATCH ") else []
            short = [re.sub(r"^-([NnGc])(?=\d|$)", lambda match: f"--{long_names[match[1]]}=", word) for word in words]
            values |= {name: str(value) for name, value in _pairs([word.removesuffix("=") for word in short])}
        for part in values.pop("--export", "").split(","):
            _take_environment(self.script, part, "#SBATCH --export")
        counts: dict[str, int] = {}
        for name in SLURM:  # a count may follow a type: `--gpus-per-node=h100:4`, `--gres=tmpdisk:9,gpu:h100:4`, `--gres=gpu`
            parts = [part for part in values.get(f"--{name}", "").split(",") if name != "gres" or part.startswith("gpu")]
            numbers = [re.sub(r"^(gpu|gpu:[A-Za-z]\w*)$", "1", part).rpartition(":")[2] for part in parts]
            if numbers and all(re.fullmatch(r"\d{1,9}", number) for number in numbers):
                counts[name] = sum(map(int, numbers))
        if "nodes" in counts and "ntasks-per-node" in counts:
            counts.setdefault("ntasks", counts["nodes"] * counts["ntasks-per-node"])
        for name, count in counts.items():
            for variable in SLURM[name]:
                self.variables.values.setdefault(variable, str(count))

    def run(self, commands: Sequence[ShellCommand]) -> ShellFlow:
        """Carry out commands one after the other."""
        for command in commands:
            self._commands += 1
            flow = self._command(command) if self._commands < 5 * MOST_COMMANDS else ShellFlow.EXITED
            if flow is not ShellFlow.NORMAL:
                return flow
        return ShellFlow.NORMAL

    def merged_launches(self) -> list[list[str]]:
        """The words of each command that has options. Where one of several may run, what differs is undecided."""
        launches = {key: _either_words(variants) for key, variants in self._launches.items()}
        by_program: dict[str, list[int]] = {}
        for key, words in launches.items():
            program = next((word for word in words if PROGRAM.fullmatch(word)), "")
            if self._conditional[key] and program:
                by_program.setdefault(program, []).append(key)
        for keys in by_program.values():
            words = _either_words([launches[key] for key in keys])
            for key in keys[1:]:
                del launches[key]
            launches[keys[0]] = words
        return list(launches.values())

    def _command(self, command: ShellCommand) -> ShellFlow:
        match command:
            case SimpleCommand():
                return self._simple(command)
            case ShellArithmetic(expression):
                value = self.variables.arithmetic(expression)
                self._truth = None if value is None else value != 0
                return ShellFlow.NORMAL
            case AndOr(commands):
                return self._and_or(commands)
            case Piped(commands, negated):
                for part in commands:
                    flow = self._subshell([part]) if len(commands) > 1 else self._command(part)
                self._truth = None if len(commands) > 1 else self._truth
                self._truth = not self._truth if negated and self._truth is not None else self._truth
                return ShellFlow.NORMAL if len(commands) > 1 else flow
            case Conditional(branches):
                return self._branches([(partial(self._condition, test), body) for test, body in branches])
            case Selection(subject, cases):
                text = self.variables.text(subject)
                return self._branches([(partial(self._fits, text, patterns), body) for patterns, body in cases])
            case ShellLoop():
                return self._loop(command)
            case ShellFunction(name, body):
                self._functions[name] = body
                return ShellFlow.NORMAL
            case ShellGroup(body, subshell):
                return self._subshell(body) if subshell else self.run(body)

    def _subshell(self, commands: Sequence[ShellCommand]) -> ShellFlow:
        before, arguments = dict(self.variables.values), self.variables.arguments
        self.run(commands)
        self.variables.values, self.variables.arguments = before, arguments
        return ShellFlow.NORMAL

    def _and_or(self, commands: Sequence[tuple[str, ShellCommand]]) -> ShellFlow:
        truth: bool | None = True
        for connective, command in commands:
            runs = True if not connective else truth if connective == "&&" or truth is None else not truth
            if runs is False:
                continue
            self._empty = "" if runs else self._empty
            flow = self._command(command) if runs else self._maybe([partial(self._command, command)], skipped=True)
            truth = self._truth if runs else None
            if flow is not ShellFlow.NORMAL:
                return flow
        self._truth = truth
        return ShellFlow.NORMAL

    def _condition(self, commands: Commands) -> bool | None:
        if not commands:
            return True
        self._empty = ""
        self.run(commands)
        return self._truth

    def _fits(self, text: str, patterns: Sequence[str]) -> bool | None:
        """Whether the word of a `case` has one of the patterns."""
        if "*" in patterns:
            return True
        texts = [self.variables.text(pattern) for pattern in patterns]
        if is_open(text) or any(map(is_open, texts)):
            return None
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in texts)

    def _branches(self, branches: Sequence[tuple[Callable[[], bool | None], Commands]]) -> ShellFlow:
        """Run the first branch that holds; of those that may hold, each one."""
        possible: list[Commands] = []
        asked, settled = "", False
        for holds, body in branches:
            truth = holds()
            asked = asked or (self._empty if not possible else "")
            if truth is not False:
                possible.append(body)
            if truth:
                settled = True
                break
        if settled and len(possible) == 1:
            return self.run(possible[0])
        self._empty = asked
        self._truth = None
        return self._maybe([partial(self.run, body) for body in possible], skipped=not settled)

    def _maybe(self, alternatives: Sequence[Callable[[], ShellFlow]], *, skipped: bool) -> ShellFlow:
        """Run alternatives of which one happens; `skipped`: or none. What differs after them is undecided.

        A first alternative for an empty variable states its default: it holds where the others leave the variable as it is.
        """
        before, asked = dict(self.variables.values), self._empty
        ends: list[dict[str, ShellValue]] = []
        self._doubt += 1
        self.variables.count(4 * len(before))
        for alternative in alternatives:
            self.variables.values = dict(before)
            if alternative() is not ShellFlow.EXITED:
                ends.append(self.variables.values)
        self._doubt -= 1
        if skipped:
            ends.append(before)
        self._empty = ""
        if not ends:
            return ShellFlow.EXITED
        merged = dict(before)
        for name in dict.fromkeys(name for end in ends for name in (*end, *before) if end.get(name) is not before.get(name)):
            values = [end.get(name) for end in ends]
            default = values[0] is not None and asked and all(value in (None, reference(asked)) for value in values[1:])
            if all(value == values[0] for value in values) or (default and (name == asked or None not in values)):
                merged.pop(name, None)
                if values[0] is not None:
                    merged[name] = values[0]
            else:
                merged[name] = _either(values)
                if name in self.variables.stated:
                    self.variables.set(name, BRANCH)
                    merged[name] = self.variables.values[name]
        self.variables.values = merged
        return ShellFlow.NORMAL

    def _loop(self, loop: ShellLoop) -> ShellFlow:
        if loop.name:
            fields = [field for word in loop.words for field in self.variables.fields(word)]
            if len(fields) > MOST_ROUNDS or any(map(is_open, fields)):
                self.variables.set(loop.name, BRANCH)
                return self._maybe([partial(self.run, loop.body)], skipped=True)
        before = dict(self.variables.values)
        for text in fields if loop.name else [""] * MOST_ROUNDS:
            if loop.name:
                self.variables.set(loop.name, text)
            elif (truth := self._condition(loop.condition)) is None:
                return self._maybe([partial(self.run, loop.body)], skipped=True)
            elif truth is loop.ends_when:
                return ShellFlow.NORMAL
            flow = self.run(loop.body)
            if flow in (ShellFlow.RETURNED, ShellFlow.EXITED):
                return flow
            if flow in (ShellFlow.BROKEN, ShellFlow.CONTINUED) and self._ended_loops > 1:
                self._ended_loops -= 1
                return flow
            if flow is ShellFlow.BROKEN:
                return ShellFlow.NORMAL
            if self._commands > MOST_COMMANDS:
                break
        else:
            if loop.name:
                return ShellFlow.NORMAL
        # Cut off: what its rounds change is not known.
        self.variables.values = before
        return self._maybe([partial(self.run, loop.body)], skipped=True)

    def _simple(self, command: SimpleCommand) -> ShellFlow:
        """Carry out a command without further ones in it."""
        words = list(command.words)
        assignments = list(itertools.takewhile(lambda word: ASSIGNMENT.fullmatch(word), words))
        words = words[len(assignments) :]
        if words and words[0] == "[[":
            self._truth = self._test([self.variables.text(word) for word in words[1:] if word != "]]"])
            return ShellFlow.NORMAL
        if words and words[0] in ("export", "declare", "local", "readonly", "typeset"):
            return self._declare(words)
        fields = [field for word in words for field in self.variables.fields(word)]
        self._truth_before, self._truth = self._truth, None if fields else True
        if fields[:1] == ["read"] and "-d" in fields and command.inputs:  # a here-document as a variable
            self.variables.set(fields[-1], self._document(*command.inputs[-1]))
            return ShellFlow.NORMAL
        if not fields:
            for word in assignments:
                self.variables.assign(word)
            if any("$(" in word or "`" in word for word in assignments):
                self._truth = None
            return ShellFlow.NORMAL
        flow = self._built_in(fields)
        if flow is not None:
            return flow
        if fields[0] in self._functions:
            return self._call(self._functions[fields[0]], fields[1:])
        temporary = [word.partition("=") for word in assignments]  # `NAME=value program`
        self._external(command, [f"{name}={self.variables.text(value)}" for name, _, value in temporary] + fields)
        return ShellFlow.NORMAL

    def _declare(self, words: Sequence[str]) -> ShellFlow:
        options = [word for word in words[1:] if word.startswith("-")]
        for word in words[1:]:
            match = ASSIGNMENT.fullmatch(word)
            name = match[1] if match else word
            if words[0] not in ("export", "readonly") and "-g" not in options and self._locals and name.isidentifier():
                self._locals[-1].setdefault(name, self.variables.values.get(name))
                if match is None:
                    self.variables.values[name] = () if "-a" in options else ""
            if "-A" in options and name.isidentifier():
                self.variables.values[name] = {}
            if match:
                self.variables.assign(word)
            if (words[0] == "export" or "-x" in options) and name.isidentifier():
                self.variables.exported.add(name)
        self._truth = True
        return ShellFlow.NORMAL

    def _built_in(self, fields: list[str]) -> ShellFlow | None:
        """Carry out a command of the shell itself; None: it is none."""
        variables, truth, self._truth = self.variables, self._truth_before, True
        match fields:
            case [":" | "true" | "echo" | "printf" | "cd" | "trap" | "ulimit" | "pushd" | "popd", *_]:
                self._truth = True
            case ["false"]:
                self._truth = False
            case ["[" | "test", *operands]:
                self._truth = self._test([word for word in operands if word != "]"], split=True)
            case ["source" | ".", name, *arguments]:
                return self._source(name, arguments)
            case ["eval", *parts]:
                return self.run(self._tree(" ".join(parts)))
            case ["exit", *_]:
                return ShellFlow.EXITED
            case ["return", *status]:
                self._truth = truth if not status else None if is_open(status[0]) else status[0] == "0"
                return ShellFlow.RETURNED
            case ["break" | "continue" as name, *count]:
                self._ended_loops = int(count[0]) if count and re.fullmatch(r"[1-9]", count[0]) else 1
                return ShellFlow(name)
            case ["shift", *count] if not count or count[0].isdecimal():
                steps = int(count[0]) if count else 1
                variables.shifted += steps if variables.arguments is None else 0
                variables.arguments = None if variables.arguments is None else variables.arguments[steps:]
            case ["shift", *_] if variables.arguments is not None:
                variables.arguments = (COMPUTED,) * len(variables.arguments)
            case ["set", *options]:
                if "--" in options:
                    variables.arguments = tuple(options[options.index("--") + 1 :])
            case ["unset", *names]:
                for name in names:
                    array, _, index = name.partition("[")
                    if index and isinstance(elements := variables.values.get(array), tuple):
                        position = variables.arithmetic(index.removesuffix("]")) if len(elements) > 1 else 0
                        remaining = [
                            element for number, element in enumerate(elements) if number != (position or 0) % len(elements)
                        ]
                        variables.values[array] = (BRANCH,) if position is None else tuple(remaining)
                    variables.values.pop(name, None)
            case ["read" | "mapfile" | "readarray" | "getopts", *names]:
                self._truth = None
                for name in [*names, *(["OPTARG"] if fields[0] == "getopts" else [])]:
                    if name.isidentifier():
                        variables.set(name, COMPUTED)
            case ["let", *expressions]:
                for expression in expressions:
                    variables.arithmetic(expression)
            case _:
                self._truth = None
                return None
        return ShellFlow.NORMAL

    def _call(self, body: ShellCommand, arguments: Sequence[str]) -> ShellFlow:
        variables = self.variables
        before, shifted = variables.arguments, variables.shifted
        if self._depth >= DEEPEST_CALL:
            return ShellFlow.NORMAL
        variables.arguments = None if arguments == [reference("@")] else tuple(arguments)
        self._depth += 1
        self._locals.append({})
        flow = self._command(body)
        self._depth -= 1
        values = {**variables.values, **self._locals.pop()}
        variables.values = {name: value for name, value in values.items() if value is not None}
        variables.arguments, variables.shifted = before, shifted
        return ShellFlow.EXITED if flow is ShellFlow.EXITED else ShellFlow.NORMAL

    def _source(self, name: str, arguments: Sequence[str]) -> ShellFlow:
        """Carry out a sourced file, if it is there: below the script's folder, or below the working directory."""
        tail = name.rpartition("\ue001")[2].lstrip("/") if name.startswith(COMPUTED) else name
        folders = [self.path.parent, Path()] if self.path is not None and tail and not is_open(tail) else []
        try:
            files = [(folder / tail).resolve() for folder in folders]
            inside = (file for file in files if any(file.is_relative_to(folder.resolve()) for folder in folders))
            file = next((file for file in inside if file.is_file()), None)
            text = file.read_text(encoding="utf-8") if file is not None and self._depth < DEEPEST_CALL else None
        except (OSError, ValueError):
            text = None
        if text is None:
            self.script.sourced.append(plain(name))
            self._truth = None
            return ShellFlow.NORMAL
        before = self.variables.arguments
        self.variables.arguments = tuple(arguments) or before
        self._depth += 1
        flow = self.run(self._tree(text))
        self._depth -= 1
        self.variables.arguments = before
        return ShellFlow.EXITED if flow is ShellFlow.EXITED else ShellFlow.NORMAL

    def _tree(self, text: str) -> Commands:
        if text not in self._trees:
            self.variables.count(4 * len(text))
            self._trees[text] = parse_commands(text)
        return self._trees[text]

    def _output(self, text: str) -> str:
        """The output of `$(text)`."""
        commands = self._tree(text)
        match commands:
            case (AndOr((("", SimpleCommand(("cd", folder))), ("&&", SimpleCommand(("pwd", *_))))),):
                return self.variables.text(folder)
            case (Piped((SimpleCommand(("echo", *expression)), SimpleCommand(("bc", *_)))),):
                return self.variables.computed(" ".join(map(self.variables.text, expression)))
            case (SimpleCommand(("expr", *expression)),):
                return self.variables.computed(" ".join(map(self.variables.text, expression)))
            case (SimpleCommand(("cat",), [document]),):
                return self._document(*document)
            case (SimpleCommand(words),):
                fields = [field for word in words for field in self.variables.fields(word)]
                output = output_of(fields)
                if fields[:1] != ["echo"] and any(map(is_open, fields)):
                    return "".join(map(reference, dict.fromkeys(REFERENCE.findall("".join(fields)))))
                return COMPUTED if output is None else output
            case _:
                return COMPUTED

    def _external(self, command: SimpleCommand, words: list[str]) -> None:
        """Take the words of a program, and the scripts among its arguments and its input."""
        shell = False
        for index, word in enumerate(words):
            if PROGRAM.fullmatch(word):
                break
            if (shell and re.fullmatch(r"-\w*c", words[index - 1])) or (
                index and not word.startswith("-") and LAUNCH.search(word)
            ):
                self._nested(word, words[:index])
                return
            shell = shell or word.rsplit("/", 1)[-1] in ("bash", "sh")
        for document in itertools.starmap(self._document, command.inputs):
            if LAUNCH.search(document):
                self.take_sbatch(document)
                self._nested(document, [])
        self.script.words += words
        if any(word.startswith("--") or PROGRAM.fullmatch(word) for word in words):
            self._launches.setdefault(id(command), []).append([*self._before_launch, *words])
            self._conditional[id(command)] = self._doubt > 0

    def _document(self, text: str, replaced: bool) -> str:
        """The text of a here-document; `replaced`: with the values of its variables."""
        return self.variables.text(text, quoted=True) if replaced else text

    def _nested(self, text: str, before: list[str]) -> None:
        """Carry out a text in a shell of its own, which has the exported variables."""
        if self._depth >= DEEPEST_CALL:
            return
        variables, prefix = self.variables, self._before_launch
        values, arguments = variables.values, variables.arguments
        variables.values = {
            name: value for name, value in values.items() if name in variables.exported or name.startswith("SLURM_")
        }
        self._before_launch = [*prefix, *before]
        self._depth += 1
        self.run(self._tree(text))
        self._depth -= 1
        variables.values, variables.arguments, self._before_launch = values, arguments, prefix

    def _test(self, words: Sequence[str], *, split: bool = False) -> bool | None:
        """Whether a test holds; None: it is not known. `split`: values are split at blanks, so that empty ones are no words."""
        for connectives, result in ((("||", "-o"), True), (("&&", "-a"), False)):
            for index, word in enumerate(words):
                if word in connectives and 0 < index < len(words) - 1:
                    sides = (self._test(words[:index], split=split), self._test(words[index + 1 :], split=split))
                    return result if result in sides else None if None in sides else not result
        comparisons: Mapping[str, Callable[[int, int], bool]] = {
            "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
            "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
        }  # fmt: skip
        match words:
            case ["!", *rest]:
                truth = self._test(rest, split=split)
                return None if truth is None else not truth
            case ["(", *rest, ")"]:
                return self._test(rest, split=split)
            case ["-z" | "-n" as sign, text]:
                self._empty = text[1:-1] if is_unset(text) and sign == "-z" else ""
                content = REFERENCE.sub("", text)
                return None if is_open(text) and not content else bool(content) is (sign == "-n")
            case ["-e" | "-f" | "-r" | "-s" | "-d", name] if self.path is not None and not is_open(name):
                return True if (self.path.parent / name).exists() else None
            case ["-z" | "-n" as sign]:
                return sign == "-z"
            case [text]:
                return None if is_open(text) else bool(text)
            case [text, "=" | "==" | "!=" as sign, pattern]:
                if is_open(text + pattern):
                    self._empty = text[1:-1] if is_unset(text) and not pattern and sign != "!=" else ""
                    return None
                return (text == pattern if split else fnmatch.fnmatchcase(text, pattern)) is (sign != "!=")
            case [text, "=~", pattern] if not is_open(text) and re.fullmatch(
                r"\^?[\w.-]*(\[[\w-]+\][+*]?)?[\w.-]*\$?", pattern
            ):
                return re.search(pattern, text[:1000]) is not None
            case [left, sign, right] if sign in comparisons:
                numbers = self.variables.arithmetic(left), self.variables.arithmetic(right)
                return None if None in numbers else comparisons[sign](*numbers)  # type: ignore[arg-type]
            case _:
                return None


def _either(values: Sequence[ShellValue | None]) -> ShellValue:
    """A variable that has one of several values: options that all of them state stay, what differs is undecided."""
    lists = [
        list(value) if isinstance(value, tuple) else (value or "").split() if isinstance(value, str | None) else []
        for value in values
    ]
    if any(isinstance(value, dict) for value in values) or not any(word.startswith("--") for words in lists for word in words):
        return (BRANCH,) if any(isinstance(value, tuple) for value in values) else BRANCH
    words = _either_words(lists)
    return tuple(words) if any(isinstance(value, tuple) for value in values) else " ".join(words)


def _either_words(lists: Sequence[list[str]]) -> list[str]:
    """The words of a launch that has one of several forms. Options before the program are the launcher's."""
    if all(words == lists[0] for words in lists):
        return lists[0]
    starts = [next((index + 1 for index, word in enumerate(words) if PROGRAM.fullmatch(word)), 0) for words in lists]
    if all(starts):
        programs = [words[start - 1] for words, start in zip(lists, starts, strict=True)]
        launchers = [words[: start - 1] for words, start in zip(lists, starts, strict=True)]
        # Options of different launchers mean different things.
        same_launcher = len({launcher[0] for launcher in launchers if launcher}) == 1
        launcher = _either_words(launchers) if same_launcher else max(launchers, key=len)
        return [*launcher, programs[0], *_either_words([words[start:] for words, start in zip(lists, starts, strict=True)])]
    forms = [_by_option(words) for words in lists]
    result: list[str] = []
    for name in dict.fromkeys(name for form in forms for name in form):
        values = [form.get(name) for form in forms]
        same = all(value == values[0] for value in values)
        result += [*([name] if name else []), *((values[0] or []) if same or not name else [BRANCH])]
    return result


def _by_option(words: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its words; those before the first option under an empty name."""
    form: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, separator, value = word.partition("=")
            form[name] = [value] if separator else []
        else:
            form[name].append(word)
    return form


def _options(words: list[str], script: Script) -> None:
    if "--" in words and any(PROGRAM.fullmatch(word) for word in words[words.index("--") :]):
        # What another launcher starts: `mason.py --gpus 8 -- accelerate launch train.py`.
        words = words[words.index("--") + 1 :]
    start = next((position for position, word in enumerate(words) if PROGRAM.fullmatch(word)), -1)
    launched = any(word.rsplit("/", 1)[-1] in LAUNCHERS for word in words[: start + 1])
    script.program, script.arguments = words[start] if start >= 0 else "", tuple(words[start + 1 :])
    for before, word in itertools.pairwise(["", *words[: start + 1]]):
        # `env NAME=1`, `mpirun -x NAME=1`, `srun --export=ALL,NAME=1`
        for part in word.removeprefix("--export=").split(",") if "=" in word or before in ("-x", "-e") else ():
            _take_environment(script, part, before or word)
    if launched:
        for option, value in _pairs(words[:start]):
            name = LAUNCHER + option.lstrip("-").replace("-", "_")
            script.settings[name] = _value(plain(value) if isinstance(value, str) else value)
    for name, value in _pairs(words[start + 1 :]):
        if is_open(name) or (isinstance(value, str) and is_open(value)):
            script.open[plain(name)] = decided_by(f"{name}{value}")
        else:
            script.settings[name] = _value(value)
            script.open.pop(name, None)
    further = [word for before, word in itertools.pairwise(words[max(start, 0) :]) if REFERENCE.fullmatch(word)
               and word != BRANCH and (word == reference("@") or not before.startswith("--") or "=" in before)]  # fmt: skip
    script.open |= {plain(word): "further options" for word in further if plain(word) not in script.open.values()}


def _take_environment(script: Script, part: str, source: str) -> None:
    """Take `NAME=VALUE`, or `NAME`, whose value is the caller's."""
    name, separator, value = part.partition("=")
    if separator and name.isidentifier():
        _take_variable(script, name, value)
    elif name.isidentifier() and name not in ("ALL", "NONE", "NIL") and f"{ENVIRONMENT}{name}" not in script.settings:
        script.open[f"{ENVIRONMENT}{name}"] = source


def _take_variable(script: Script, name: str, value: str) -> None:
    if is_open(value):
        script.open[f"{ENVIRONMENT}{name}"] = decided_by(value)
    else:
        script.settings[f"{ENVIRONMENT}{name}"] = _value(value)


def _pairs(words: list[str]) -> Iterator[tuple[str, str | Literal[True]]]:
    """Each option with the text of its value. Variables after a value, and all arguments, are further options, not values.

    An option of one letter ends the value before it, and is not read.
    """
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if (command := re.fullmatch(r"activation-checkpoint:(\w+)", word)) is not None:  # torchtitan's subcommand
            yield "--activation_checkpoint.mode", command[1]
            continue
        if not re.match("-[-A-Za-z]", word):
            further = word == reference("@") or (values and not is_open(values[0]))
            if not (REFERENCE.fullmatch(word) and further):
                values.append(word)
            continue
        if name:
            yield name, " ".join(values) if values else True
        name, separator, value = word.partition("=") if word.startswith("--") else ("", "", "")
        values = [value] if separator else []


def _value(text: str | Literal[True]) -> Any:
    """A number if the text is one."""
    if text is True:
        return True
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
