"""`autotune knowledge`, and `--knowledge` of the commands that learn from measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
import table
from called import Answer, Command
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from known import measured, run_job
from measurements import row, sweep, write_table

from autotune.errors import KnowledgeError, RequestError
from autotune.knowledge.bundle import Bundle, bundle_text, content_of, distinct, read_bundle, signed_part
from autotune.loop.loop import run_job as run_to_its_end
from autotune.request.rows import request_to_row
from storage.store import open_store
from tests.sampling import sampled

PREDICT = ("predict", "qwen2-0.5b", "--cluster", "dgx-a100:1", "--global-batch-size", 32, "--sequence-length", 1024, "--json")
THEIRS = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)


@pytest.fixture
def keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOTUNE_KEYS", str(folder / "keys"))
    return folder / "keys"


@pytest.fixture
def theirs(folder: Path) -> Path:
    """A bundle of another organisation, and its key in a file."""
    path = folder / "theirs.json"
    path.write_text(bundle_text(Bundle(parts=(signed_part(measured("x", 20), THEIRS),))))
    (folder / "theirs.pub").write_bytes(
        THEIRS.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" ada@host\n"
    )
    return path


def refused(answer: Answer, *says: str) -> None:
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    for text in says:
        assert text in answer.err


@pytest.mark.prove
def test_from_export_to_prediction(command: Command, keys: Path, folder: Path) -> None:
    with open_store(str(folder / "jobs.db")) as store:
        job = run_job(store, measured("x", 8))
    write_table(folder / "t.csv", sweep(6))
    answer = command("knowledge", "export", job[:-1], "t.csv", "--out", "ours.json", "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["measurements"] == 14
    assert (keys / "own_key.pem").stat().st_mode & 0o077 == 0
    first = (folder / "ours.json").read_bytes()
    assert command("knowledge", "export", job, "t.csv", "--out", "again.json").status == 0
    assert (folder / "again.json").read_bytes() == first
    assert command("knowledge", "export", "--out", "jobs.json", "--json").out.count('"measurements": 8')
    answer = command("knowledge", "merge", "ours.json", "jobs.json", "--out", "all.json", "--json")
    assert {name: json.loads(answer.out)[name] for name in ("parts", "measurements", "duplicates", "sources")} == {
        "parts": 2, "measurements": 14, "duplicates": 8, "sources": 2
    }  # fmt: skip
    answer = command("knowledge", "check", "all.json")
    assert answer.status == 1  # the table's numbers are nobody's
    assert "own key" in answer.out
    assert "8 duplicates count once" in answer.out
    assert command("knowledge", "check", "jobs.json").status == 0
    # The database has these trials itself: nothing of them counts twice.
    both, alone = (json.loads(command(*PREDICT, *words).out) for words in (("--knowledge", "jobs.json"), ()))
    assert both["predicted"] == alone["predicted"]
    assert json.loads(command(*PREDICT, "--knowledge", job).out)["predicted"] == alone["predicted"]


@pytest.mark.prove
def test_a_bundle_of_others_counts_when_its_key_is_trusted(command: Command, keys: Path, theirs: Path) -> None:
    refused(command(*PREDICT, "--knowledge", theirs), "a key that is not trusted", "record it with: autotune knowledge check")
    answer = command("knowledge", "check", theirs)
    assert (answer.status, "not trusted" in answer.out) == (1, True)
    answer = command("knowledge", "check", theirs, "--public-key", "theirs.pub", "--record", "the other lab")
    assert answer.status == 0
    assert "the other lab" in answer.out
    assert "ada" not in (keys / "trusted_keys").read_text()
    blind = json.loads(command(*PREDICT).out)
    informed = json.loads(command(*PREDICT, "--knowledge", theirs).out)
    assert informed["predicted"]["step_seconds"] != blind["predicted"]["step_seconds"]
    assert informed["rests_on"].endswith("measurements of 1 source by others (20 on the same devices)")
    (theirs.parent / "other.pub").write_bytes(
        Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    refused(command("knowledge", "check", theirs, "--public-key", "other.pub"), "public_key: is ", "ask the sender for the key")


@pytest.mark.prove
def test_a_poisoned_bundle_is_reported_and_ignored(command: Command, keys: Path, folder: Path) -> None:
    poisoned = measured("x", 20, times=0.5, peaks=2.0)
    (folder / "bad.json").write_text(bundle_text(Bundle(parts=(signed_part(poisoned, THEIRS),))))
    (folder / "key.pub").write_bytes(THEIRS.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with open_store(str(folder / "jobs.db")) as store:
        run_job(store, measured("x", 6, seed=3))
    answer = command("knowledge", "check", "bad.json", "--public-key", "key.pub", "--record", "lab", "--json")
    (source,) = json.loads(answer.out)["sources"]
    assert (answer.status, source["contradicts"], source["compared"]) == (1, True, 5)
    assert source["time_ratio"] == pytest.approx(0.5, rel=0.1)
    assert source["memory_ratio"] == pytest.approx(2.0, rel=0.1)
    informed = command(*PREDICT, "--knowledge", "bad.json")
    assert "contradicts local measurements" in informed.err
    assert json.loads(informed.out)["predicted"] == json.loads(command(*PREDICT).out)["predicted"]


def test_forged_damaged_and_missing_files(command: Command, keys: Path, folder: Path, theirs: Path) -> None:
    text = theirs.read_text()
    (folder / "forged.json").write_text(text.replace('"samples_per_second":', '"samples_per_second":1'))
    (folder / "cut.json").write_text(text[:500])
    (folder / "later.json").write_text(text.replace('"version":1', '"version":9'))
    for name, says in (
        ("forged.json", "the measurements were changed, or the signature is forged; do not use it"),
        ("cut.json", "is not JSON"),
        ("later.json", "9 is not 1, the version that this release reads"),
    ):
        refused(command("knowledge", "check", name), name, says)
        refused(command(*PREDICT, "--knowledge", name), name, says)
        refused(command("knowledge", "merge", name, "--out", "merged.json"), name, says)
    assert not (folder / "merged.json").exists()
    refused(command(*PREDICT, "--knowledge", "none.json"), "knowledge: none.json does not exist", "give a table")
    refused(command(*PREDICT, "--knowledge", "ftp://host/b.json"), "is not an address of HTTP")
    refused(command("knowledge", "export", "--out", "new.json"), "sources: no measurement to export", "name jobs")
    (folder / "rsa.pem").write_text("-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n")
    refused(command("knowledge", "export", "--key", "rsa.pem"), "key: rsa.pem is not a private key", "ssh-keygen -t ed25519")
    assert not (folder / "new.json").exists()


def test_a_key_of_ssh_keygen_signs(command: Command, keys: Path, folder: Path) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    (folder / "id").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_table(folder / "t.csv", sweep(3))
    assert command("knowledge", "export", "t.csv", "--key", "id", "--out", "b.json").status == 0
    assert read_bundle((folder / "b.json").read_text(), "b").parts[0].key == key.public_key().public_bytes_raw()
    assert not keys.exists()


@pytest.mark.prove
@pytest.mark.parametrize("form", sampled(["table", "bundle"], every=2))
def test_tables_are_validated_with_knowledge_but_not_with_their_answers(
    command: Command, keys: Path, folder: Path, form: str
) -> None:
    written = sweep(12)
    write_table(folder / "asked.csv", written[:6])
    write_table(folder / "told.csv", [*written, row("far", source="other", num_gpus=16, dp=16, samples_per_s=150.0)])
    assert command("knowledge", "export", "told.csv", "--out", "told.json").status == 0
    told = "told.csv" if form == "table" else "told.json"
    blind, informed = (command("validate", "asked.csv", "--json", *words) for words in ((), ("--knowledge", told)))
    assert informed.status == 0, informed.err
    assert f"7 rows of {told} are learned from" in informed.err
    assert "left out: the table has the same measurements" in informed.err
    scores = [json.loads(each.out)["summary"] for each in (blind, informed)]
    assert scores[1] != scores[0]
    own = command("validate", "asked.csv", "--knowledge", "asked.csv")
    assert own.status == 2
    assert "knowledge: no row of asked.csv may be learned from" in own.err
    words = (
        "bench-search",
        "asked.csv",
        "--min-timed",
        2,
        "--trials",
        2,
        "--seeds",
        1,
        "--processes",
        1,
        "--strategies",
        "guided",
    )
    answer = command(*words, "--calibrate", "leave-source-out", "--knowledge", told, "--json")
    assert answer.status == 0, answer.err
    # A bundle's source has no name by which leave-source-out could know it: only copies are left out.
    assert f"{1 if form == 'table' else 7} rows of {told} are learned from" in answer.err


@pytest.mark.prove
def test_a_sweep_learns_from_a_bundle_and_keeps_it(keys: Path, folder: Path, command: Command) -> None:
    """The job has the measurements, so that a worker needs no file; its best-config.json does not pass them on."""
    from autotune.session.knowledge import with_knowledge
    from autotune.session.resolve import prepare

    content = content_of(measured("x", 6))
    with open_store(str(folder / "jobs.db")) as store:
        session = prepare(table.request(folder, strategy="guided", trials=3, confirm_repeats=0, knowledge=content))
        job = store.create_job(request_to_row(session.request)).id
        result = run_to_its_end(session, store, job, table.runner())
        assert result is not None
        assert "measurements of 1 source by others (6 on others)" in store.prior(job)["source"]  # type: ignore[index]
    told: list[str] = []
    own = with_knowledge(table.request(folder, strategy="guided", knowledge=job), told.append, str(folder / "jobs.db"))
    assert isinstance(own.knowledge, dict)
    assert len(own.knowledge["measurements"]) == 3
    assert told[-1] == "knowledge: 3 of 3 measurements go with the job"
    with pytest.raises(RequestError, match="knowledge: random does not use earlier trials; use --strategy guided"):
        prepare(table.request(folder, strategy="random", knowledge=content))
    broken: dict[str, Any] = json.loads(json.dumps(content))
    broken["measurements"][0]["samples_per_second"] = -1.0
    with pytest.raises(KnowledgeError, match=r"knowledge.measurements\[0\].samples_per_second: -1.0 is not a positive number"):
        prepare(table.request(folder, strategy="guided", knowledge=broken))


def test_distinct_is_what_a_merge_keeps() -> None:
    part = signed_part([*measured("x", 4), *measured("x", 4)], THEIRS)
    assert len(distinct([part, part])) == 4
