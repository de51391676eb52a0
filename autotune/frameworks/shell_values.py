"""Variables of a shell script, and what words with them stand for.

A value that is not known stays a reference to what decides it. A variable that nothing sets may come from the environment,
so it is a reference too; its default in `${NAME:-default}` holds.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from autotune.errors import RequestError
from autotune.frameworks.shell_syntax import array_words, closing

REFERENCE = re.compile("\ue000([^\ue001]*)\ue001")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
LONGEST, MOST_CHARACTERS = 1_000_000, 20_000_000
"""Characters of one value, and of all values together: a few lines could double a text until the memory is full. What takes as
long as many characters counts as these."""
OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) is (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
    ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
ShellValue = str | tuple[str, ...] | Mapping[str, str]


def reference(name: str) -> str:
    """Stands for a value that NAME decides."""
    return f"\ue000{name}\ue001"


BRANCH, COMPUTED = reference("_BRANCH"), reference("_COMPUTED")
"""Values that differ between branches, and outputs of commands."""
NAMES = {"_BRANCH": "a branch", "_COMPUTED": "a command"}


def is_open(text: str) -> bool:
    """Whether a part of the text is not known."""
    return "\ue000" in text


def is_unset(text: str) -> bool:
    """Whether the text is a variable or an argument that nothing sets."""
    match = REFERENCE.fullmatch(text)
    return match is not None and match[1] not in NAMES


def decided_by(text: str) -> str:
    """What decides a value, for people."""
    return ", ".join(dict.fromkeys(NAMES.get(name, f"${name}") for name in REFERENCE.findall(text)))


def plain(text: str) -> str:
    """The text with references as they are written."""
    return REFERENCE.sub(lambda match: f"$({NAMES[match[1]]})" if match[1] in NAMES else f"${match[1]}", text)


def stated_variables(words: Sequence[str]) -> dict[str, str]:
    """Variables of a script, and arguments by their numbers, that a user states as NAME=VALUE.

    Raises:
        RequestError: a word has another form.
    """
    pairs = [word.partition("=") for word in words]
    for word, (name, separator, _) in zip(words, pairs, strict=True):
        if not separator or not (name.isidentifier() or (name.isdecimal() and int(name) > 0)):
            raise RequestError("set", f"{word!r} is not NAME=VALUE", "give a variable or the number of an argument: TP=8, 2=8")
    return {name: value for name, _, value in pairs}


class ShellVariables:
    """A script's variables and arguments."""

    def __init__(self, stated: Mapping[str, str], substitute: Callable[[str], str]) -> None:
        """`stated`: variables and arguments as the user states them; `substitute`: the output of a command."""
        self.stated, self.substitute = stated, substitute
        self.values: dict[str, ShellValue] = {name: value for name, value in stated.items() if name.isidentifier()}
        self.exported: set[str] = set()
        numbers = sorted(int(name) for name in stated if name.isdecimal() and name != "0")
        complete = bool(numbers) and numbers == list(range(1, len(numbers) + 1))
        self.arguments: tuple[str, ...] | None = tuple(stated[str(number)] for number in numbers) if complete else None
        """`$1`, `$2`, …; None: not known."""
        self.shifted = 0
        self.read: set[str] = set()
        """Stated names that mattered."""
        self._overwritten: set[str] = set()
        """Stated names that the script sets itself."""
        self._characters = 0

    def assign(self, word: str) -> str:
        """Carry out an assignment; return the variable's name."""
        match = ASSIGNMENT.fullmatch(word)
        if match is None:
            return ""
        name, index, adds, text = match.groups()
        before = self.values.get(name)
        if index is not None:
            self._assign_element(name, index, (self._element(name, index) or "" if adds else "") + self.text(text))
        elif text.startswith("(") and closing(text, 0) == len(text):
            self._assign_array(name, array_words(text[1:-1]), before if adds else None)
        elif adds and isinstance(before, tuple):
            self.values[name] = (before[0] + self.text(text), *before[1:]) if before else (self.text(text),)
        else:
            self.set(name, (before if adds and isinstance(before, str) else "") + self.text(text))
        return name

    def set(self, name: str, value: str) -> None:
        """Give a variable a value; the user's statement replaces one that is not known."""
        if reference(name) in value and value != reference(name):  # `ARGS="$ARGS --more"` begins with nothing
            value = value.replace(reference(name), "")
        if is_open(value) and name in self.stated:
            self.read.add(name)
            value = self.stated[name]
        elif name in self.stated:
            self._overwritten.add(name)
        self.values[name] = value

    def _assign_array(self, name: str, words: Sequence[str], before: ShellValue | None) -> None:
        if isinstance(self.values.get(name), dict):
            pairs = [match for word in words if (match := re.fullmatch(r"\[(.*?)\]=(.*)", word, re.DOTALL))]
            table = dict(before) if isinstance(before, dict) else {}
            self.values[name] = table | {self.text(pair[1]): self.text(pair[2]) for pair in pairs}
            return
        elements = [before] if isinstance(before, str) and before else before if isinstance(before, tuple) else ()
        words = [re.sub(r"^\[\d+\]=", "", word) for word in words]
        self.values[name] = (*elements, *(field for word in words for field in self.fields(word)))

    def _assign_element(self, name: str, index: str, text: str) -> None:
        before = self.values.get(name)
        if isinstance(before, dict):
            self.values[name] = {**before, self.text(index): text}
            return
        elements = [before] if isinstance(before, str) else list(before or ())
        position = self.arithmetic(index)
        if position is None or not 0 <= position <= 1000:
            self.values[name] = (BRANCH,)
            return
        elements += [""] * (position + 1 - len(elements))
        elements[position] = text
        self.values[name] = tuple(elements)

    def fields(self, word: str) -> list[str]:
        """The words that a word stands for: values are replaced, and split at blanks where they are not in quotes."""
        fields: list[str] = []
        current: str | None = None
        separators = self.values.get("IFS", " \t\n")
        splits = re.compile(f"[{re.escape(separators)}]+" if separators and isinstance(separators, str) else r"(?!)")
        for braced in _braces(word):
            for text, split, begins in self._pieces(braced, quoted=False):
                if begins and current is not None:
                    fields.append(current)
                    current = None
                parts = splits.split(text) if split else [text]
                for index, part in enumerate(parts):
                    if index and current is not None:
                        fields.append(current)
                        current = None
                    if part or not split:
                        current = (current or "") + part
            if current is not None:
                fields.append(current)
                current = None
        self.count(sum(map(len, fields)) + len(fields))
        return fields

    def text(self, word: str, *, quoted: bool = False) -> str:
        """What a word stands for as one text; `quoted`: it is between double quotes, or in a here-document."""
        pieces = [" " * begins + text for text, _, begins in self._pieces(word, quoted=quoted)]
        text = "".join(pieces)
        self.count(len(text))
        return text

    def count(self, characters: int) -> None:
        """Add characters to those of all values.

        Raises:
            RequestError: they are too many.
        """
        self._characters += characters
        if characters > LONGEST or self._characters > MOST_CHARACTERS:
            raise RequestError(
                "from", f"its variables have more than {LONGEST:,} characters when they are replaced", "write the values out"
            )

    def _pieces(self, word: str, *, quoted: bool) -> Iterator[tuple[str, bool, bool]]:
        """Each part of a word: its text, whether it is split at blanks, and whether it begins another word."""
        position = 0
        while position < len(word):
            letter, following = word[position], word[position + 1 : position + 2]
            start = position
            if letter == "\\":
                position += 2
                if following != "\n":
                    yield word[start:position] if quoted and following not in '$`"\\' else following, False, False
            elif letter == "'" and not quoted:
                position = (word.find("'", start + 1) + 1) or len(word) + 1
                yield word[start + 1 : position - 1], False, False
            elif letter == '"' and not quoted:
                position = _quote_end(word, start)
                inner = word[start + 1 : position - 1]
                pieces = list(self._pieces(inner, quoted=True))
                if pieces or not inner:
                    yield "", False, False
                yield from pieces
            elif letter == "`":
                position = (word.find("`", start + 1) + 1) or len(word) + 1
                yield self.substitute(word[start + 1 : position - 1]), not quoted, False
            elif letter == "$" and following == "'" and not quoted:
                match = re.compile(r"\$'((?:\\.|[^'\\])*)'?", re.DOTALL).match(word, start)
                position = match.end() if match else len(word)
                yield (
                    re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), match[1] if match else ""),
                    False,
                    False,
                )
            elif letter == "$" and following == "(":
                position = closing(word, start + 1)
                inner = word[start + 2 : position - 1]
                if inner.startswith("(") and inner.endswith(")"):
                    yield self.computed(inner[1:-1]), not quoted, False
                else:
                    yield self.substitute(inner), not quoted, False
            elif letter == "$" and (match := re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])|\$\{").match(word, start)):
                position = match.end() if match[1] else closing(word, start + 1)
                elements, many = self._parameter(match[1] or word[start + 2 : position - 1], quoted)
                for index, element in enumerate(elements):
                    yield element, not quoted, many and index > 0
            else:
                ordinary = re.compile(r"[^\\$`]+" if quoted else r"[^\\'\"$`]+").match(word, start)
                position = ordinary.end() if ordinary else start + 1
                yield word[start:position], False, False

    def _elements(self, name: str, index: str | None) -> list[str] | None:
        """The values of a variable or of the arguments; None: nothing sets it."""
        if name in self.stated and name not in self._overwritten:
            self.read.add(name)
        if name in ("@", "*", "#"):
            self.read.update(number for number in self.stated if number.isdecimal())
        if name in ("@", "*"):
            return [reference("@")] if self.arguments is None else list(self.arguments)
        if name == "#":
            return None if self.arguments is None else [str(len(self.arguments))]
        if name.isdecimal() and name != "0":
            number = str(int(name) + self.shifted)
            if self.arguments is not None:
                self.read.add(number)
                return [*self.arguments[int(name) - 1 : int(name)], ""][:1]
            if number in self.stated:
                self.read.add(number)
            return [self.stated[number] if number in self.stated else reference(number)]
        value = self.values.get(name)
        if index in ("@", "*") and value is not None and not isinstance(value, str):
            return list(value.values() if isinstance(value, dict) else value)
        element = self._element(name, index or "0")
        return None if element is None else [element]

    def _element(self, name: str, index: str) -> str | None:
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, dict):
            key = self.text(index)
            return BRANCH if is_open(key) else value.get(key, "")
        position = self.arithmetic(index)
        if position is None:
            return BRANCH
        return value[position] if -len(value) <= position < len(value) else ""  # type: ignore[index]

    def _parameter(self, body: str, quoted: bool) -> tuple[list[str], bool]:
        """What `${body}` stands for, and whether each element is a word."""
        match = re.fullmatch(
            r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[((?:[^\[\]]|\[[^\]]*\])*)\])?(.*)", body, flags=re.DOTALL
        )
        if match is None:
            return [COMPUTED], False
        prefix, name, index, rest = match.groups()
        many = name in ("@", "*") or index in ("@", "*")
        elements = self._elements(name, index)
        if prefix == "#":
            known = elements is not None and not any(map(is_open, elements))
            return [str(len(elements) if many else len(elements[0])) if known and elements is not None else COMPUTED], False
        if prefix == "!":
            value = self.values.get(name)
            if many:
                return (list(map(str, value if isinstance(value, dict) else range(len(elements or ())))), True)
            target = (elements or [reference(name)])[0]
            return ([target], False) if is_open(target) else self._parameter(target + rest, quoted)
        values = [reference(name)] if elements is None else elements
        if quoted and many and "*" in (name, index):  # one word
            return [" ".join(self._parameter(body.replace("*", "@", 1), quoted)[0])], False
        default = re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if default is not None:
            null = all(map(is_unset, values)) or (bool(default[1]) and not any(values))
            if default[2] == "+":
                return [BRANCH if any(map(is_open, values)) and not null else "" if null else self.text(default[3])], False
            if not null or default[2] == "?":
                return values, many
            text = self.text(default[3])
            if default[2] == "=":
                self.set(name, text)
            return [text], False
        if not rest:
            return values, many
        if (part := re.fullmatch(r":(.*?)(?::(.*))?", rest, re.DOTALL)) is not None:
            if name in ("@", "*"):  # `${@:1}` begins with $1
                values = ["", *values]
            return self._slice(values, many, part[1], part[2])
        return [self._edited(value, rest) for value in values], many

    def _slice(self, values: list[str], many: bool, first: str, count: str | None) -> tuple[list[str], bool]:
        start, length = self.arithmetic(first), None if count is None else self.arithmetic(count)
        if any(map(is_open, values)) or start is None or (count is not None and length is None):
            return [*dict.fromkeys(value if is_open(value) else COMPUTED for value in values)][:1] or [""], False
        sequence: list[str] | str = values if many else values[0]
        size = len(sequence)
        begin = max(size + start, 0) if start < 0 else start
        end = size if length is None else size + length if length < 0 else begin + length
        return (list(sequence[begin:end]), True) if many else ([str(sequence[begin:end])], False)

    def _edited(self, value: str, edit: str) -> str:
        """A value without its beginning or end (`#`, `%`), with parts replaced (`/`), or in another case (`^`, `,`)."""
        sign, double = edit[0], edit[1:2] == edit[0]
        argument = edit[1 + double :]
        if is_open(value):
            return "".join(map(reference, dict.fromkeys(REFERENCE.findall(value))))
        if sign in "^,":
            change = str.upper if sign == "^" else str.lower
            return change(value) if double else change(value[:1]) + value[1:]
        if sign in "#%" and len(value) < 1000:
            self.count(10 * len(value))
            pattern, lengths = self.text(argument), range(len(value) + 1)
            for length in reversed(lengths) if double else lengths:
                cut = value[:length] if sign == "#" else value[len(value) - length :]
                if fnmatch.fnmatchcase(cut, pattern):
                    return value[length:] if sign == "#" else value[: len(value) - length]
            return value
        if sign == "/":
            old, _, new = argument.partition("/")
            old, new = self.text(old), self.text(new)
            anchor, old = (old[0], old[1:]) if old[:1] in ("#", "%") and not double else ("", old)
            if "*" in old or is_open(old + new):
                return COMPUTED
            regular = "".join("." if letter == "?" else letter if letter in "[]" else re.escape(letter) for letter in old)
            regular = f"^{regular}" if anchor == "#" else f"{regular}$" if anchor == "%" else regular
            try:
                return re.sub(regular, lambda _: new, value, count=0 if double else 1) if old else value
            except re.error:
                return COMPUTED
        return value if sign == "@" else COMPUTED

    def computed(self, expression: str) -> str:
        """The value of `$((expression))`."""
        text = self.text(expression, quoted=True)
        value = self.arithmetic(text)
        if value is not None:
            return str(value)
        names = re.findall(r"[A-Za-z_]\w*", REFERENCE.sub("", text))
        values = "".join(str(self.values.get(name, reference(name))) for name in names)
        return "".join(map(reference, dict.fromkeys(REFERENCE.findall(text + values)))) or COMPUTED

    def arithmetic(self, expression: str) -> int | None:
        """The value of an expression of whole numbers, whose assignments are carried out; None: not known."""
        text = self.text(expression, quoted=True).strip()
        if (step := re.fullmatch(r"(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))", text)) is not None:
            changed = self.arithmetic(f"{step[1] or step[4]} {(step[2] or step[3])[0]}= 1")
            return changed if changed is None or not step[2] else changed + (-1 if step[2] == "++" else 1)
        if (assignment := re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)) is not None:
            name, sign, right = assignment.groups()
            value = self.arithmetic(f"{name}{sign}({right})" if sign else right)
            self.set(name, COMPUTED if value is None else str(value))
            return value
        text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
        text = re.sub(r"^([^?:]*)\?([^?:]*):([^?:]*)$", r"(\2) if (\1) else (\3)", text)
        if is_open(text) or "#" in text or len(text) > 500:  # `16#ff`
            return None
        try:
            return self._evaluated(ast.parse(text.strip() or "0", mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return None

    def _evaluated(self, node: ast.expr) -> int:
        """The value of an expression.

        Raises:
            ValueError: it is not an expression of whole numbers, or a value in it does not fit into 64 bits.
        """
        value = self._value_of(node)
        if abs(value) >= 2**63:
            raise ValueError("more than 64 bits")
        return value

    def _value_of(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return int(value)
            case ast.Name(id=name):
                return int(((self._elements(name, None)) or [""])[0])
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                first, second = self._evaluated(left), self._evaluated(right)
                if isinstance(kind, ast.Pow | ast.LShift | ast.RShift) and not 0 <= second < 64:
                    raise ValueError("not a count of bits")
                return OPERATORS[type(kind)](first, second)
            case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in OPERATORS:
                return int(OPERATORS[type(kind)](self._evaluated(left), self._evaluated(right)))
            case ast.BoolOp(op=kind, values=values):
                truths = [bool(self._evaluated(value)) for value in values]
                return int(all(truths) if isinstance(kind, ast.And) else any(truths))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._evaluated(inner)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return int(not self._evaluated(inner))
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._evaluated(body if self._evaluated(test) else other)
            case _:
                raise ValueError("not arithmetic of whole numbers")


def _quote_end(word: str, start: int) -> int:
    """The position after the double quote that closes the one at the position."""
    position = start + 1
    while position < len(word) and word[position] != '"':
        nested = word[position : position + 2] in ("$(", "${")
        position = closing(word, position + 1) if nested else position + 1 + (word[position] == "\\")
    return position + 1


def _braces(word: str) -> list[str]:
    """`a{1..3}` and `a{x,y}` as words."""
    match = re.search(r"(?<![$\\])\{(?:(-?\d{1,4})\.\.(-?\d{1,4})|([^{}'\"\s$]*,[^{}'\"\s$]*))\}", word)
    if match is None or re.search(r"['\"]", word[: match.start()]):
        return [word]
    first, last = int(match[1] or 0), int(match[2] or 0)
    numbers = range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)
    parts = match[3].split(",") if match[3] is not None else list(map(str, numbers))
    return [f"{word[: match.start()]}{part}{word[match.end() :]}" for part in parts]


def output_of(fields: Sequence[str]) -> str | None:
    """The output of a command that only depends on its arguments; None: it is not known."""
    match fields:
        case ["echo", *texts] if not texts or not texts[0].startswith("-"):
            return " ".join(texts)
        case ["dirname", path]:
            return path.rpartition("/")[0] or "."
        case ["basename", path, *suffix]:
            return path.rstrip("/").rpartition("/")[2].removesuffix("".join(suffix))
        case ["realpath" | "readlink", *_, path] if not path.startswith("-"):
            return path
        case ["seq", *numbers] if 1 <= len(numbers) <= 2 and all(re.fullmatch(r"\d{1,4}", number) for number in numbers):
            return " ".join(map(str, range(int(numbers[0]) if numbers[1:] else 1, int(numbers[-1]) + 1)))
        case _:
            return None
