"""A bundle: a file of measurements, in parts that are signed by those who measured.

A part holds the measurements of one export, and stays as it is when bundles are merged, so that its signature remains valid and
its sources remain apart. The same measurements always give the same bytes.

    {"format": "autotune-knowledge", "version": 1, "parts": [{"key": …, "signature": …, "content": {…}}]}
"""

import base64
import binascii
import dataclasses
import hmac
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from autotune.errors import KnowledgeError, MeasurementsError
from autotune.evaluation.validation.csv_file import Record
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.table import read_records
from autotune.knowledge.anonymous import COLUMNS
from autotune.knowledge.measurement import Measurement, Setting, Trial, trial_measurement
from autotune.knowledge.signature import fingerprint, is_signed_by, public_bytes
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import check_value
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial_config import TrialConfig

FORMAT = "autotune-knowledge"
VERSION = 1
MOST_MEASUREMENTS = 200_000
LONGEST_TEXT = 2_000
_AGAIN = "export it again with `autotune knowledge export`"
_ROW_KEYS = frozenset({"source", "columns", "repeats", "noise"})
_TRIAL_KEYS = frozenset(
    {"source", "setting", "config", "samples_per_second", "step_seconds", "peak_memory_bytes", "outcome", "repeats", "noise"}
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The measurements of one export."""

    key: bytes
    """The public key of who exported it."""
    signature: bytes
    content: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    """Their sources begin with the fingerprint of the key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """Parts in a fixed order, whose signatures are valid. Whether their keys are trusted is another question."""

    parts: tuple[Part, ...]

    @property
    def duplicates(self) -> int:
        """Measurements that a part has in common with an earlier one, or with itself."""
        return sum(len(part.measurements) for part in self.parts) - len(distinct(self.parts))


def pseudonym(key: Ed25519PrivateKey, name: str) -> str:
    """The name of a source in bundles: equal in all exports with the key, and no way back without it."""
    secret = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return hmac.new(secret, name.encode(), "sha256").hexdigest()[:12]


def signed_part(measurements: Sequence[Measurement], key: Ed25519PrivateKey) -> Part:
    """A part with these measurements, each once."""
    content = content_of(measurements)
    public = public_bytes(key)
    return Part(
        key=public,
        signature=key.sign(_message(content)),
        content=content,
        measurements=_read_content(content, "measurements", fingerprint(public)),
    )


def merged(bundles: Iterable[Bundle]) -> Bundle:
    """All parts of the bundles, each once."""
    parts = {(part.key, part.signature): part for bundle in bundles for part in bundle.parts}
    return Bundle(parts=tuple(parts[each] for each in sorted(parts)))


def distinct(parts: Iterable[Part]) -> tuple[Measurement, ...]:
    """The measurements of the parts, each once: a later export of the same source contains the earlier measurements too."""
    found: dict[str, Measurement] = {}
    for part in parts:
        for plain, measurement in zip(part.content["measurements"], part.measurements, strict=True):
            setting = part.content["settings"][plain["setting"]] if "setting" in plain else None
            found.setdefault(_text([fingerprint(part.key), {**plain, "setting": setting}]), measurement)
    return tuple(found.values())


def bundle_text(bundle: Bundle) -> str:
    """The file's text."""
    parts = [{"key": _base64(part.key), "signature": _base64(part.signature), "content": part.content} for part in bundle.parts]
    return _text({"format": FORMAT, "version": VERSION, "parts": parts}) + "\n"


def read_bundle(text: str, name: str) -> Bundle:
    """Read a file's text, and verify all signatures.

    Raises:
        KnowledgeError: it is damaged, has another version, or a signature is not by its key.
    """
    document = parse_json(text, name)
    if document.get("format") != FORMAT:
        raise KnowledgeError(f"{name}: format", f"{_short(document.get('format'))} is not {FORMAT!r}", "give a bundle")
    if document.get("version") != VERSION:
        problem = f"{_short(document.get('version'))} is not {VERSION}, the version that this release reads"
        raise KnowledgeError(f"{name}: version", problem, "use the release that wrote it, or ask for another export")
    parts = document.get("parts")
    if not isinstance(parts, list) or not parts:
        raise KnowledgeError(f"{name}: parts", "is not a list of parts", _AGAIN)
    return merged([Bundle(parts=tuple(_part(plain, f"{name}: parts[{place}]") for place, plain in enumerate(parts)))])


def parse_json(text: str, name: str) -> dict[str, Any]:
    """The JSON object of a text.

    Raises:
        KnowledgeError: it is something else.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise KnowledgeError(name, f"is not JSON ({error})", "copy the file again, or export it again") from error
    if not isinstance(document, dict):
        raise KnowledgeError(name, "is not an object of JSON", "give a bundle")
    return document


def content_of(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """The measurements as plain data in a fixed order, each once."""
    settings: dict[str, Any] = {}
    drafts = []
    for measurement in measurements:
        plain, setting = _plain(measurement), measurement.trial.setting if measurement.trial else None
        if setting is not None:
            text = _text(to_plain(setting))
            settings[text] = to_plain(setting)
            plain["setting"] = text
        drafts.append(plain)
    places = {text: place for place, text in enumerate(sorted(settings))}
    numbered = [{**plain, "setting": places[plain["setting"]]} if "setting" in plain else plain for plain in drafts]
    once = {_text(plain): plain for plain in numbered}
    return {"settings": [settings[text] for text in sorted(settings)], "measurements": [once[text] for text in sorted(once)]}


def read_content(content: Any, name: str) -> tuple[Measurement, ...]:
    """Measurements from plain data without a signature.

    Raises:
        KnowledgeError: a field is damaged.
    """
    return _read_content(content, name, "")


def _part(plain: Any, where: str) -> Part:
    if not isinstance(plain, dict) or set(plain) != {"key", "signature", "content"}:
        raise KnowledgeError(where, "is not a part with key, signature and content", _AGAIN)
    key, signature = _bytes(plain["key"], 32, f"{where}.key"), _bytes(plain["signature"], 64, f"{where}.signature")
    if not isinstance(plain["content"], dict) or not is_signed_by(key, signature, _message(plain["content"])):
        problem = f"is not by the key {fingerprint(key)}: the measurements were changed, or the signature is forged"
        raise KnowledgeError(f"{where}.signature", problem, "do not use it; ask its sender for the original file")
    measurements = _read_content(plain["content"], f"{where}.content", fingerprint(key))
    return Part(key=key, signature=signature, content=plain["content"], measurements=measurements)


def _read_content(content: Any, where: str, prefix: str) -> tuple[Measurement, ...]:
    if not isinstance(content, Mapping) or set(content) != {"settings", "measurements"}:
        raise KnowledgeError(where, "does not have exactly settings and measurements", _AGAIN)
    plain_settings, plain = content["settings"], content["measurements"]
    if not isinstance(plain_settings, list | tuple) or not isinstance(plain, list | tuple):
        raise KnowledgeError(where, "has no lists of settings and measurements", _AGAIN)
    if len(plain) > MOST_MEASUREMENTS:
        raise KnowledgeError(where, f"has more than {MOST_MEASUREMENTS:,} measurements", "export fewer")
    settings = [_setting(each, f"{where}.settings[{place}]") for place, each in enumerate(plain_settings)]
    return tuple(_measurement(each, settings, f"{where}.measurements[{at}]", prefix) for at, each in enumerate(plain))


def _setting(plain: Any, where: str) -> Setting:
    known = {field.name for field in dataclasses.fields(Setting)}
    if not isinstance(plain, Mapping) or set(plain) != known:
        raise KnowledgeError(where, "is not a model, a cluster, an engine and a workload", _AGAIN)
    for name in ("global_batch_size", "sequence_length"):
        _positive(plain, name, where, whole=True)
    try:
        setting = from_plain(Setting, plain)
    except (TypeError, ValueError, AttributeError, LookupError, SearchSpaceError) as error:
        raise KnowledgeError(where, f"cannot be read ({' '.join(str(error).split())[:200]})", _AGAIN) from error
    if (wrong := _of_wrong_type(setting)) is not None:
        raise KnowledgeError(f"{where}.{wrong}", "has a value of another type, or no finite number", _AGAIN)
    return setting


_PLAIN: Mapping[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""Type of a field -> types of its values."""


def _of_wrong_type(value: Any) -> str | None:
    """The name of a field, here or further in, whose value has not its type: decoders do not check numbers and texts."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            if (found := _of_wrong_type(inner)) is not None:
                return f"{field.name}.{found}"
        elif isinstance(field.type, type) and field.type in _PLAIN and not _is_of(inner, _PLAIN[field.type]):
            return field.name
    return None


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and not (isinstance(value, float) and not math.isfinite(value))


def _measurement(plain: Any, settings: Sequence[Setting], where: str, prefix: str) -> Measurement:
    if not isinstance(plain, Mapping):
        raise KnowledgeError(where, "is not an object", _AGAIN)
    wanted = _TRIAL_KEYS if "setting" in plain else _ROW_KEYS
    if unknown := sorted(set(plain) - wanted) or sorted({"source", "noise", "repeats"} - set(plain)):
        raise KnowledgeError(f"{where}.{unknown[0]}", "is unknown or missing", _AGAIN)
    source = plain["source"]
    if not isinstance(source, str) or not 0 < len(source) <= 100:
        raise KnowledgeError(f"{where}.source", f"{_short(source)} is not the name of a source", _AGAIN)
    source = f"{prefix}/{source}" if prefix else source
    repeats, noise = _positive(plain, "repeats", where, whole=True), _positive(plain, "noise", where, zero=True)
    if "setting" in plain:
        trial = _trial(plain, settings, where)
        return trial_measurement(source, trial, int(repeats or 1), noise or 0.0)
    return Measurement(
        source=source, row=_row(plain.get("columns"), source, where), repeats=int(repeats or 1), noise=noise or 0.0
    )


def _trial(plain: Mapping[str, Any], settings: Sequence[Setting], where: str) -> Trial:
    place, outcome = plain["setting"], plain.get("outcome")
    if type(place) is not int or not 0 <= place < len(settings):
        raise KnowledgeError(f"{where}.setting", f"{_short(place)} is not the place of a setting", _AGAIN)
    rate, peak = (_positive(plain, name, where) for name in ("samples_per_second", "peak_memory_bytes"))
    _positive(plain, "step_seconds", where)
    if outcome not in ("ok", "oom") or (outcome == "ok") != (rate is not None):
        problem = f"{_short(outcome)} is neither ok with a rate nor oom without"
        raise KnowledgeError(f"{where}.outcome", problem, _AGAIN)
    try:
        given = plain.get("config", {})
        config = TrialConfig().replace({name: check_value(name, value) for name, value in given.items()})
    except (TypeError, ValueError, AttributeError, LookupError, SearchSpaceError) as error:
        raise KnowledgeError(f"{where}.config", f"cannot be read ({' '.join(str(error).split())[:200]})", _AGAIN) from error
    setting = settings[place]
    if not _runs(config, setting):
        problem = f"{config} does not divide {setting.cluster.world_size} devices and a batch of {setting.global_batch_size}"
        raise KnowledgeError(f"{where}.config", problem, _AGAIN)
    return Trial(setting=setting, config=config, samples_per_second=rate, peak_memory_bytes=peak)


def _runs(config: TrialConfig, setting: Setting) -> bool:
    """Whether the sizes of a configuration fit together: only then it has a time."""
    world, shards = setting.cluster.world_size, config.model_parallel_size
    if shards < 1 or world % shards or config.pipeline_parallel_size > setting.model.num_layers or config.micro_batch_size < 1:
        return False
    return config.gradient_accumulation_steps(setting.global_batch_size, world) >= 1


def _row(columns: Any, source: str, where: str) -> Row:
    if not isinstance(columns, Mapping):
        raise KnowledgeError(f"{where}.columns", "is not an object", _AGAIN)
    cells = {}
    for name, value in columns.items():
        good = name in COLUMNS and isinstance(value, str | bool | int | float) and len(str(value)) <= LONGEST_TEXT
        if not good:
            raise KnowledgeError(f"{where}.columns.{name[:40]}", "is not a column of a bundle, or not its value", _AGAIN)
        cells[name] = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else repr(value)
    rows, problems = read_records([Record(line=1, cells={**cells, "source": source})])
    if problems or len(rows) != 1:
        raise KnowledgeError(f"{where}.columns", (problems or ("says nothing",))[0], _AGAIN)
    return rows[0]


def _plain(measurement: Measurement) -> dict[str, Any]:
    trial, row = measurement.trial, measurement.row
    common = {"source": measurement.source, "repeats": measurement.repeats, "noise": measurement.noise}
    if trial is None:
        if row is None:
            raise MeasurementsError("row", "is missing", "give a row or a trial")
        columns = {name: getattr(row, name) for name in COLUMNS}
        stated = {name: to_plain(value) for name, value in columns.items() if value is not None and value != ""}
        return {**common, "columns": stated}
    rate, peak = trial.samples_per_second, trial.peak_memory_bytes
    seconds = trial.setting.global_batch_size / rate if rate else None
    figures = {"samples_per_second": rate, "step_seconds": seconds, "peak_memory_bytes": peak}
    return {
        **common,
        **{name: float(f"{value:.6g}") for name, value in figures.items() if value is not None},
        "config": trial.config.differences(TrialConfig()),
        "outcome": "oom" if rate is None else "ok",
        "setting": "",
    }


def _positive(plain: Mapping[str, Any], name: str, where: str, whole: bool = False, zero: bool = False) -> float | None:
    value = plain.get(name)
    if value is None:
        return None
    number = type(value) in ((int,) if whole else (int, float)) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        kind = "whole number" if whole else "number"
        raise KnowledgeError(f"{where}.{name}", f"{_short(value)} is not a positive {kind}", _AGAIN)
    return float(value)


def _message(content: Mapping[str, Any]) -> bytes:
    return f"{FORMAT} {VERSION}\n{_text(content)}".encode()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, length: int, where: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        data = b""
    if len(data) != length:
        raise KnowledgeError(where, f"is not {length} bytes in base64", _AGAIN)
    return data


def _short(value: Any) -> str:
    return repr(value)[:60]


def _refuse_constant(name: str) -> Callable[[str], Any]:
    raise ValueError(f"{name} is not a number")
