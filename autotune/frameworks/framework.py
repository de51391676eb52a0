"""How a framework is declared: its options, its checks, and what it does with them; and one configuration under check."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from autotune.frameworks.imported import Imported, switch_of
from autotune.frameworks.shell import LAUNCHER
from autotune.question.assumption import VOCABULARY
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import FROZEN_BITS
from search_spaces.trial_config import TrialConfig

Settings = Mapping[str, Any]
BATCH = "global_batch_size"
"""The field of a question whose option states the samples per optimizer step over all ranks."""
MOST = 1024
"""Largest count that a fix tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the user says beside the file. None: not said, so the file's own statement holds, if it has one."""

    model: ModelSpec | None = None
    cluster: ClusterSpec | None = None
    ranks: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of a launch script, and its arguments by their numbers."""
    vocab_size: int | None = None
    knobs: Mapping[str, Value] = field(default_factory=dict)
    """Knob -> its value in the program that trains, of those that the file leaves to it."""
    version: str = ""
    """The framework's version; empty: the one that the checks were written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintCase:
    """A configuration, read as knobs, in its surroundings."""

    framework: "Framework"
    imported: Imported
    around: Surroundings
    source: str
    """Path of the file, for messages and for the files beside it."""

    @property
    def config(self) -> TrialConfig:
        """The configuration as knobs, with what the user says, or else is assumed, of those that the file does not state."""
        assumed = {name: value for name, value in self.assumed.items() if name in KNOBS}
        return TrialConfig().replace({**assumed, **self.around.knobs, **self.imported.knobs, **self.of_model})

    @property
    def of_model(self) -> dict[str, Value]:
        """Knob -> its value, of those that follow from the model: DeepSpeed's buckets, and adapters' frozen weights."""
        model, imported = self.model, self.imported
        if model is None:
            return {}
        values: dict[str, Value] = {name: size(model.hidden_size) for name, size in imported.of_hidden_size.items()}
        dtype = next((name for name, bits in FROZEN_BITS.items() if bits == model.frozen_bits < 16), None)
        adapts = imported.knobs.get("lora_rank") and "frozen_dtype" not in {**imported.knobs, **self.around.knobs}
        return values | ({"frozen_dtype": dtype} if adapts and dtype else {})

    @property
    def assumed(self) -> Mapping[str, Value]:
        """Knob, or size of the model, -> its value, of those that the file leaves to the program that trains and the user does
        not state. Such programs take fp32 on CPUs; the type of reductions follows the precision."""
        around, assumed = self.around, dict(self.imported.assumed)
        if "precision" in assumed and around.cluster is not None and around.cluster.device.kind == "cpu":
            assumed |= {"precision": "fp32", "reduce_dtype": "fp32"}
        if around.model is not None or around.vocab_size is not None:
            assumed.pop(VOCABULARY, None)
        precision = around.knobs.get("precision")
        if "precision" in assumed and "reduce_dtype" in assumed and precision in ("fp32", "bf16", "fp16"):
            assumed["reduce_dtype"] = precision
        return {name: value for name, value in assumed.items() if name not in around.knobs}

    @property
    def model(self) -> ModelSpec | None:
        """The model; None: unknown."""
        model, vocabulary = self.around.model or self.imported.model, self.around.vocab_size
        return model if model is None or vocabulary is None else dataclasses.replace(model, vocab_size=vocabulary)

    @property
    def ranks(self) -> int | None:
        """Ranks of the run; None: unknown."""
        cluster = self.around.cluster
        return (
            self.around.ranks or (cluster.world_size if cluster else None) or self.imported.ranks or self.imported.started_ranks
        )

    @property
    def replicas(self) -> int | None:
        """Data-parallel ranks; None: unknown, or the degrees do not divide the ranks."""
        size = self.config.model_parallel_size
        return self.ranks // size if self.ranks and self.ranks % size == 0 else None

    @property
    def batch(self) -> int | None:
        """Samples per optimizer step over all ranks; None: unknown."""
        batch = self.around.global_batch_size or self.imported.global_batch_size
        if batch is None and self.imported.samples_per_rank and self.replicas:
            return self.imported.samples_per_rank * self.replicas
        return batch

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample; None: not stated."""
        return self.around.sequence_length or self.imported.sequence_length

    def get(self, key: str, default: Any = None) -> Any:
        """A setting of the file."""
        value = self.imported.settings.get(key)
        return default if value is None else value

    def on(self, key: str) -> bool:
        """Whether a switch of the file is on."""
        return switch_of(self.get(key)) is True

    def key_of(self, knob: str) -> str:
        """The setting that states a knob, or that would."""
        option = self.framework.option_of(knob)
        return self.imported.keys.get(knob) or (option.key if option else knob)

    def changed(self, changes: Settings) -> "LintCase":
        """The case with other settings; None: a setting is left out.

        Raises:
            RequestError: a value is not valid.
        """
        settings = {**self.imported.settings, **changes}
        settings = {key: value for key, value in settings.items() if value is not None}
        undecided = {key: by for key, by in self.imported.undecided.items() if key not in settings}
        read = self.framework.read(settings, self.source)
        imported = dataclasses.replace(read, undecided=undecided, started_ranks=self.imported.started_ranks)
        return dataclasses.replace(self, imported=imported)

    def sized(self, config: TrialConfig, batch: int) -> Settings:
        """The settings that give the case, whose layout is written, its size and its batch; unchanged ones are left out.

        Args:
            config: the layout that is meant.
            batch: samples per optimizer step, over all ranks.
        """
        cluster = self.around.cluster
        assert cluster is not None
        launcher = {
            f"{LAUNCHER}nnodes": cluster.nodes,
            **{f"{LAUNCHER}{name}": cluster.devices_per_node for name in ("nproc_per_node", "nproc-per-node")},
        }
        settings = {key: value for key, value in launcher.items() if key in self.imported.settings}
        settings |= self.framework.sizes(self, config, batch)
        return {key: value for key, value in settings.items() if self.get(key) != value}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of a framework: one row of its table, which reading, writing, checking and carrying use."""

    key: str
    """As the framework's files spell it, with dots between tables."""
    knob: str = ""
    """The knob, or the field of a question (`global_batch_size`), that it states; empty: none."""
    words: Mapping[Any, Any] | None = None
    """Value of the knob -> the framework's; None: the same."""
    changes: bool = True
    """Whether a change of the knob is written as this setting alone."""
    before: tuple[str, ...] = ()
    """Its keys in versions that are no longer read."""
    after: str = ""
    """Its key in a later version that is not read yet; empty: the same."""
    field: str = ""
    """What it states to the reader of trainers (`autotune.frameworks.trainer`), if that is no knob."""

    def written(self, value: Value) -> Settings:
        """The setting that gives the knob a value; empty: the framework has no word for it."""
        if self.words is None:
            return {self.key: value}
        return {self.key: self.words[value]} if value in self.words else {}


def knobs_of(options: Iterable[Option]) -> frozenset[str]:
    """The knobs that a table's options state."""
    return frozenset(option.knob for option in options if option.knob in KNOBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a framework refuses, ignores or changes."""

    name: str
    key: str
    """The setting that is blamed."""
    effect: Effect
    problem: str | Callable[[LintCase], str | None]
    """One clause; None: nothing is wrong."""
    remedy: str
    holds: Callable[[LintCase], Any] = field(default=lambda _: True)
    """Whether the problem is there."""
    fix: Settings | Callable[[LintCase], Settings] = field(default_factory=dict)
    """The settings to change; empty: `remedy` says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: how its settings are spelled, and what it does with them."""

    name: str
    title: str
    checked: str
    """The version whose source the checks were compared with."""
    options: tuple[Option, ...]
    """Its table; of several rows of one knob the first is blamed for it."""
    read: Callable[[Settings, str], Imported]
    checks: tuple[Check, ...]
    rules: frozenset[str]
    """Names of the rules of `search_spaces.rules` that hold for it as they are."""
    sizes: Callable[[LintCase, TrialConfig, int], Settings]
    """The settings that state the ranks and the batch of a case whose layout is written; see `LintCase.sized`."""
    rewrite: Callable[[LintCase, str, Value], Settings | None] = field(default=lambda _case, _knob, _value: None)
    """The settings that give a knob another value, where one option alone does not; None: its option does."""
    as_run: Callable[[ModelSpec, TrialConfig], ModelSpec] = field(default=lambda model, _: model)
    """The model as the framework divides it."""
    undeclared_findings: Callable[[LintCase], Iterable[Finding]] = field(default=lambda _: ())
    """Findings that are not declared one by one: settings that it does not know, or the findings of another table."""
    predicted: Mapping[str, Value] = field(default_factory=dict)
    """Knobs that predictions have beside the file's: kernels that the framework always runs."""
    memory_arguments: Callable[[Settings], dict[str, str] | None] = field(default=lambda _: None)
    """What settings state of what Megatron-LM or Transformers keeps: field of `Megatron` or `Transformers` (with the word
    `states`) -> its word; None: neither trains."""
    experts_borrow: bool = False
    """Whether expert-parallel groups take tensor- and context-parallel ranks too, as a mesh of their own."""
    spans_domains: Callable[[LintCase], str | None] = field(default=lambda _: None)
    """Why expert groups beyond a link domain fail, instead of being slow; None: they are slow."""
    expert_tensor: Callable[[LintCase], int] = field(default=lambda _: 1)
    """Ranks that divide each expert's matrices."""
    samples_per_pass: Callable[[LintCase], int | None] = field(default=lambda case: case.batch)
    """Samples of one pass through a pipeline's schedule, over all ranks."""
    prefixes: tuple[str, ...] = ("",)
    """How its settings begin; empty: it reports each setting that it does not know."""
    variables: tuple[str, ...] = ()
    """Environment variables that the checks read, as settings; a file that a script sources may set them."""

    def option_of(self, knob: str) -> Option | None:
        """The first option that states a knob."""
        return next((option for option in self.options if option.knob == knob), None)

    def write(self, case: LintCase, knob: str, value: Value) -> Settings:
        """The settings that give a knob another value; empty: there are none."""
        settings = self.rewrite(case, knob, value)
        if settings is not None:
            return settings
        option = self.option_of(knob)
        return option.written(value) if option is not None and option.changes else {}


@cache
def closest(key: str, known_keys: tuple[str, ...], cutoff: float) -> list[str]:
    """The closest known setting, if one is close: asked for each variant of a case, and slow."""
    return difflib.get_close_matches(key, known_keys, n=1, cutoff=cutoff)


def unknown(case: LintCase, key: str, known_keys: Iterable[str], effect: Effect, cutoff: float = 0.6) -> Finding:
    """The finding about a setting that the framework does not know, with the closest one that it knows.

    `known_keys`: whole settings, as `key`.
    """
    close = closest(key, tuple(sorted(known_keys)), cutoff)
    meant = next((name for name in close if name not in case.imported.settings), None)
    remedy = f"did you mean {meant}?" if meant else f"leave {key} out"
    return Finding(
        rule="unknown-key",
        key=key,
        effect=effect,
        problem=f"{case.framework.title} has no such setting",
        remedy=remedy,
        fix={key: None, **({meant: case.get(key)} if meant else {})},
    )
