"""The commands of a shell script as a tree. Words stay as they are written, with their quotes.

Every text is read: what is not closed ends with the text. See "Shell Grammar" in bash(1).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

ARRAY = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=\(")
REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>\||>&|<&|>|<)(&?-?)")


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """Assignments, a program and its arguments; `[[ … ]]` too."""

    words: tuple[str, ...]
    inputs: list[tuple[str, bool]] = field(default_factory=list)
    """Text of each here-document, and whether its variables are replaced."""


@dataclass(frozen=True, slots=True)
class ShellArithmetic:
    """`((expression))`."""

    expression: str


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands, each after `&&` or `||`; the first after an empty text."""

    commands: tuple[tuple[str, "ShellCommand"], ...]


@dataclass(frozen=True, slots=True)
class Piped:
    """Commands in a pipe, or one command after `!`."""

    commands: tuple["ShellCommand", ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Conditional:
    """An `if`: each condition with its commands. The condition of `else` is empty."""

    branches: tuple[tuple["Commands", "Commands"], ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """A `case`: the patterns of each branch with its commands."""

    subject: str
    branches: tuple[tuple[tuple[str, ...], "Commands"], ...]


@dataclass(frozen=True, slots=True)
class ShellLoop:
    """A `for`, which has words, or a `while` or `until`, which has a condition."""

    name: str
    words: tuple[str, ...]
    condition: "Commands"
    ends_when: bool
    """Result of the condition that ends the loop."""
    body: "Commands"


@dataclass(frozen=True, slots=True)
class ShellFunction:
    """The definition of a function."""

    name: str
    body: "ShellCommand"


@dataclass(frozen=True, slots=True)
class ShellGroup:
    """`{ … }`, or `( … )`, whose assignments end with it."""

    body: "Commands"
    subshell: bool


ShellCommand = (
    SimpleCommand | ShellArithmetic | AndOr | Piped | Conditional | Selection | ShellLoop | ShellFunction | ShellGroup
)
Commands = tuple[ShellCommand, ...]


def parse_commands(text: str) -> Commands:
    """The commands of a script.

    Raises:
        RecursionError: they are nested too deeply.
    """
    parser = _ShellParser(text)
    commands: list[ShellCommand] = []
    while parser.position < len(text):
        commands += parser.commands(())
        parser.position += len(parser.operator()) or (parser.position < len(text))  # a `fi` or `)` without its beginning
    return tuple(commands)


def word_end(text: str, position: int) -> int:
    """Where the word ends that begins at the position."""
    start = position
    while position < len(text):
        letter = text[position]
        if letter.isspace() or letter in ";&|<>)":
            break
        if letter == "(":
            if not ARRAY.fullmatch(text, start, position + 1) and text[position - 1 : position] not in (
                "?",
                "*",
                "+",
                "@",
                "!",
            ):
                break
            position = _array_end(text, position + 1)
        else:
            position = _unit_end(text, position)
    return position


def _unit_end(text: str, position: int) -> int:
    """Where the letter ends, or what is quoted or replaced, that begins at the position."""
    letter, following = text[position], text[position + 1 : position + 2]
    if letter == "\\":
        return position + 2
    if letter == "'" or (letter == "$" and following == "'"):
        end = re.compile(r"\$'(?:\\.|[^'\\])*'|'[^']*'", re.DOTALL).match(text, position)
        return end.end() if end else len(text)
    if letter == "$" and following in ("(", "{"):
        return closing(text, position + 1)
    if letter in '"`':
        position += 1
        while position < len(text) and text[position] != letter:
            nested = text[position] in "\\`" or text[position : position + 2] in ("$(", "${")
            position = _unit_end(text, position) if nested and letter == '"' else position + 1 + (text[position] == "\\")
        return position + 1
    return position + 1


def closing(text: str, position: int) -> int:
    """The position after the bracket that closes the one at the position."""
    opening, depth = text[position], 0
    end = {"(": ")", "{": "}", "[": "]"}[opening]
    while position < len(text):
        letter = text[position]
        if letter == opening:
            depth += 1
        elif letter == end:
            depth -= 1
            if depth == 0:
                return position + 1
        elif letter in "\\'\"`$":
            position = _unit_end(text, position)
            continue
        position += 1
    return len(text)


def array_words(text: str) -> list[str]:
    """The words in the parentheses of an array."""
    words, position = [], 0
    while (position := _blank_end(text, position, lines=True)) < len(text):
        end = word_end(text, position)
        end = _bracketed(text, position, end)
        words.append(text[position:end])
        position = max(end, position + 1)
    return words


def _bracketed(text: str, position: int, end: int) -> int:
    """The end of a word of an associative array: `[a key]=value`."""
    key = re.compile(r"\[[^\]\n]{0,200}\]=").match(text, position)
    return word_end(text, key.end()) if key else end


def _array_end(text: str, position: int) -> int:
    while (position := _blank_end(text, position, lines=True)) < len(text) and text[position] != ")":
        position = max(_bracketed(text, position, word_end(text, position)), position + 1)
    return min(position + 1, len(text))


def _blank_end(text: str, position: int, *, lines: bool) -> int:
    """Where blanks and a comment end; `lines`: and lines."""
    pattern = r"(?:\s|\\\n|#[^\n]*)*" if lines else r"(?:[^\S\n]|\\\n)*(?:#[^\n]*)?"
    match = re.compile(pattern).match(text, position)
    return match.end() if match else position


class _ShellParser:
    """Reads a text from a position on."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth = text, 0, 0
        self._pending: list[tuple[SimpleCommand, str, bool, bool]] = []
        """Here-documents that begin after this line: its command, the last line, whether tabs go, whether variables do."""

    def operator(self) -> str:
        """The operator that is next; empty: a word, or the end."""
        self.position = _blank_end(self.text, self.position, lines=False)
        signs = ("\n", ";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|", "(", ")")
        return next((sign for sign in signs if self.text.startswith(sign, self.position)), "")

    def _peek(self) -> str:
        """The word that is next; empty: none."""
        return "" if self.operator() else self.text[self.position : word_end(self.text, self.position)]

    def _take(self) -> str:
        word = self._peek()
        self.position += len(word) or (self.position < len(self.text) and not self.operator())
        return word

    def _lines(self) -> None:
        """Skip ends of lines and of commands."""
        while (sign := self.operator()) in ("\n", ";", "&"):
            self.position += 1
            if sign == "\n":
                self._documents()

    def _documents(self) -> None:
        for command, last, tabs, replaced in self._pending:
            lines: list[str] = []
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                line = self.text[self.position : len(self.text) if end < 0 else end]
                self.position = min(self.position + len(line) + 1, len(self.text))
                line = line.lstrip("\t") if tabs else line
                if line == last:
                    break
                lines.append(line)
            command.inputs.append(("\n".join(lines), replaced))
        self._pending.clear()

    def commands(self, ends: Sequence[str]) -> Commands:
        """The commands before one of the words or operators."""
        result: list[ShellCommand] = []
        self.depth += 1
        # Nested commands.
        if self.depth > 60:
            raise RecursionError
        while True:
            self._lines()
            start = self.position
            if start >= len(self.text) or self.operator() in (")", ";;", ";&", ";;&"):
                break
            if self._peek() in (*ends, "done", "fi", "esac", "then", "else", "elif", "do", "}"):
                break
            if (command := self._and_or()) is not None:
                result.append(command)
            if self.position == start:
                break
        self.depth -= 1
        return tuple(result)

    def _and_or(self) -> ShellCommand | None:
        commands, connective = [], ""
        while (command := self._pipe()) is not None:
            commands.append((connective, command))
            connective = self.operator()
            if connective not in ("&&", "||"):
                break
            self.position += 2
            while self.operator() == "\n":
                self.position += 1
        return AndOr(tuple(commands)) if len(commands) > 1 else commands[0][1] if commands else None

    def _pipe(self) -> ShellCommand | None:
        commands, negated = [], False
        while self._peek() == "!":
            self._take()
            negated = not negated
        while (command := self._command()) is not None:
            commands.append(command)
            if (sign := self.operator()) not in ("|", "|&"):
                break
            self.position += len(sign)
            while self.operator() == "\n":
                self.position += 1
        return Piped(tuple(commands), negated) if negated or len(commands) > 1 else commands[0] if commands else None

    def _command(self) -> ShellCommand | None:
        command = self._compound()
        if command is None:
            return self._simple()
        while self._redirection() is not None:
            pass
        return command

    def _compound(self) -> ShellCommand | None:
        sign, word = self.operator(), self._peek()
        if sign == "(":
            end = closing(self.text, self.position) if self.text.startswith("((", self.position) else 0
            if self.text.endswith("))", self.position, end):
                expression = self.text[self.position + 2 : end - 2]
                self.position = end
                return ShellArithmetic(expression)
            self.position += 1
            group = ShellGroup(self.commands(()), subshell=True)
            self._skip(")")
            return group
        match word:
            case "{":
                self._take()
                group = ShellGroup(self.commands(("}",)), subshell=False)
                self._skip("}")
                return group
            case "if":
                return self._conditional()
            case "case":
                return self._selection()
            case "for" | "select":
                return self._for()
            case "while" | "until":
                self._take()
                condition = self.commands(("do",))
                return ShellLoop("", (), condition, word == "until", self._body())
        match = re.compile(r"(?:function\s+([\w:.-]+)\s*(?:\(\s*\))?|([A-Za-z_][\w:.-]*)\s*\(\s*\))\s*(?=[{(])").match(
            self.text, self.position
        )
        if match is None:
            return None
        self.position = match.end()
        body = self._compound()
        return None if body is None else ShellFunction(match[1] or match[2], body)

    def _skip(self, word: str) -> None:
        if self.operator() == word or self._peek() == word:
            self.position += len(word)

    def _body(self) -> Commands:
        self._lines()
        self._skip("do")
        body = self.commands(("done",))
        self._skip("done")
        return body

    def _conditional(self) -> Conditional:
        branches, word = [], "if"
        while word in ("if", "elif", "else"):
            self._take()
            condition = () if word == "else" else self.commands(("then",))
            self._skip("then")
            branches.append((condition, self.commands(("elif", "else", "fi"))))
            word = self._peek()
        self._skip("fi")
        return Conditional(tuple(branches))

    def _selection(self) -> Selection:
        self._take()
        subject, branches = self._take(), []
        self._lines()
        self._skip("in")
        while True:
            self._lines()
            if self._peek() in ("esac", "") and self.operator() != "(":
                break
            self._skip("(")
            patterns = [self._take()]
            while self.operator() == "|":
                self.position += 1
                patterns.append(self._take())
            self._skip(")")
            branches.append((tuple(patterns), self.commands(("esac",))))
            self.position += len(self.operator()) if self.operator() in (";;", ";&", ";;&") else 0
        self._skip("esac")
        return Selection(subject, tuple(branches))

    def _for(self) -> ShellLoop:
        self._take()
        words: list[str] = []
        if self.operator() == "(":  # for ((first; condition; step))
            first, _, _ = self.text[self.position + 2 :].partition(";")
            self.position = closing(self.text, self.position)
            name, words = first.partition("=")[0].strip(), ["$_COMPUTED"]
        else:
            name = self._take()
            while self.operator() == "\n":
                self.position += 1
            words = ['"$@"']
            if self._peek() == "in":
                self._take()
                words = []
                while word := self._take():
                    words.append(word)
        return ShellLoop(name, tuple(words), (), True, self._body())

    def _redirection(self) -> tuple[str, str] | None:
        """Read a redirection: its operator and its word."""
        self.operator()
        match = REDIRECTION.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[1], "" if match[2].endswith("-") else self._take()

    def _simple(self) -> SimpleCommand | None:
        command_words: list[str] = []
        inputs: list[tuple[str, bool]] = []
        documents = []
        while True:
            in_test = command_words[:1] == ["[["]
            if not in_test and (redirection := self._redirection()) is not None:
                sign, word = redirection
                if sign.startswith("<<") and sign != "<<<":
                    documents.append((re.sub(r"[\\'\"]", "", word), sign == "<<-", not re.search(r"[\\'\"]", word)))
                continue
            word = self._test_word() if in_test else self._take()
            if not word:
                break
            command_words.append(word)
            if word == "]]":
                break
        if not command_words and not documents:
            return None
        command = SimpleCommand(tuple(command_words), inputs)
        self._pending += [(command, *document) for document in documents]
        return command

    def _test_word(self) -> str:
        """A word between `[[` and `]]`, where operators are words too."""
        start = self.position = _blank_end(self.text, self.position, lines=True)
        if re.compile(r"\]\](?![^\s;&|)])").match(self.text, start):
            self.position += 2
        while (
            self.position < len(self.text)
            and not self.text[self.position].isspace()
            and self.text[start : self.position] != "]]"
        ):
            self.position = _unit_end(self.text, self.position)
        return self.text[start : self.position]
