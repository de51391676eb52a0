"""One configuration under check, and how a framework's checks are declared."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.frameworks.imported import Imported
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the user says beside the file. None: not said, so the file's own statement holds, if it has one."""

    model: ModelSpec | None = None
    cluster: ClusterSpec | None = None
    ranks: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
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
        """The configuration as knobs, with what is assumed of those that the file does not state."""
        return TrialConfig().replace({**self.assumed, **self.imported.knobs})

    @property
    def assumed(self) -> Mapping[str, Value]:
        """Knob -> its value, of those that the file leaves to the program that trains. Such programs take fp32 on CPUs."""
        assumed, cluster = self.imported.assumed, self.around.cluster
        if "precision" in assumed and cluster is not None and cluster.device.kind == "cpu":
            return {**assumed, "precision": "fp32", "reduce_dtype": "fp32"}
        return assumed

    @property
    def model(self) -> ModelSpec | None:
        """The model; None: unknown."""
        return self.around.model or self.imported.model

    @property
    def ranks(self) -> int | None:
        """Ranks of the run; None: unknown."""
        cluster = self.around.cluster
        return self.around.ranks or (cluster.world_size if cluster else None) or self.imported.ranks

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
        return str(self.get(key, "")).lower() == "true"

    def key_of(self, knob: str) -> str:
        """The setting that states a knob, or that would."""
        return self.imported.keys.get(knob) or self.framework.keys.get(knob) or knob

    def changed(self, changes: Settings) -> "LintCase":
        """The case with other settings; None: a setting is left out.

        Raises:
            RequestError: a value is not valid.
        """
        settings = {**self.imported.settings, **changes}
        settings = {key: value for key, value in settings.items() if value is not None}
        undecided = {key: by for key, by in self.imported.undecided.items() if key not in settings}
        imported = dataclasses.replace(self.framework.read(settings, self.source), undecided=undecided)
        return dataclasses.replace(self, imported=imported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a framework refuses, ignores or changes."""

    name: str
    key: str
    """The setting that is blamed."""
    effect: Effect
    remedy: str
    problem: Callable[[LintCase], str | None]
    """One clause; None: nothing is wrong."""
    fix: Callable[[LintCase], Settings] | None = None
    """The settings to change; None: `remedy` says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: how its settings are spelled, and what it does with them."""

    name: str
    title: str
    checked: str
    """The version whose source the checks were compared with."""
    read: Callable[[Settings, str], Imported]
    checks: tuple[Check, ...]
    rules: frozenset[str]
    """Names of the rules of `search_spaces.rules` that hold for it as they are."""
    keys: Mapping[str, str]
    """Knob -> the setting that states it, of the knobs that a change may touch; `global_batch_size` too."""
    write: Callable[[LintCase, str, Value], Settings]
    """The settings that give a knob another value; empty: there are none."""
    as_run: Callable[[ModelSpec, TrialConfig], ModelSpec] = field(default=lambda model, _: model)
    """The model as the framework divides it."""
    undeclared_findings: Callable[[LintCase], Iterable[Finding]] = field(default=lambda _: ())
    """Findings that are not declared one by one: settings that it does not know, or the findings of another table."""
    predicted: Mapping[str, Value] = field(default_factory=dict)
    """Knobs that predictions have beside the file's: kernels that the framework always runs."""
    experts_borrow: bool = False
    """Whether expert-parallel groups take tensor- and context-parallel ranks too, as a mesh of their own."""
    spans_domains: Callable[[LintCase], str | None] = field(default=lambda _: None)
    """Why expert groups beyond a link domain fail, instead of being slow; None: they are slow."""
    expert_tensor: Callable[[LintCase], int] = field(default=lambda _: 1)
    """Ranks that divide each expert's matrices."""
    samples_per_pass: Callable[[LintCase], int | None] = field(default=lambda case: case.batch)
    """Samples of one pass through a pipeline's schedule, over all ranks."""
    variables: tuple[str, ...] = ()
    """Environment variables that the checks read, as settings; a file that a script sources may set them."""


def unknown(case: LintCase, key: str, known_keys: Iterable[str], effect: Effect, cutoff: float = 0.6) -> Finding:
    """The finding about a setting that the framework does not know, with the closest one that it knows.

    `known_keys`: whole settings, as `key`.
    """
    close = difflib.get_close_matches(key, sorted(known_keys), n=1, cutoff=cutoff)
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
