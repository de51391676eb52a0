"""`autotune models` and `autotune clusters`, and numbers of tokens with a unit."""

import json
from pathlib import Path

import pytest
from called import Command

from autotune.cli import fields
from autotune.cli.fields import model_reference
from autotune.errors import RequestError
from autotune.question.field import parse_length
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model


def test_models(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    for name, config in (("mine", (folder / "config.json").read_text()), ("odd", '{"model_type": "rwkv"}')):
        snapshot = folder / "hub" / f"models--me--{name}" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(config)
    answer = command("models", "--json")
    assert answer.status == 0, answer.err
    rows = {row["name"]: row for row in json.loads(answer.out)["models"]}
    model = resolve_model("qwen3-30b-a3b")
    row = rows["qwen3-30b-a3b"]
    assert (row["parameters"], row["num_experts"], row["source"]) == (model.parameter_count, 128, "preset")
    assert (rows["zephyr-7b-beta"]["source"], rows["me/mine"]["source"]) == ("known name", "hub's cache")
    assert "rwkv" in rows["me/odd"]["problem"]
    table = command("models")
    assert table.status == 0
    assert "me/odd (hub's cache) was not read:" in table.out
    assert "30.5 B" in next(line for line in (table.out + table.err).splitlines() if line.startswith("qwen3-30b-a3b "))


def test_clusters(command: Command) -> None:
    answer = command("clusters", "--json")
    assert answer.status == 0, answer.err
    document = json.loads(answer.out)
    machine = next(row for row in document["clusters"] if row["name"] == "p5.48xlarge")
    assert machine["inter_node_bandwidth"] == resolve_cluster("aws-p5").inter_node_bandwidth
    assert all(row["source"] for key in ("clusters", "devices") for row in document[key])
    table = command("clusters")
    assert table.status == 0
    assert any(line.startswith("5090") for line in (table.out + table.err).splitlines())


@pytest.mark.parametrize("name", ["models", "clusters"])
def test_a_row_fits_into_80_characters(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [line for line in command(name).out.splitlines() if line and not line.startswith("  ")]
    listed = json.loads(command(name, "--json").out)
    assert len(rows) == sum(len(entries) + 1 for entries in listed.values())
    assert max(map(len, rows)) <= 80 and "…" not in "".join(rows)


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8192), ("128K", 131072), ("1M", 2**20), ("1.5k", 1536)])
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length("sequence_length", text) == tokens


@pytest.mark.parametrize("text", ["0", "-8", "8kB", "0.3k", "long", ""])
def test_what_is_not_a_length(text: str) -> None:
    with pytest.raises(
        RequestError, match=r"sequence_length: .* is not a length; write a number of tokens, or one with k or M"
    ):
        parse_length("sequence_length", text)


def test_an_option_takes_lengths_and_sizes_with_units(command: Command) -> None:
    words = ("predict", "llama-3-8b", "--cluster", "8xH100", "--global-batch-size", 8, "--pin", "zero_stage=3", "--json")
    answer = command(*words, "--sequence-length", "4k", "--memory-limit", "40GiB")
    assert answer.status in (0, 1), answer.err
    assert json.loads(answer.out)["sequence_length"] == 4096
    refused = command(*words, "--sequence-length", "4x")
    assert refused.status == 2
    assert "8k = 8192" in refused.out + refused.err


def test_a_family_without_a_reader_is_taken_as_its_own_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bloom.json").write_text('{"model_type": "bloom", "n_layer": 2}')
    (folder / "broken.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    assert model_reference("bloom.json") == "bloom.json"  # without transformers, what reads it says what to do
    monkeypatch.setattr(fields, "has", lambda module: module == "transformers")
    assert model_reference("bloom.json") == "hf:bloom.json"
    assert "'bloom' is not a supported family; Hugging Face's own module of it is taken" in capsys.readouterr().err
    for name in ("broken.json", "gpt2", "hf:bloom.json", "config.json"):
        assert model_reference(name) == name
    assert capsys.readouterr().err == ""
