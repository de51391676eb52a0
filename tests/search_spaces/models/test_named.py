"""Models by names as people write them: ids of the hub, its cache, and what is never guessed."""

import json
from pathlib import Path

import pytest

from search_spaces.errors import ModelFormatError, UnknownNameError
from search_spaces.models.huggingface import known_model, resolve_model
from search_spaces.models.named import cached_ids, model_names
from search_spaces.preset_files import preset_tables

CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 200, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def put(cache: Path, model: str, revision: str, current: bool = True, **changes: object) -> None:
    folder = cache / f"models--{model.replace('/', '--')}"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "config.json").write_text(json.dumps(CONFIG | changes))
    if current:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("NousResearch/Llama-3.2-3B-Instruct", "llama-3.2-3b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("qwen3-14b-base", "qwen3-14b"),
        ("google/gemma-2-27b-it", "gemma-2-27b"),
        ("allenai/OLMo-2-1124-13B-SFT", "olmo-2-13b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("EleutherAI/pythia-160m-deduped", "pythia-160m"),
        ("microsoft/Phi-3-medium-4k-instruct", "phi-3-medium"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("zai-org/GLM-4.5", "glm-4.5"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
    ],
)
def test_an_id_of_the_hub_is_the_preset_of_its_shape(cache: Path, text: str, preset: str) -> None:
    model = resolve_model(text)
    assert model.name == text.rpartition("/")[2]
    assert model.parameter_count == resolve_model(preset).parameter_count
    assert any("by the name" in note for note in model.notes)


def test_versions_differ_where_their_files_do() -> None:
    first, third = (known_model(f"mistralai/Mistral-7B-Instruct-v0.{version}") for version in (1, 3))
    assert first is not None and third is not None
    assert (first.vocab_size, first.sliding_window) == (32000, 4096)
    assert (third.vocab_size, third.sliding_window) == (32768, 0)
    longer = known_model("meta-llama/Llama-3.1-8B")
    assert longer is not None and longer.rope_scaling is not None
    assert (longer.sequence_length, longer.rope_theta, longer.rope_scaling.factor) == (131072, 5e5, 8.0)


@pytest.mark.parametrize("text", ["unsloth/llama-3-8b-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen3-4B-FP8"])
def test_quantised_weights_are_known_by_the_name(text: str) -> None:
    model = known_model(text)
    assert model is not None
    assert model.frozen_bits == (8 if text.endswith("FP8") else 4)
    assert any("--frozen-bits" in note for note in model.notes)


def test_a_text_model_by_the_name_of_a_larger_one_says_so() -> None:
    larger, text = known_model("google/gemma-3-12b-it"), known_model("google/gemma-3-1b-it")
    assert larger is not None and text is not None
    assert ["vision" in " ".join(model.notes) for model in (larger, text)] == [True, False]


@pytest.mark.parametrize("name", preset_tables("model_names")["shapes"])
def test_every_known_name_is_a_model_with_the_experts_of_its_name(name: str) -> None:
    model = known_model(name)
    assert model is not None
    experts = name.startswith(("mixtral", "kimi", "deepseek-v3")) or name == "deepseek-r1" or "-a3b" in name or "-a22b" in name
    assert bool(model.num_experts) == experts


@pytest.mark.parametrize(
    "text",
    ["somebody/Llama-3.1-8B-merged", "NousResearch/Hermes-3-Llama-3.1-8B", "Qwen/Qwen2-57B-A14B-Instruct", "llama-3.1-9b"],
)
def test_what_is_unknown_is_not_guessed(cache: Path, text: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{text}: no model preset has this name") as caught:
        resolve_model(text)
    assert ("hf download" in str(caught.value)) == ("/" in text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_in_a_folder_that_exists_is_no_id_of_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelFormatError, match="runs/confg: no such file or directory"):
        resolve_model("runs/confg")


def test_the_cache_of_the_hub_comes_first(cache: Path) -> None:
    put(cache, "Qwen/Qwen3-8B", "aaaa1111", current=False, num_hidden_layers=5)
    put(cache, "Qwen/Qwen3-8B", "bbbb2222", num_hidden_layers=4)
    put(cache, "somebody/finetuned", "cccc3333")
    model = resolve_model("Qwen/Qwen3-8B")
    assert (model.name, model.num_layers) == ("Qwen3-8B", 4)
    assert "config.json of the hub's cache, revision bbbb2222" in model.notes
    assert resolve_model("somebody/finetuned").num_layers == 3
    assert cached_ids() == ("Qwen/Qwen3-8B", "somebody/finetuned")


def test_a_family_that_is_not_read_is_named_with_the_module_to_plan_instead(cache: Path) -> None:
    put(cache, "somebody/bird", "dddd4444", model_type="falcon")
    with pytest.raises(
        ModelFormatError, match=r"'falcon' is not a supported family; give hf:\S*models--somebody--bird\S*config.json"
    ):
        resolve_model("somebody/bird")


def test_a_folder_is_not_an_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen3-8B").num_layers == 3
    with pytest.raises(ModelFormatError, match="no such file"):
        resolve_model("./Qwen/Qwen3-4B")


def test_names_of_shapes_are_not_those_of_presets() -> None:
    assert len(model_names()) == len(preset_tables("models")) + len(preset_tables("model_names")["shapes"])
