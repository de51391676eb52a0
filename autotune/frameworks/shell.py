"""Reads the options of a launch script without running it: variables, arrays and simple arithmetic are replaced.

What the script decides when it runs stays undecided: its arguments, variables that nothing sets, outputs of commands, and what
differs between the branches of a condition that is not known.
"""

import ast
import fnmatch
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.errors import RequestError

LAUNCHER = "launcher."
"""Prefix of the launcher's own options, such as `launcher.nproc_per_node`."""
ENVIRONMENT = "env."
"""Prefix of exported variables."""
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
PROGRAM = re.compile(r".*\.py|torchtitan\.\S+|axolotl\.cli\.train|(?:.*/)?(?:llamafactory-cli|axolotl|trl)")
"""The word after which options are the program's."""
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|[1-9])(?:\[[@*]\])?(?::?[-=]([^}]{0,1000}))?\}|\$([A-Za-z_]\w*)")
COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
REFERENCE = re.compile(r"\$(?:\w+|[@*#]|\{[^}\s]*\}?)")
BRANCH, COMPUTED = "$_BRANCH", "$_COMPUTED"
"""Values that differ between branches, and those of commands and of arithmetic with what is not known."""
SEPARATOR = re.compile(r"\s(&&|\|\||[;|&])(?=\s|$)|(;)(?=\s|$)")
SLURM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gpus": ("SLURM_GPUS",), "gpus-per-task": ("SLURM_GPUS_PER_TASK",), "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}  # fmt: skip
"""Option of sbatch -> the variables of the job that have its value [sbatch(1), output environment variables]."""
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
             ast.FloorDiv: operator.floordiv}  # fmt: skip
MOST_CHARACTERS = 1_000_000
"""That all variables of a script may be replaced by: a few lines could double their text until the memory is full."""


class _Variables(dict[str, str]):
    """The values of a script's variables."""

    characters_left = MOST_CHARACTERS

    def value(self, reference: re.Match[str]) -> str:
        """What a reference is replaced by: the value, else the default in it, else the reference itself.

        Raises:
            RequestError: all replacements together are too long.
        """
        default = reference[0] if reference[2] is None else reference[2]
        text = self.get(reference[1] or reference[3], default) or default * (reference[2] is not None)
        self.characters_left -= len(text)
        if self.characters_left < 0:
            problem = f"its variables have more than {MOST_CHARACTERS:,} characters when they are replaced"
            raise RequestError("from", problem, "write the values out")
        return text


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
    """Files that the script sources, which are not read: they may set and export variables."""
    modules: tuple[str, ...] = ()
    """The launched programs: files or modules."""


def read_options(text: str) -> Script:
    """Read the launch with the most options in a script, or in a plain list of options."""
    run = _ScriptRun()
    run.take_sbatch(text)
    for connective, words in _statements(text):
        run.step(connective, words)
    script, launches = run.script, run.launches
    script.words += [word for value in run.variables.values() for word in _words(value)]
    for name, value in run.exported.items():
        _take_variable(script, name, value)
    if not launches:  # a file of arguments that another script launches
        launches = [_words(value) for value in run.variables.values() if "--" in value]
    if not launches:
        return script
    starting = [words for words in launches if any(PROGRAM.fullmatch(word) for word in words)]
    chosen = max(starting, key=len) if starting else [word for words in launches for word in words]
    _options(chosen, script)
    return script


@dataclass(slots=True)
class _Choice:
    """An `if` or a `case` that is being read."""

    before: dict[str, str]
    """Variables before it."""
    runs: bool | None
    """Whether the present branch runs; None: not known."""
    subject: str | None = None
    """The word of a `case`; None: it is an `if`."""
    ends: list[dict[str, str]] = field(default_factory=list)
    """Variables after each branch that may run."""
    settled: bool = False
    """Whether a branch before certainly runs, so that none after it does."""
    in_condition: bool = True


class _ScriptRun:
    """Carries out the assignments of a script, statement by statement."""

    def __init__(self) -> None:
        self.variables, self.exported, self.script = _Variables(), dict[str, str](), Script()
        self.launches: list[list[str]] = []
        self._choices: list[_Choice] = []
        self._last: bool | None = True
        """Whether the last command succeeds, as far as it is a test."""

    def take_sbatch(self, text: str) -> None:
        """Set the variables that Slurm sets for the `#SBATCH` lines before the first command."""
        values: dict[str, str] = {}
        long_names = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                break
            words = _words(_without_comment(line.removeprefix("#SBATCH"))) if line.startswith("#SBATCH ") else []
            short = [re.sub(r"^-([NnGc])(?=\d|$)", lambda match: f"--{long_names[match[1]]}=", word) for word in words]
            values |= {name: str(value) for name, value in _pairs([word.removesuffix("=") for word in short])}
        for part in values.pop("--export", "").split(","):
            _take_environment(self.script, part, "#SBATCH --export")
        counts = {name: int(values[f"--{name}"]) for name in SLURM if values.get(f"--{name}", "").isdecimal()}
        if "nodes" in counts and "ntasks-per-node" in counts:
            counts.setdefault("ntasks", counts["nodes"] * counts["ntasks-per-node"])
        self.variables.update({variable: str(count) for name, count in counts.items() for variable in SLURM[name]})

    def step(self, connective: str, words: list[str]) -> None:
        """Carry out one statement; `connective`: `&&`, `||`, or empty."""
        choice = self._choices[-1] if self._choices else None
        match words:
            case ["if", *condition]:
                self._choices.append(_Choice(before=dict(self.variables), runs=self._truth(condition)))
            case ["case", subject, "in", *rest]:
                text = " ".join(_expanded(subject, self.variables))
                self._choices.append(_Choice(dict(self.variables), runs=False, subject=text, in_condition=False))
                self.step("", rest)
            case ["fi" | "esac", *_] if choice is not None:
                self._leave(choice)
            case ["elif", *condition] if choice is not None:
                self._branch(choice, self._truth(condition))
                choice.in_condition = True
            case ["else", *rest] if choice is not None:
                self._branch(choice, True)
                self.step("", rest)
            case [";;"] if choice is not None:
                self._branch(choice, False)
            case [pattern, *rest] if choice is not None and choice.subject is not None and pattern.endswith(")"):
                self._branch(choice, _matches(choice.subject, pattern.strip("()").split("|")))
                self.step("", rest)
            case ["then", *rest]:
                if choice is not None:
                    choice.in_condition = False
                self.step("", rest)
            case ["do" | "{", *rest]:
                self.step("", rest)
            case _ if choice is not None and choice.subject is None and choice.in_condition:
                further = self._truth(words)
                choice.runs = _both(choice.runs, further) if connective == "&&" else None
            case ["for", name, *_] if name.isidentifier():
                self.variables[name] = BRANCH
            case [_, *_]:
                self._command(connective, words)

    def _command(self, connective: str, words: list[str]) -> None:
        runs = all(choice.runs is not False for choice in self._choices)
        last = self._last if connective else True
        if connective == "||":
            last = None if last is None else not last
        if not runs or last is False:
            return
        if words[0] in ("[", "[[", "test"):
            self._last = _both(last, self._truth(words)) if connective != "||" else None
            return
        before = dict(self.variables)
        self._simple(words)
        if connective and last is None:
            self._merge([before, dict(self.variables)])
        else:
            self._last = True

    def _simple(self, words: list[str]) -> None:
        """Carry out a command without conditions."""
        if words[0] in ("source", ".") and len(words) > 1:
            self.script.sourced.append(words[1])
        parts = [(item, _expanded(item, self.variables)) for item in _assigned(words, self.variables, self.exported)]
        expanded = [word for _, item_words in parts for word in item_words]
        if any(word.startswith("--") for word in expanded):
            self.launches.append(expanded)
        self.script.words += [word for item, item_words in parts for word in (item_words if VARIABLE.search(item) else [item])]

    def _truth(self, words: Sequence[str]) -> bool | None:
        """Whether a test holds; None: it is not known, or no comparison of words or whole numbers."""
        if words[:1] == ["!"]:
            inner = self._truth(words[1:])
            return None if inner is None else not inner
        if not words or words[0] not in ("[", "[[", "test"):
            return None
        inside = [" ".join(_expanded(word, self.variables)) for word in words[1:] if word not in ("]", "]]")]
        if any("$" in word for word in inside):
            return None
        match inside:
            case ["!", *rest]:
                return self._truth(["!", "[", *rest])
            case ["-z", text]:
                return not text
            case ["-n", text]:
                return bool(text)
            case [text, "=" | "==" | "!=" as sign, pattern]:
                return fnmatch.fnmatchcase(text, pattern) is (sign != "!=")
            case [left, sign, right] if sign in COMPARISONS and left.isdecimal() and right.isdecimal():
                return COMPARISONS[sign](int(left), int(right))
            case _:
                return None

    def _branch(self, choice: _Choice, runs: bool | None) -> None:
        """End the present branch and begin another one, which runs if no branch before did."""
        if choice.runs is not False:
            choice.ends.append(dict(self.variables))
        choice.settled = choice.settled or choice.runs is True
        choice.runs = False if choice.settled else runs
        self._set(choice.before)

    def _leave(self, choice: _Choice) -> None:
        self._branch(choice, False)
        self._choices.pop()
        self._merge(choice.ends if choice.settled else [*choice.ends, choice.before])

    def _merge(self, ends: Sequence[Mapping[str, str]]) -> None:
        """The variables after branches of which one runs."""
        names = dict.fromkeys(name for end in ends for name in end)
        values = {name: [end.get(name) for end in ends] for name in names}
        self._set({name: texts[0] if texts.count(texts[0]) == len(texts) else _either(texts) for name, texts in values.items()})

    def _set(self, variables: Mapping[str, str | None]) -> None:
        self.variables.clear()
        self.variables.update({name: value for name, value in variables.items() if value is not None})


def _both(first: bool | None, second: bool | None) -> bool | None:
    """Whether both hold."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def _matches(subject: str, patterns: Sequence[str]) -> bool | None:
    """Whether the word of a `case` has one of the patterns; None: not known."""
    if "*" in patterns:
        return True
    if "$" in subject or any("$" in pattern for pattern in patterns):
        return None
    return any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)


def _either(values: Sequence[str | None]) -> str:
    """A variable that has one of several values: options that all of them state stay, the others are undecided."""
    texts = [_words(value) for value in values if value]
    if not any(word.startswith("--") for words in texts for word in words):
        return BRANCH
    options_by_branch = [dict(_pairs(words)) for words in texts]
    options = []
    for name in dict.fromkeys(name for branch_options in options_by_branch for name in branch_options):
        value = options_by_branch[0].get(name)
        if len(texts) < len(values) or any(branch_options.get(name) != value for branch_options in options_by_branch):
            value = BRANCH
        options.append(name if value is True else f"{name}={value}")
    before = itertools.takewhile(lambda word: not word.startswith("--"), texts[-1])
    return " ".join([*before, *options])


def _statements(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each statement: `&&` or `||` before it, and its words; an array is one word `NAME=WORD WORD …`."""
    text = "\n".join(map(_without_comment, text.split("\n"))).replace("\\\n", " ")
    arithmetic = r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    text = re.sub(arithmetic, lambda match: "@" + re.sub(r"\s|\$|[{}]", "", match[1]) + "@", text)
    text = COMMAND.sub(COMPUTED, text)
    text = re.sub(
        r"(?<!\w)([A-Za-z_]\w*\+?=)\(([^()]*)\)", lambda match: match[1] + shlex.quote(" ".join(_words(match[2]))), text
    )
    text = re.sub(r";;&?", "\n;;\n", text)
    statement, quote = "", ""
    for line in text.split("\n"):
        statement += line
        quote = _open_quote(line, quote)
        if quote:
            statement += "\n"
            continue
        connective = ""
        for part in SEPARATOR.split(statement) if statement != ";;" else [statement]:
            if part in (None, ";", "|", "&", "&&", "||"):
                connective = part if part in ("&&", "||") else connective if part is None else ""
            else:
                yield connective, _words(part)
        statement = ""
    if statement:
        yield "", _words(statement)


def _without_comment(line: str) -> str:
    quote = before = ""
    for position, letter in enumerate(line):
        if letter == "#" and not quote and (not before or before.isspace()):
            return line[:position]
        quote, before = _open_quote(letter, quote, before), letter
    return line


def _open_quote(text: str, quote: str = "", last: str = "") -> str:
    """The quote that is open after the text, if `quote` was before it, whose last character is `last`."""
    for before, letter in zip((last or " ") + text, text, strict=False):
        if letter in "'\"" and before != "\\":
            quote = "" if letter == quote else quote or letter
    return quote


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _assigned(words: list[str], variables: _Variables, exported: dict[str, str]) -> list[str]:
    """Carry out the assignments at the start; return the other words."""
    export = bool(words) and words[0] in ("export", "declare", "local")
    remaining = words[1:] if export else list(words)
    assigned: list[str] = []
    while remaining and (assignment := re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", remaining[0], re.DOTALL)) is not None:
        name, adds, value = assignment.groups()
        text = " ".join(_expanded(value, variables))
        variables[name] = f"{variables.get(name, '')} {text}".strip() if adds else text
        assigned.append(name)
        remaining.pop(0)
    if export or remaining:  # `NAME=value program` is exported to the program
        exported.update({name: variables[name] for name in assigned})
    return remaining if not export else []


def _expanded(word: str, variables: _Variables) -> list[str]:
    """The words that a word stands for; unknown variables stay."""
    for _ in range(8):  # depth to which variables may refer to variables
        replaced = VARIABLE.sub(variables.value, word)
        if replaced == word:
            break
        word = replaced
    word = re.sub(r"@([^@]+)@", lambda match: _computed(match[1], variables), word)
    return word.split() if re.search(r"\s", word) else [word] * (word != "")


def _computed(expression: str, variables: Mapping[str, str]) -> str:
    if len(expression) > 200:
        return COMPUTED
    try:
        return str(_evaluated(ast.parse(expression, mode="eval").body, variables))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return COMPUTED


def _evaluated(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return int(variables[name])
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
            return int(OPERATORS[type(kind)](_evaluated(left, variables), _evaluated(right, variables)))
        case _:
            raise ValueError("not arithmetic of whole numbers")


def _options(words: list[str], script: Script) -> None:
    if "--" in words and any(PROGRAM.fullmatch(word) for word in words[words.index("--") :]):
        words = words[
            words.index("--") + 1 :
        ]  # what another launcher starts: `mason.py --gpus 8 -- accelerate launch train.py`
    start = next((position for position, word in enumerate(words) if PROGRAM.fullmatch(word)), -1)
    launched = any(word.rsplit("/", 1)[-1] in LAUNCHERS for word in words[: start + 1])
    script.modules = tuple(word for word in words[: start + 1] if PROGRAM.fullmatch(word))
    for before, word in itertools.pairwise(["", *words[: start + 1]]):
        # `env NAME=1`, `mpirun -x NAME=1`, `srun --export=ALL,NAME=1`
        for part in word.removeprefix("--export=").split(",") if "=" in word or before in ("-x", "-e") else ():
            _take_environment(script, part, before or word)
    if launched:
        for name, value in _pairs(words[:start]):
            script.settings[LAUNCHER + name.lstrip("-").replace("-", "_")] = _value(value)
    for name, value in _pairs(words[start + 1 :]):
        if isinstance(value, str) and "$" in value:
            script.open[name] = decided_by(value)
        else:
            script.settings[name] = _value(value)
            script.open.pop(name, None)
    further = [word for word in words[start + 1 :] if REFERENCE.fullmatch(word) and word not in (BRANCH, COMPUTED)]
    script.open |= {word: "further options" for word in further if word not in script.open.values()}


def _take_environment(script: Script, part: str, source: str) -> None:
    """Take `NAME=VALUE`, or `NAME`, whose value is the caller's."""
    name, separator, value = part.partition("=")
    if separator and name.isidentifier():
        _take_variable(script, name, value)
    elif name.isidentifier() and name not in ("ALL", "NONE", "NIL"):
        script.open[f"{ENVIRONMENT}{name}"] = source


def _take_variable(script: Script, name: str, value: str) -> None:
    if "$" in value:
        script.open[f"{ENVIRONMENT}{name}"] = decided_by(value)
    else:
        script.settings[f"{ENVIRONMENT}{name}"] = _value(value)


def decided_by(value: str) -> str:
    """What decides a value, for people."""
    names = {BRANCH: "a branch", COMPUTED: "a command"}
    return ", ".join(dict.fromkeys(names.get(word, word) for word in REFERENCE.findall(value))) or value


def _pairs(words: list[str]) -> Iterator[tuple[str, str | Literal[True]]]:
    """Each option with the text of its value. Variables after a value, and all arguments, are further options, not values."""
    name, values = "", list[str]()
    words = [word for before, word in itertools.pairwise(["", *words])
             if not re.fullmatch(r"\d?[<>].*", word) and before not in (">", ">>", "2>", "&>", "<")]  # fmt: skip
    for word in [*words, "--"]:
        if (command := re.fullmatch(r"activation-checkpoint:(\w+)", word)) is not None:  # torchtitan's subcommand
            yield "--activation_checkpoint.mode", command[1]
            continue
        if not word.startswith("--"):
            further = word.lstrip("${").startswith(("@", "*")) or (values and "$" not in values[0])
            if not (REFERENCE.fullmatch(word) and further):
                values.append(word)
            continue
        if name:
            yield name, " ".join(values) if values else True
        name, separator, value = word.partition("=")
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
