"""`autotune fit`: the answer, the one document, machines side by side, files, where nothing fits."""

import ast
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import yaml
from called import Command


def test_the_answer_names_the_fastest_and_the_leanest_way(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("llama-2-7b", "--on", "1x4090", "--sequence-length", "2k", "--epochs", 3, "--dataset-rows", 50000, "--price", 0.4)
    answer = command("fit", *words)
    assert (answer.status, answer.err) == (0, "")
    assert "adapters have rank 16, on queries, keys, values and the outputs of attention (--lora-rank" in answer.out
    assert "llama-2-7b (6,738,415,616 parameters) on 1x4090: 1 x 23.5 GiB" in answer.out
    assert "\nfastest that fits: " in answer.out
    assert "3 epochs of 50,000 rows, each padded to 2,048 tokens: " in answer.out
    assert " hours, price " in answer.out
    assert "  does not fit: full, fp32 masters " in answer.out
    assert "nothing was run" in answer.out
    lines = answer.out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("trained ")) :]
    assert all(len(line) <= 80 for line in itertools.takewhile(lambda line: not line.startswith("  does"), table))
    everything = command("fit", *words, "--all").out
    assert everything.count("\nfull-8bit ") > 1 > answer.out.count("\nfull-8bit ")


@pytest.mark.prove
def test_json_is_one_document(command: Command) -> None:
    answer = command("fit", "opt-1.3b", "--cluster", "8x40GB", "--json")
    document = json.loads(answer.out)
    assert (answer.status, answer.err, document["sequence_length"]) == (0, "", 2048)
    fastest = document["setups"][document["fastest"]]
    assert fastest["fits"]
    assert fastest["predicted"]["fit_probability"] >= 0.95
    assert max(item["longest_sequence_length"] or 0 for item in document["setups"]) == 2048  # what it has positions for
    assert {item["method"] for item in document["setups"]} == {"full", "full-bf16", "full-8bit", "lora", "lora-8bit", "qlora"}


@pytest.mark.prove
def test_machines_are_compared_with_their_prices(command: Command) -> None:
    words = (
        "llama-3-8b",
        "--cards",
        "1x4090=0.4,2x4090=0.4,1xt4",
        "--sequence-length",
        "2k",
        "--run-tokens",
        "10M",
        "--methods",
    )
    answer = command("fit", *words, "qlora,lora")
    assert (answer.status, answer.err) == (0, "")
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line.startswith(("1x", "2x"))}
    assert set(rows) == {"1x4090", "2x4090", "1xt4"}
    assert rows["1xt4"].rstrip().endswith("-")
    documents = json.loads(command("fit", *words, "qlora", "--json").out)["cards"]
    assert [item["price"] for item in documents] == [0.4, 0.4, None]


@pytest.mark.prove
def test_where_nothing_fits_the_shortfall_and_what_would_do_are_told(command: Command) -> None:
    answer = command("fit", "llama-2-7b", "--cluster", "2x4GB", "--sequence-length", 4096)
    assert (answer.status, answer.err) == (3, "")
    assert "nothing fits: the nearest is " in answer.out
    assert " per card" in answer.out
    assert "possible remedies: " in answer.out
    refused = command("fit", "llama-2-7b", "--cluster", "2x4GB", "--for", "trl")
    assert (refused.status, refused.out) == (3, "")
    assert "nothing fits, so there is no file" in refused.err


def test_a_file_is_written_with_how_to_start_it(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    words = ("llama-2-7b", "--on", "1x4090", "--methods", "qlora", "--sequence-length", "1k", "--dataset", "my/data")
    answer = command("fit", *words, "--for", "trl", "--out", path)
    assert (answer.status, answer.out) == (0, "")
    assert f"note: start it by: trl sft --config {path}\n" in answer.err
    assert path.read_text().startswith(f"# start it by: trl sft --config {path}\n")
    assert "assumed, because it was not stated:" in answer.err
    assert " tokens/s" in answer.err
    assert (
        "note: the learning rate of 0.0002 is a usual one of adapters, because none was stated: set yours; so are alpha=32"
        in answer.err
    )
    assert "note: put the model's Hugging Face id or folder in the place of llama-2-7b" in answer.err
    assert "dataset_name: my/data" in path.read_text()
    assert "load_in_4bit: true" in path.read_text()


@pytest.mark.parametrize(("method", "rate"), [("lora", 2e-4), ("full-bf16", 2e-5)])
def test_every_program_gets_a_learning_rate_of_what_is_trained(command: Command, method: str, rate: float) -> None:
    words = ("fit", "gpt2", "--on", "1xa100", "--methods", method, "--sequence-length", "1k", "--for")
    for program in ("trl", "axolotl", "llamafactory"):
        answer = command(*words, program)
        assert yaml.safe_load(answer.out)["learning_rate"] == rate
        assert "because none was stated" in answer.err
    assert f"lr={rate:g}" in command(*words, "lightning").out
    assert "learning rate" not in command(*words, "accelerate").err


def test_trl_is_predicted_with_its_own_loss(command: Command) -> None:
    words = ("fit", "qwen2.5-7b", "--on", "1x4090", "--methods", "lora", "--sequence-length", "2k", "--pin", "zero_stage=0")
    assert command(*words).status == 3  # all logits of 152,064 words
    answer = command(*words, "--for", "trl")
    assert (answer.status, yaml.safe_load(answer.out)["gradient_checkpointing"]) == (0, True)
    assert "with loss=chunked, else as Transformers 4.57" in answer.err
    assert command(*words, "--for", "trl", "--library", "loss=whole").status == 3
    assert command(*words, "--for", "axolotl").status == 3


def test_the_least_memory_has_the_rate_of_its_own_micro_batch(command: Command) -> None:
    words = ("qwen2.5-7b", "--on", "1x4090", "--sequence-length", "2k")
    document, text = json.loads(command("fit", *words, "--json").out), command("fit", *words).out
    leanest = document["setups"][document["leanest"]]
    shown = text.partition("\nleast memory: ")[2].splitlines()[:2]
    assert "micro-batch 1: " in shown[0] and f"{leanest['least_bytes'] / 2**30:.3g} GiB" in shown[0]
    best = f"{leanest['predicted']['tokens_per_second']:,.0f}"
    assert leanest["config"]["micro_batch_size"] > 1 and not shown[1].strip().startswith(best) and best in text
    assert "\n  may fit (94 %): LoRA on one card, activations recomputed, micro-batch 1, " in text
    assert "of main memory per machine (--host-memory)" in text.partition("surely fastest that fits: ")[0]


def test_matrices_with_adapters_are_stated_without_a_rank(command: Command) -> None:
    document = json.loads(command("fit", "gpt2", "--on", "1xa100", "--lora-targets", "query,value", "--json").out)
    assert {(setup["lora_rank"], setup["method"]) for setup in document["setups"]} == {
        (16, "lora"), (16, "lora-8bit"), (16, "qlora")
    }  # fmt: skip
    assert document["model"]["spec"]["lora_targets"] == ["query", "value"]
    assert [item["stated_by"] for item in document["assumed"] if item["name"] == "lora_rank"] == ["--lora-rank"]


def test_torchtune_gets_the_fastest_way_that_it_can_train(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    words = ("fit", "llama-3-8b", "--on", "2xa100", "--methods", "lora,full-bf16", "--sequence-length", "1k", "--out", path)
    answer = command(*words, "--for", "torchtune")
    assert (answer.status, answer.out) == (0, "")
    assert "but torchtune divides states by FSDP2 alone" in answer.err
    assert f"tune run --nproc_per_node 2 lora_finetune_distributed --config {path}" in answer.err
    content = yaml.safe_load(path.read_text())
    assert content["model"]["_component_"] == "torchtune.models.llama3.lora_llama3"
    assert (content["model"]["num_layers"], content["model"]["lora_rank"], content["dtype"]) == (32, 16, "bf16")
    if importlib.util.find_spec("torchtune"):
        config, settings = importlib.import_module("torchtune.config"), importlib.import_module("omegaconf").OmegaConf
        config.validate(settings.create(content))
    refused = command("fit", "gpt2", "--on", "1xa100", "--methods", "lora", "--for", "torchtune")
    assert (refused.status, refused.out) == (2, "")


@pytest.mark.parametrize("pins", [("zero_stage=0",), ("zero_stage=2", "offload_optimizer=none"), ("zero_stage=3",)])
def test_lightning_gets_a_program(command: Command, pins: tuple[str, ...]) -> None:
    words = tuple(word for pin in pins for word in ("--pin", pin))
    text = command("fit", "opt-1.3b", "--on", "2xa100", "--methods", "lora", "--for", "lightning", *words).out
    program = ast.parse(text)
    assert ("DeepSpeedStrategy" in text) is (pins[0] != "zero_stage=0")
    assert "auto" not in {node.value for node in ast.walk(program) if isinstance(node, ast.Constant)}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama-2-7b", "--on", "2x24"), "or give 2xMEMORY, such as 2x24GB"),
        (("llama-2-7b", "--on", "2x24GB", "--fit-probability", 2), "fit_probability: 2.0 is not between 0 and 1"),
        (("llama-2-7b", "--on", "2x24GB", "--frozen-bits", 4), "frozen_bits: says how adapters are"),
        (("llama-2-7b", "--on", "2x24GB", "--max", "speed"), "max: 'speed' is not known"),
        (("llama-2-7b", "--on", "2x24GB", "--for", "keras"), "program: 'keras' is not known; use one of trl, "),
        (("llama-2-7b", "--cards", "1x4090=cheap"), "cards: '1x4090=cheap' is not a machine with a price"),
        (("llama-2-7b", "--cards", "1x4090=-1"), "cards: '1x4090=-1' is not a machine with a price"),
        (("llama-2-7b", "--cards", "1x4090,,2x4090"), "cards: '' is not a machine"),
        (("llama-2-7b", "--cards", "1x4090", "--for", "trl"), "cards: compares machines, and a file or a sweep is for one"),
        (("llama-2-7b", "--on", "1x4090", "--price", -3), "price: -3 is not a positive number"),
        (("llama-2-7b", "--on", "1x4090", "--epochs", -1, "--dataset-rows", 5), "epochs: -1 is not a positive number"),
        (("mine:factory", "--on", "2x24GB"), "there is no module 'mine'"),
    ],
)
def test_bad_input_is_one_line(command: Command, words: tuple[object, ...], says: str) -> None:
    answer = command("fit", *words)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert says in answer.err


@pytest.mark.prove
def test_a_file_is_in_the_precision_of_the_card_and_says_which_pins_it_lacks(command: Command) -> None:
    words = ("opt-1.3b", "--sequence-length", 512, "--methods", "qlora", "--for", "trl", "--on")
    old = command("fit", *words, "1xt4", "--pin", "zero_stage=0", "--pin", "attention_backend=math")
    assert (old.status, "fp16: true" in old.out, "dtype: float16" in old.out, "bf16" in old.out) == (0, True, True, False)
    assert "note: attention_backend=math: not in this file; set it yourself" in old.err
    assert "bnb_4bit_quant_storage" not in old.out
    sharded = command("fit", *words, "2x4090", "--pin", "zero_stage=3", "--pin", "offload_param=none")
    assert "bnb_4bit_quant_storage: bfloat16" in sharded.out  # integers are not divided
    assert " not in this file" not in sharded.err


@pytest.mark.prove
@pytest.mark.parametrize(
    ("model", "on", "method", "pins"),
    [
        ("gpt2", "1xa100", "full", ("zero_stage=0",)),
        ("qwen2.5-0.5b", "1xa100", "full-bf16", ()),
        ("qwen2.5-0.5b", "2xa100", "qlora", ("zero_stage=3", "offload_param=none")),
    ],
)
def test_lint_reads_a_file_with_the_same_memory(
    command: Command, tmp_path: Path, model: str, on: str, method: str, pins: tuple[str, ...]
) -> None:
    path = tmp_path / "sft.yaml"
    words = ("fit", model, "--on", on, "--methods", method, "--sequence-length", 1024)
    words += tuple(word for pin in pins for word in ("--pin", pin))
    assert command(*words, "--for", "trl", "--out", path).status == 0
    document = json.loads(command(*words, "--library", "loss=chunked", "--json").out)
    ours = document["setups"][document["fastest"]]["predicted"]["peak_memory_bytes"][0]["by_tag"]
    read = json.loads(command("lint", "trainer", path, "--model", model, "--cluster", on, "--json").out)["files"][0]
    theirs = read["predicted"]["peak_memory_bytes"][0]["by_tag"]
    for tag in ("parameters", "gradients", "optimizer_state", "activations", "buffers", "context"):
        assert theirs[tag] == pytest.approx(ours[tag], rel=1e-6), tag


@pytest.mark.prove
@pytest.mark.parametrize("program", ["trl", "axolotl", "llamafactory"])
def test_a_file_is_read_again_as_what_was_asked(command: Command, tmp_path: Path, program: str) -> None:
    path = tmp_path / "recipe.yaml"
    asked = ("--on", "1x4090", "--sequence-length", 1024, "--global-batch-size", 32)
    words = ("--methods", "qlora", "--lora-rank", 8, "--frozen-bits", 4, "--lora-targets", "query,key,value,output")
    assert command("fit", "llama-2-7b", *asked, *words, "--for", program, "--out", path).status == 0
    answer = command("fit", "--from", path, "--on", "1x4090", "--json")
    assert (answer.status, "the loss never has all logits" in answer.err) == (0, program == "trl")
    document = json.loads(answer.out)
    assert (document["sequence_length"], document["global_batch_size"], document["model"]["name"]) == (1024, 32, "llama-2-7b")
    assert {(setup["method"], setup["lora_rank"], setup["frozen_bits"]) for setup in document["setups"]} == {("qlora", 8, 4)}
    assert document["model"]["spec"]["lora_targets"] == ["query", "key", "value", "output"]


def test_a_file_of_another_kind_is_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    answer = command("fit", "llama-2-7b", "--from", path)
    assert (answer.status, answer.out) == (2, "")
    assert "is no recipe of the Trainer, TRL, Axolotl or LLaMA-Factory" in answer.err
