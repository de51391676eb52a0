"""Another framework's file as a table, the table of its keys and what is read of it, and our preset of a model by its name."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated
from autotune.frameworks.hjson import SPACE, HjsonReader
from search_spaces.errors import KnobValueError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value, parse_value, value_text
from search_spaces.models.huggingface import known_model, model_preset_names
from search_spaces.models.model import ModelSpec
from search_spaces.preset_files import plain_name

AUTO = "auto"
"""Value that Hugging Face's integration replaces when a run begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration that was read from another framework's file."""

    knobs: Mapping[str, Value]
    global_batch_size: int | None = None
    """None: the file does not state it."""
    samples_per_rank: int | None = None
    """Samples of a data-parallel rank per optimizer step; None: the file does not state it."""
    ranks: int | None = None
    """Number of processes that the file is written for; None: the file does not state it."""
    started_ranks: int | None = None
    """Ranks that a script's job starts, whatever its settings; None: not known."""
    engine: str | None = None
    """Our engine that measured it; None: none."""
    hyperparameters: Stated = field(default_factory=Stated)
    """Hyperparameters that the file states."""
    notes: tuple[str, ...] = ()
    """Settings that were not read as knobs, one line each."""
    assumed: Mapping[str, Value] = field(default_factory=dict)
    """Knob -> its value in predictions, of those that the file leaves to the program that trains."""
    of_hidden_size: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    """Knob that the program sets by the model's hidden size -> its value."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value is decided when the file runs -> what decides it."""
    model: ModelSpec | None = None
    """The model that the file describes or names; None: neither, or its shape is unknown here."""
    sequence_length: int | None = None
    """Tokens per sample; None: the file does not state it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Knob -> the setting of the file that states it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Every setting of the file, with flat keys."""
    beside: "Imported | None" = None
    """The configuration that the file names, of which the knobs are too; None: it names none."""
    repeated: tuple[str, ...] = ()
    """Keys that the file states twice, of which a tolerant reader takes the last value."""
    unreadable: RequestError | None = None
    """Why there are no knobs: the first value that is none; None: they were read."""

    def noted(self, *lines: str) -> "Imported":
        """The same with further notes."""
        return replace(self, notes=(*self.notes, *lines)) if lines else self


SWITCHES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True), **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}  # fmt: skip
"""Words of a switch, in any case: of YAML, of pydantic, and of transformers' and Accelerate's `string_to_bool`."""


def switch_of(value: object) -> bool | None:
    """Whether a switch is on; None: the value is no switch."""
    return SWITCHES.get(str(value).lower())


class FlatTable:
    """A file's tables with flat keys: `zero_optimization.stage`. Reading a key removes it; the remaining keys become notes."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self.knobs: dict[str, Value] = {}
        self.assumed: dict[str, Value] = {}
        self.of_hidden_size: dict[str, Callable[[int], int]] = {}
        self.keys: dict[str, str] = {}
        self.settings: dict[str, Any] = dict(flat(content))
        self._unread = dict(self.settings)

    def take(self, key: str) -> Any:
        """Return and remove the value under the key; None: it is missing, null or auto."""
        value = self._unread.pop(key, None)
        if value == AUTO:
            self.notes.append(f"{key}=auto: its value is chosen when a run begins; it was left at the default")
            return None
        return value

    def whole(self, key: str) -> int | None:
        """A whole number of at least 1.

        Raises:
            RequestError: the value is something else.
        """
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**63 or value != int(value):
            raise RequestError(key, f"{value!r} in {self.source} is not a whole number", "give a whole number of at least 1")
        return int(value)

    def number(self, *keys: str, default: float) -> float:
        """As `quantity`, with a default."""
        quantity = self.quantity(*keys)
        return default if quantity is None else quantity

    def quantity(self, *keys: str) -> float | None:
        """A number of at least 0 under the first existing key; None: all keys are missing.

        Raises:
            RequestError: the value is something else.
        """
        for key in keys:
            value = self.take(key)
            if value is None:
                continue
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not 0 <= number < math.inf:
                raise RequestError(key, f"{value!r} in {self.source} is not a valid number", "give a number of at least 0")
            return number
        return None

    def switch(self, key: str) -> bool | None:
        """True or false; None: the key is missing.

        Raises:
            RequestError: the value is something else.
        """
        value = self.take(key)
        switch = switch_of(value)
        if switch is None and value is not None:
            raise RequestError(key, f"{value!r} in {self.source} is not a boolean", "give true or false")
        return switch

    def choice(self, key: str, meanings: Mapping[str, Value]) -> Value | None:
        """The meaning of the word under the key; None: the key is missing.

        Raises:
            RequestError: the word is not among `meanings`.
        """
        value = self.take(key)
        if value is None:
            return None
        word = str(value).lower()
        if word not in meanings:
            raise RequestError(key, f"{value!r} in {self.source} is not known", f"use one of {', '.join(meanings)}")
        return meanings[word]

    def knob(self, key: str, name: str) -> None:
        """Read a knob whose values are the same in the file.

        Raises:
            RequestError: the value is not in the knob's domain.
        """
        value = self.take(key)
        if value is None:
            return
        self.keys[name] = key
        try:
            # YAML reads 5e8 as text.
            self.knobs[name] = parse_value(name, value) if isinstance(value, str) else check_value(name, value)
        except KnobValueError as error:
            raise RequestError(key, f"{value!r} in {self.source} is not in the domain of {name}", error.remedy) from error

    def set(self, name: str, value: Value | None, key: str = "") -> None:
        """Set a knob, which the setting `key` states; None: the file does not state it.

        Raises:
            RequestError: the value is not in the knob's domain.
        """
        if value is None:
            return
        if key:
            self.keys[name] = key
        try:
            self.knobs[name] = check_value(name, value)
        except KnobValueError as error:
            raise RequestError(
                key or name, f"{value!r} in {self.source} is not in the domain of {name}", error.remedy
            ) from error

    def size(self, key: str, name: str) -> int:
        """Read a degree or a count under the same meaning as a knob; 1: the file does not state it, or states 0 or 1."""
        value = self.take(key)
        if value is None or value in (0, 1):
            return 1
        self._unread[key] = value
        size = self.whole(key) or 1
        self.set(name, size, key)
        return size

    def drop_tables(self, *prefixes: str) -> None:
        """Remove whole tables that carry no further information."""
        for key in [key for key in self._unread if key.startswith(prefixes)]:
            del self._unread[key]

    def drop(self, *keys: str) -> None:
        """Remove keys that carry no further information."""
        for key in keys:
            self._unread.pop(key, None)

    def imported(self, **fields: Any) -> Imported:
        """Return the result, with a note for every key that was not read."""
        for key, value in self._unread.items():
            why = "its value is chosen when a run begins" if value == AUTO else "is not a knob; trials run without it"
            self.notes.append(f"{key}={short_text(value)}: {why}")
        knobs = {name: self.knobs[name] for name in KNOBS if name in self.knobs}
        assumed = {name: value for name, value in self.assumed.items() if name not in knobs}
        return Imported(
            knobs=knobs, assumed=assumed, of_hidden_size=self.of_hidden_size, notes=tuple(self.notes), keys=self.keys,
            settings=self.settings, **fields,
        )  # fmt: skip


def flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested tables with its path, with dots."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of flat keys. What is set within a setting that is no table replaces it."""
    content: dict[str, Any] = {}
    for key, value in settings.items():
        *tables, name = key.split(".")
        node = content
        for table in tables:
            if not isinstance(node.get(table), dict):
                node[table] = {}
            node = node[table]
        node[name] = {} if value == {} else value
    return content


def short_text(value: object) -> str:
    """The value as text, cut after 60 characters."""
    text = value_text(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


FURTHER = re.compile(
    r"(instruct|base|chat|hf|v0\d|pretrain|sft|peft|lora|finetune|config|\d+gpus?|[hab]\d{3}|gb\d{3}|bf16|fp8\w*)*"
)
"""What may follow a model's name in the name of a recipe or of a checkpoint."""


def model_named(text: str) -> ModelSpec | None:
    """The model that a flavour, a recipe's name or a Hugging Face id means, by names alone; None: it is unknown."""
    words = plain_name(text.rsplit("/", 1)[-1])
    for prefix in ("meta", "nvidia"):
        words = words.removeprefix(prefix)
    names = _names()
    fitting = [
        name
        for name in names
        if words.startswith(name) and FURTHER.fullmatch(words[len(name) :]) and _has_sizes(text.lower(), names[name])
    ]
    return known_model(names[max(fitting, key=len)] if fitting else text)


def _has_sizes(text: str, preset: str) -> bool:
    """Whether the text has the preset's sizes as words: `Qwen2-57B` is not `qwen2.5-7b`."""
    return all(re.search(rf"(?<![\d.]){re.escape(size)}", text) for size in re.findall(r"\d+(?:\.\d+)?[bm]\b", preset))


@cache
def _names() -> dict[str, str]:
    """Plain names of the presets, other names of them, and models of the same shape."""
    return {
        **{plain_name(name): name for name in model_preset_names()},
        "llama318b": "llama-3-8b", "llama3170b": "llama-3-70b", "llama3370b": "llama-3-70b", "llama3405b": "llama-3.1-405b",
        "deepseekv3671b": "deepseek-v3", "deepseekv31": "deepseek-v3", "deepseekr1": "deepseek-v3",
        "deepseekv316b": "deepseek-v2-lite",
    }  # fmt: skip


REMEDY = (
    "give a DeepSpeed configuration (JSON), a file of `accelerate config` (YAML), a torchtitan TOML file, a launch script of "
    "Megatron-LM, settings of Megatron-Bridge (YAML), a recipe of Axolotl, LLaMA-Factory or TRL, or a best-config.json"
)
MOST_VALUES, DEEPEST = 100_000, 100
"""Values of a file, and tables within tables. A file that refers to its own parts stands for more than fit into memory."""


_ONE_FILE: ContextVar[bool] = ContextVar("one_file", default=False)


@contextmanager
def one_file() -> Iterator[None]:
    """Read recipes of strangers: within, no file is opened or looked for beside the recipe itself."""
    token = _ONE_FILE.set(True)
    try:
        yield
    finally:
        _ONE_FILE.reset(token)


def reads_one_file() -> bool:
    """Whether this is within `one_file`."""
    return _ONE_FILE.get()


def named_file(recipe: Path, name: str) -> Path | None:
    """The file that a recipe names: in its folder, in one above it, as repositories have it, or in the working directory.

    Returns: None if it is not there.

    Raises:
        RequestError: no other file is read here (`one_file`).
    """
    if reads_one_file():
        raise RequestError(
            "from", "the recipe names another file, and no file is read here", "give the settings of that file instead"
        )
    try:
        return next((file for folder in (*recipe.absolute().parents, Path()) if (file := folder / name).is_file()), None)
    except (OSError, ValueError):  # no name of a file
        return None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError("from", f"{path} cannot be read ({error.strerror})", REMEDY) from error
    except UnicodeDecodeError as error:
        raise RequestError("from", f"{path} is not a text", REMEDY) from error


def read_table(path: Path) -> Mapping[str, Any]:
    """Return the file's table: JSON with or without comments, TOML or YAML. Its suffix says what is tried first.

    Raises:
        RequestError: the file cannot be read, or does not hold a table.
    """
    return read_table_and_repeated(path)[0]


def read_table_and_repeated(path: Path) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """As `read_table`, with the keys that one table of a JSON file states twice."""
    text = read_text(path)
    readers: list[Callable[[str], Any]] = [yaml_value, _toml] if path.suffix != ".toml" else [_toml, yaml_value]
    if SPACE.sub("", text, count=1).startswith("{"):
        # YAML's tables have braces too, and less in them than people write in JSON.
        readers = [yaml_value, HjsonReader] if path.suffix in (".yaml", ".yml") else [HjsonReader]
    problems: list[str] = []
    for reader in readers:
        try:
            content = reader(text)
        except RecursionError:
            raise RequestError("from", f"{path} is nested too deeply", REMEDY) from None
        except OverflowError:
            raise RequestError("from", f"{path} has more than {MOST_VALUES:,} values", REMEDY) from None
        except (ValueError, yaml.YAMLError) as error:
            problems.append(" ".join(str(error).split()))
            continue
        problems.append("")
        table, repeated = (content.content, tuple(content.repeated)) if isinstance(content, HjsonReader) else (content, ())
        if isinstance(table, Mapping):
            _require_small(path, table)
            return {str(key): value for key, value in table.items()}, repeated
    if not problems[0]:
        raise RequestError("from", f"{path} does not hold a table", REMEDY)
    syntax_problem = "not TOML" if path.suffix == ".toml" else "neither JSON nor YAML"
    raise RequestError("from", f"{path} is {syntax_problem} ({problems[0]})", REMEDY)


def _toml(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _require_small(path: Path, content: object) -> None:
    """Refuse a table of more than `MOST_VALUES`, or deeper than `DEEPEST`."""
    level, count = [content], 0
    for _ in range(DEEPEST):
        below: list[object] = []
        for value in level:
            below += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
        count += len(level)
        if count > MOST_VALUES:
            raise RequestError("from", f"{path} has more than {MOST_VALUES:,} values", REMEDY)
        if not below:
            return
        level = below
    raise RequestError("from", f"{path} is nested too deeply", REMEDY)


def yaml_value(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        OverflowError: it stands for more than `MOST_VALUES`: merges and references are counted before they are made.
    """
    loader = yaml.SafeLoader(text)
    root, sizes = loader.get_single_node(), dict[int, float]()

    def size_of(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # of a part of itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            sizes[id(node)] = 1 + sum(
                size_of(child) for part in parts for child in (part if isinstance(part, tuple) else (part,))
            )
        return sizes[id(node)]

    if root is None:
        return None
    if size_of(root) > MOST_VALUES:
        raise OverflowError
    return loader.construct_document(root)
