"""Reads the options of a launch script without running it: variables, arrays and simple arithmetic are replaced."""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import RequestError

LAUNCHER = "launcher."
"""Prefix of the launcher's own options, such as `launcher.nproc_per_node`."""
ENVIRONMENT = "env."
"""Prefix of exported variables."""
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
PROGRAM = re.compile(r".*\.py|torchtitan\.\S+")
"""The word after which options are the program's."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^}]{0,1000}))?\}|\$([A-Za-z_]\w*)")
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
SUBCOMMAND = re.compile(r"activation-checkpoint:(\w+)")
"""torchtitan's subcommand, after all options."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
             ast.FloorDiv: operator.floordiv}  # fmt: skip
MOST_ROUNDS = 8
"""Depth to which variables may refer to variables."""
MOST_CHARACTERS = 1_000_000
"""That all variables of a script may be replaced by: a few lines could double their text until the memory is full."""
LONGEST_ARITHMETIC = 200


class _Variables(dict[str, str]):
    """The values of a script's variables."""

    left = MOST_CHARACTERS

    def value(self, found: re.Match[str]) -> str:
        """What a reference is replaced by: the value, else the default in it, else the reference itself.

        Raises:
            RequestError: all replacements together are too long.
        """
        text = self.get(found[1] or found[3], found[2] or found[0])
        self.left -= len(text)
        if self.left < 0:
            problem = f"its variables have more than {MOST_CHARACTERS:,} characters when they are replaced"
            raise RequestError("from", problem, "write the values out")
        return text


@dataclass(slots=True)
class Script:
    """What was read of a script."""

    settings: dict[str, Any] = field(default_factory=dict)
    """`--option` -> its value (True: it has none; several words are joined by spaces), `launcher.OPTION`, `env.NAME`."""
    lines: dict[str, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    """All words, with variables replaced."""
    open: list[str] = field(default_factory=list)
    """Options whose value is decided when the script runs."""
    modules: tuple[str, ...] = ()
    """The launched programs: files or modules."""


def read_options(text: str) -> Script:
    """Read the launch with the most options in a script, or in a plain list of options."""
    variables, found = _Variables(), Script()
    exported: dict[str, str] = {}
    launches: list[list[str]] = []
    for words in _statements(text):
        left = _assigned(words, variables, exported)
        parts = [(item, _expanded(item, variables)) for item in left]
        expanded = [word for _, words in parts for word in words]
        if any(word.startswith("--") for word in expanded):
            launches.append(expanded)
        found.words += [word for item, words in parts for word in (words if VARIABLE.search(item) else [item])]
    found.words += [word for value in variables.values() for word in _words(value)]
    if not launches:  # a file of arguments that another script launches
        launches = [_words(value) for value in variables.values() if "--" in value]
    if not launches:
        return found
    starting = [words for words in launches if any(PROGRAM.fullmatch(word) for word in words)]
    chosen = max(starting, key=len) if starting else [word for words in launches for word in words]
    _options(chosen, found)
    for name, value in exported.items():
        found.settings[f"{ENVIRONMENT}{name}"] = _value(value)
    return found


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each statement; an array is one word `NAME=WORD WORD …`."""
    text = "\n".join(map(_without_comment, text.split("\n"))).replace("\\\n", " ")
    text = ARITHMETIC.sub(lambda found: "@" + re.sub(r"\s|\$|[{}]", "", found[1]) + "@", text)
    text = COMMAND.sub("$_UNKNOWN", text)
    text = re.sub(
        r"(?<!\w)([A-Za-z_]\w*\+?=)\(([^()]*)\)", lambda found: found[1] + shlex.quote(" ".join(_words(found[2]))), text
    )
    statement, quote = "", ""
    for line in text.split("\n"):
        statement += line
        quote = _open_quote(line, quote)
        if quote:
            statement += "\n"
            continue
        for part in re.split(r"\s(?:&&|\|\||[;|&])(?:\s|$)|;(?=\s|$)", statement):
            yield _words(part)
        statement = ""
    if statement:
        yield _words(statement)


def _without_comment(line: str) -> str:
    quote = before = ""
    for place, letter in enumerate(line):
        if letter == "#" and not quote and (not before or before.isspace()):
            return line[:place]
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
    left = words[1:] if export else list(words)
    assigned: list[str] = []
    while left and (found := ASSIGNMENT.fullmatch(left[0])) is not None:
        name, adds, value = found.groups()
        text = " ".join(_expanded(value, variables))
        variables[name] = f"{variables.get(name, '')} {text}".strip() if adds else text
        assigned.append(name)
        left.pop(0)
    if export or left:  # `NAME=value program` is exported to the program
        exported.update({name: variables[name] for name in assigned})
    return left if not export else []


def _expanded(word: str, variables: _Variables) -> list[str]:
    """The words that a word stands for; unknown variables stay."""
    for _ in range(MOST_ROUNDS):
        replaced = VARIABLE.sub(variables.value, word)
        if replaced == word:
            break
        word = replaced
    word = re.sub(r"@([^@]+)@", lambda found: _computed(found[1], variables), word)
    return word.split() if re.search(r"\s", word) else [word]


def _computed(expression: str, variables: Mapping[str, str]) -> str:
    if len(expression) > LONGEST_ARITHMETIC:
        return "$_UNKNOWN"
    try:
        return str(_evaluated(ast.parse(expression, mode="eval").body, variables))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return "$_UNKNOWN"


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


def _options(words: list[str], found: Script) -> None:
    start = next((place for place, word in enumerate(words) if PROGRAM.fullmatch(word)), -1)
    launched = any(word.rsplit("/", 1)[-1] in LAUNCHERS for word in words[: start + 1])
    found.modules = tuple(word for word in words[: start + 1] if PROGRAM.fullmatch(word))
    if launched:
        for name, value in _pairs(words[:start]):
            found.settings[LAUNCHER + name.lstrip("-").replace("-", "_")] = value
    for name, value in _pairs(words[start + 1 :]):
        if isinstance(value, str) and "$" in value:
            found.open.append(name)
        else:
            found.settings[name] = value


def _pairs(words: list[str]) -> Iterator[tuple[str, Any]]:
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if (command := SUBCOMMAND.fullmatch(word)) is not None:
            yield "--activation_checkpoint.mode", command[1]
            continue
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, _value(" ".join(values)) if values else True
        name, given, value = word.partition("=")
        values = [value] if given else []


def _value(text: str) -> Any:
    """A number if the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
