"""`autotune knowledge`: export, merge and check bundles of measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cli.documents import write_document
from autotune.cli.status import Status
from autotune.errors import KnowledgeError, RequestError
from autotune.evaluation.validation.table import read_table
from autotune.knowledge.bundle import Bundle, Part, bundle_text, distinct, merged, pseudonym, read_bundle, signed_part
from autotune.knowledge.collect import all_measurements, job_measurements, local_measurements
from autotune.knowledge.measurement import Collected, Measurement, joined, measurements_of_rows
from autotune.knowledge.read import read_knowledge, read_text
from autotune.knowledge.signature import fingerprint, own_key, read_public_key, record_trusted, trusted_keys
from autotune.knowledge.trust import Trust, trust_in
from autotune.ops.output import require_writable, write_whole
from autotune.prediction.equations.rates import shipped_rates
from autotune.text.console import Console
from storage.address import default_database_url
from storage.folder import has_default_database
from storage.store import open_store


def export_command(sources: Sequence[str], out: Path, key_file: Path | None, database: str | None, as_json: bool) -> Status:
    """Collect, sign and write. All sources are read before the file is written."""
    require_writable(out)
    key = own_key(key_file)

    def naming(text: str) -> str:
        return pseudonym(key, text)

    parts: list[Collected] = []
    tables = [Path(source) for source in sources if source.endswith(".csv")]
    for path in tables:
        rows = read_table(path).rows
        parts.append(measurements_of_rows(rows, {row.source: naming(f"table {row.source}") for row in rows}))
    jobs = [source for source in sources if not source.endswith(".csv")]
    if jobs or not tables:
        with open_store(database or default_database_url()) as store:
            parts += [job_measurements(store, store.job(job).id, naming) for job in jobs]
            parts += [] if sources else [all_measurements(store, naming)]
    found = joined(parts)
    left_out = found.left_out
    if not found.measurements:
        reasons = "; ".join(f"{count:,} left out: {why}" for why, count in left_out.items()) or "there is none"
        raise RequestError("sources", f"no measurement to export ({reasons})", "name jobs with trials, or tables")
    part = signed_part(found.measurements, key)
    write_whole(out, bundle_text(Bundle(parts=(part,))))
    document = {
        "file": str(out), "key": fingerprint(part.key), "measurements": len(part.measurements),
        "sources": _sources(part.measurements), "left_out": left_out,
    }  # fmt: skip
    lines = [
        f"wrote {_counted(part.measurements)} to {out}, signed by {fingerprint(part.key)}",
        *(f"{count:,} left out: {why}" for why, count in left_out.items()),
    ]
    return _shown(document, lines, as_json)


def merge_command(files: Sequence[Path], out: Path, as_json: bool) -> Status:
    """Read every bundle, then write one with their parts."""
    require_writable(out)
    bundles = [read_bundle(read_text(str(file)), str(file)) for file in files]
    whole = merged(bundles)
    write_whole(out, bundle_text(whole))
    kept = distinct(whole.parts)
    document = {
        "file": str(out), "parts": len(whole.parts), "measurements": len(kept), "duplicates": whole.duplicates,
        "sources": _sources(kept),
    }  # fmt: skip
    lines = [f"wrote {_counted(kept)} in {len(whole.parts)} parts to {out}", f"{whole.duplicates:,} duplicates count once"]
    return _shown(document, lines, as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Parsed options of `autotune knowledge check`."""

    bundle: str
    public_key: Path | None
    record: str | None
    against: str | None
    database: str | None
    json: bool


def check_command(options: CheckOptions) -> Status:
    """Verify, compare and print."""
    if options.record is not None and options.public_key is None:
        raise RequestError("record", "needs the key that is recorded", "give --public-key too")
    bundle = read_bundle(read_text(options.bundle), options.bundle)
    given = None if options.public_key is None else read_public_key(options.public_key)
    if given is not None and all(part.key != given for part in bundle.parts):
        signed = ", ".join(sorted({fingerprint(part.key) for part in bundle.parts}))
        problem = f"is {fingerprint(given)}, and {options.bundle} is signed by {signed}"
        raise KnowledgeError("public_key", problem, "ask the sender for the key, or do not use the bundle")
    if given is not None and options.record is not None:
        record_trusted(given, options.record)
    known = {given: options.record or "given"} if given is not None else trusted_keys()
    trust = trust_in(distinct(bundle.parts), _local(options), shipped_rates())
    document = {
        "file": options.bundle,
        "parts": [_part_document(part, known) for part in bundle.parts],
        "duplicates": bundle.duplicates,
        "sources": [_trust_document(each) for each in trust.values()],
        "trusted": all(part.key in known for part in bundle.parts),
        "contradicts": any(each.contradicts for each in trust.values()),
    }
    if options.json:
        write_document(document)
    else:
        _print(bundle, known, trust)
    return Status.OK if document["trusted"] and not document["contradicts"] else Status.FAILURE


def _local(options: CheckOptions) -> Sequence[Measurement]:
    if options.against is not None:
        return read_knowledge(options.against, options.database).measurements().measurements
    if options.database is None and not has_default_database():
        return ()
    with open_store(options.database or default_database_url()) as store:
        return local_measurements(store)


def _part_document(part: Part, known: Mapping[bytes, str]) -> dict[str, Any]:
    return {
        "key": fingerprint(part.key),
        "trusted": part.key in known,
        "name": known.get(part.key),
        "measurements": len(part.measurements),
        "sources": _sources(part.measurements),
    }


def _trust_document(trust: Trust) -> dict[str, Any]:
    return {
        "source": trust.source,
        "measurements": trust.measurements,
        "compared": trust.compared,
        "weight": trust.weight,
        "time_ratio": trust.time_ratio,
        "memory_ratio": trust.memory_ratio,
        "contradicts": trust.contradicts,
    }


def _print(bundle: Bundle, known: Mapping[bytes, str], trust: Mapping[str, Trust]) -> None:
    console = Console()
    parts = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("signed by", "trusted as", "measurements", "sources"):
        parts.add_column(heading, justify="left" if heading.endswith(("by", "as")) else "right")
    for part in bundle.parts:
        own = _sources(part.measurements)
        parts.add_row(fingerprint(part.key), Text(known.get(part.key, "not trusted")), f"{len(part.measurements):,}", str(own))
    console.print(parts, highlight=False)
    console.print(f"{bundle.duplicates:,} duplicates count once\n", highlight=False)
    sources = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("source", "measurements", "weight", ""):
        sources.add_column(heading, justify="right" if heading in ("measurements", "weight") else "left")
    for each in trust.values():
        verdict = f"contradicts local measurements: {each.text}" if each.contradicts else each.text
        sources.add_row(each.source, f"{each.measurements:,}", f"{each.weight:.2f}", Text(verdict))
    console.print(sources, highlight=False)


def _sources(measurements: Sequence[Measurement]) -> int:
    return len({each.source for each in measurements})


def _counted(measurements: Sequence[Measurement]) -> str:
    sources = _sources(measurements)
    return f"{len(measurements):,} measurement{'s' * (len(measurements) != 1)} of {sources} source{'s' * (sources != 1)}"


def _shown(document: Mapping[str, Any], lines: Sequence[str], as_json: bool) -> Status:
    if as_json:
        write_document(document)
    else:
        for line in lines:
            Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    return Status.OK
