"""`autotune lint`: what it prints, the exit status, and its JSON and SARIF."""

import json
from pathlib import Path
from typing import Any

import pytest
from called import Command
from lint_recipes import RECIPES

from autotune.frameworks.read import read_written

GOOD, FAULTY = RECIPES / "titan-llama3-8b.toml", RECIPES / "titan-global-batch.toml"


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1.0}))
    return path


def test_findings_have_their_line(command: Command, file: Path) -> None:
    answer = command("lint", "deepspeed", str(file))
    assert (answer.status, answer.err) == (1, "")
    assert answer.out.splitlines() == [
        f"{file}:1: gradient_cliping: ignored: no part of DeepSpeed reads this key; did you mean gradient_clipping?",
        f"{file}: not predicted without a model (--model) and a cluster (--cluster)",
    ]


def test_a_version_of_deepspeed_decides(command: Command, file: Path) -> None:
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "elasticity": {}}')
    assert command("lint", "deepspeed", str(file), "--for", "0.19.8").status == 1
    answer = command("lint", "deepspeed", str(file), "--for", "0.18.0")
    assert answer.status == 0
    assert answer.out.startswith(f"{file}: nothing that DeepSpeed 0.18.0 would refuse, ignore or change\n")


def test_json_is_one_document(command: Command, file: Path) -> None:
    answer = command("lint", "deepspeed", str(file), "--for", "0.19.8", "--ranks", "8", "--json")
    (document,) = json.loads(answer.out)["files"]
    assert (document["format"], document["version"], document["ranks"]) == ("deepspeed", "0.19.8", 8)
    (finding,) = document["findings"]
    assert (finding["rule"], finding["effect"], finding["line"]) == ("unknown-key", "ignored", 1)
    assert finding["fix"] == {"gradient_cliping": None, "gradient_clipping": 1.0}


def test_a_good_recipe_is_predicted(command: Command) -> None:
    answer = command("lint", GOOD, "--cluster", "dgx-h100:1", "--json")
    (document,) = json.loads(answer.out)["files"]
    assert (answer.status, document["findings"], document["model"]) == (0, [], "llama-3-8b")
    assert document["predicted"]["fit_probability"] > 0.95 and document["predicted"]["samples_per_second"]["mean"] > 0
    lines = command("lint", GOOD, "--cluster", "dgx-h100:1").out.splitlines()
    assert lines[0].endswith("would refuse, ignore or change") and "fits with probability 1.00" in lines[-1]


@pytest.mark.nightly
def test_a_recipe_that_does_not_fit(command: Command) -> None:
    answer = command("lint", GOOD, "--model", "llama-3-70b", "--cluster", "dgx-h100:1")
    assert answer.status == 1
    assert "does not fit: predicted" in answer.out and "; set " in answer.out


SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 "
    "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 --use-distributed-optimizer --sequence-parallel "
)


def test_what_a_script_decides_supports_no_finding_and_no_prediction(command: Command, folder: Path) -> None:
    (folder / "run.sh").write_text(f"T=$1\n{SCRIPT} --micro-batch-size $2 --tensor-model-parallel-size $T\n")
    answer = command("lint", "run.sh", "--cluster", "dgx-h100:1")
    assert answer.status == 0
    assert "run.sh: nothing that Megatron-LM" in answer.out
    assert "--micro-batch-size ($2), --tensor-model-parallel-size ($1): decided when the script runs" in answer.out
    assert "not predicted: the script decides --micro-batch-size ($2), --tensor-model-parallel-size ($1)" in answer.out
    carried = command("carry", "run.sh", "--from", "dgx-h100:1", "--to", "dgx-h100:2")
    assert carried.status == 2 and "run.sh decides --micro-batch-size, --tensor-model-parallel-size when it runs" in carried.err
    (folder / "run.sh").write_text(f"{SCRIPT} --micro-batch-size 1 --tensor-model-parallel-size 1 --save $2\n")
    answer = command("lint", "run.sh", "--cluster", "dgx-h100:1")
    assert answer.status == 1 and "--sequence-parallel: ignored" in answer.out and "predicted" in answer.out


def test_a_sourced_file_may_set_variables(command: Command, folder: Path) -> None:
    script = f"{SCRIPT} --micro-batch-size 1 --tensor-model-parallel-size 2\n"
    (folder / "run.sh").write_text(script)
    assert "env.CUDA_DEVICE_MAX_CONNECTIONS: refused" in command("lint", "run.sh").out
    (folder / "run.sh").write_text(f". ./cluster.sh\n{script}")
    answer = command("lint", "run.sh")
    assert answer.status == 0
    assert "note: env.CUDA_DEVICE_MAX_CONNECTIONS: tensor and context" in answer.out
    assert "./cluster.sh may set it" in answer.out


def test_what_is_not_stated_is_said_and_is_no_error(command: Command, folder: Path) -> None:
    (folder / "acc.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n"
                                     "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")  # fmt: skip
    words = ("lint", "acc.yaml", "--model", "qwen2.5-7b", "--cluster", "dgx-h100:1")
    long = command(*words, "--sequence-length", 16384)
    assert long.status == 0
    assert (
        "may not fit: fits if activation_checkpointing=full (46.8 GiB); with activation_checkpointing=none 128 GiB" in long.out
    )
    assumed = [line.partition("assumed: ")[2] for line in long.out.splitlines() if ": assumed: " in line]
    assert assumed[0].startswith("activation_checkpointing=none (")
    assert {line.partition(" (")[0] for line in assumed} == {
        "activation_checkpointing=none", "micro_batch_size=1", "global_batch_size=8"
    }  # fmt: skip
    short = command(*words).out
    assert (
        "assumed: sequence_length=4096 (--sequence-length): with" in short and "fits with probability 1.00 as assumed" in short
    )


def test_an_alternative_is_what_the_answer_says_when_it_is_stated(command: Command, folder: Path) -> None:
    """Every consequence of an assumption is that of the command with the value as an option."""
    (folder / "acc.yaml").write_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
                                     "deepspeed_config:\n  zero_stage: 2\n")  # fmt: skip
    words = ("lint", "acc.yaml", "--model", "llama-3-8b", "--cluster", "dgx-h100:1", "--json")

    def linted(*more: str) -> tuple[int, dict[str, Any]]:
        answer = command(*words, *more)
        (document,) = json.loads(answer.out)["files"]
        return answer.status, document

    status, document = linted()
    assert {item["name"] for item in document["assumed"]} == {
        "micro_batch_size", "activation_checkpointing", "sequence_length", "global_batch_size"
    }  # fmt: skip
    verdicts = set()
    for item in document["assumed"]:
        for alternative in item["alternatives"]:
            changed_status, changed = linted("--assume", f"{item['name']}={alternative['value']}")
            predicted = changed["predicted"]
            assert predicted["tokens_per_second"] == pytest.approx(alternative["tokens_per_second"])
            probability = predicted["fit_probability"]
            assert alternative["verdict"] == (
                "fits" if probability >= 0.95 else "may fit" if probability > 0.05 else "does not fit"
            )
            verdicts.add(alternative["verdict"])
            assert changed_status == status == 0  # a shorter sequence may fit
    assert verdicts == {"fits", "may fit", "does not fit"}


def test_the_type_of_reductions_follows_the_precision_that_is_stated(command: Command, folder: Path) -> None:
    (folder / "ds.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_batch_size": 8}')
    words = ("lint", "ds.json", "--model", "llama-3-8b", "--cluster", "dgx-h100:1", "--json")
    (document,) = json.loads(command(*words).out)["files"]
    (precision,) = (item for item in document["assumed"] if item["name"] == "precision")
    (single,) = (alternative for alternative in precision["alternatives"] if alternative["value"] == "fp32")
    (stated,) = json.loads(command(*words, "--assume", "precision=fp32").out)["files"]
    assert stated["predicted"]["tokens_per_second"] == pytest.approx(single["tokens_per_second"])
    assert "reduce_dtype" not in {item["name"] for item in stated["assumed"]}


def test_what_the_program_decides_is_stated_once(command: Command, folder: Path) -> None:
    (folder / "acc.yaml").write_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
                                     "deepspeed_config:\n  zero_stage: 3\n")  # fmt: skip
    words = ("lint", "acc.yaml", "--model", "qwen2.5-7b", "--cluster", "dgx-h100:1", "--assume")
    answer = command(*words, "zero_stage=2")
    assert answer.status == 2
    assert "assume: acc.yaml decides zero_stage itself by deepspeed_config.zero_stage, which is 3" in answer.err
    for text, says in (
        ("micro_batch=2", "micro_batch_size"),
        ("micro_batch_size", "is not NAME=VALUE"),
        ("vocab_size=9", "own"),
        ("sequence_length=4q", "is not a length"),
    ):
        answer = command(*words, text)
        assert answer.status == 2 and says in answer.err and answer.err.count("\n") == 1
    more = ("micro_batch_size=4", "--assume", "activation_checkpointing=full", "--assume", "sequence_length=4k", "--json")
    (document,) = json.loads(command(*words, *more).out)["files"]
    assert document["sequence_length"] == 4096
    assert [item["name"] for item in document["assumed"]] == ["global_batch_size"]
    assert document["origins"]["micro_batch_size"] == {"source": "stated", "by": "--assume"}
    assert document["origins"]["zero_stage"] == {"source": "stated", "by": "acc.yaml:5 deepspeed_config.zero_stage"}
    assert document["origins"]["global_batch_size"]["source"] == "assumed"


def test_a_default_of_the_framework_is_not_stated(command: Command, folder: Path) -> None:
    for length, origin in (
        ("", {"source": "framework", "by": "torchtitan 0.3.0, TOML 0.2.2"}),
        ("training.seq_len = 512\n", {"source": "stated", "by": "own.toml:1 training.seq_len"}),
    ):
        (folder / "own.toml").write_text(f'{length}model.name = "llama3"\nmodel.flavor = "8B"\ncompile.enable = true\n'
                                         "parallelism.tensor_parallel_degree = 2\n")  # fmt: skip
        (document,) = json.loads(command("lint", "own.toml", "--cluster", "dgx-h100:1", "--json").out)["files"]
        assert document["origins"]["sequence_length"] == origin
        assert document["origins"]["micro_batch_size"]["source"] != "stated"


def test_a_finding_that_hangs_on_an_assumption_is_a_note(command: Command, folder: Path) -> None:
    overrides = "model.hf_model_id=Qwen/Qwen3-30B-A3B model.sequence_parallel=true train.global_batch_size=512\n"
    (folder / "run.args").write_text(overrides)
    words = ("lint", "megatron-bridge", "run.args", "--cluster", "dgx-h100:2")
    answer = command(*words)
    assert answer.status == 0 and "assumed: tensor_parallel_size=1" in answer.out
    assert "note: model.sequence_parallel: sequence parallelism needs several tensor-parallel ranks; not with " in answer.out
    certain = command(*words, "--assume", "tensor_parallel_size=1")
    assert certain.status == 1 and "model.sequence_parallel: refused: " in certain.out


def test_a_script_s_open_degree_can_be_stated(command: Command, folder: Path) -> None:
    (folder / "run.sh").write_text(f"{SCRIPT} --micro-batch-size 1 --tensor-model-parallel-size $1\n")
    assert "not predicted: the script decides" in command("lint", "run.sh", "--cluster", "dgx-h100:1").out
    answer = command("lint", "run.sh", "--cluster", "dgx-h100:1", "--assume", "tensor_parallel_size=1")
    assert answer.status == 1 and "--sequence-parallel: ignored" in answer.out and "predicted" in answer.out
    assert "decided when the script runs" not in answer.out


def test_data_parallelism_that_does_not_fit_is_to_be_sharded(command: Command, folder: Path) -> None:
    (folder / "acc.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n")
    answer = command("lint", "acc.yaml", "--model", "llama-3-8b", "--cluster", "dgx-h100:1", "--sequence-length", 1024)
    assert answer.status == 1
    assert "does not fit: " in answer.out and "; set distributed_type=FSDP and set " in answer.out
    assert "more devices" not in answer.out


@pytest.mark.parametrize(
    ("switches", "precision"),
    [
        ('"bf16": {"enabled": "auto"}', "bf16"), ('"fp16": {"enabled": "auto"}', "fp16"),
        ('"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}', "bf16"),
        ('"bf16": {"enabled": "auto"}, "fp16": {"enabled": false}', "bf16"),
    ],
)  # fmt: skip
def test_auto_is_no_fp32(command: Command, folder: Path, switches: str, precision: str) -> None:
    words = ("--model", "llama-3-8b", "--cluster", "dgx-h100:1", "--sequence-length", 2048)
    rates = []
    for name, text in (("auto.json", switches), ("true.json", f'"{precision}": {{"enabled": true}}')):
        (folder / name).write_text(f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3}}, {text}}}')
        answer = command("lint", name, *words)
        rates.append(answer.out.partition("predicted ")[2].partition(" samples/s")[0])
        assert (f"assumed: precision={precision} " in answer.out) == (name == "auto.json")
    assert rates[0] == rates[1] != ""


@pytest.mark.prove
def test_an_unlikely_fit_is_a_finding(command: Command, folder: Path) -> None:
    for size in range(2, 33, 2):
        (folder / "run.sh").write_text(SCRIPT.replace("--sequence-parallel", f"--micro-batch-size {size}"))
        answer = command("lint", "run.sh", "--cluster", "dgx-h100:1", "--global-batch-size", 8 * size)
        probability = float(answer.out.rpartition("fits with probability ")[2].split()[0])
        assert answer.status == (probability < 0.05), answer.out
        assert ("does not fit" in answer.out) == (probability < 0.05)
        if abs(probability - 0.95) > 0.01:
            assert ("(it may not fit)" in answer.out) == (0.05 <= probability < 0.95)
        if probability < 0.01:
            return
    pytest.fail("every micro-batch fits")


@pytest.mark.nightly
def test_a_dry_run_is_exact(command: Command, folder: Path) -> None:
    path = folder / "tiny.toml"
    path.write_text(GOOD.read_text().replace('flavor = "8B"', 'flavor = "debugmodel"').replace("8192", "128"))
    words = ("lint", path, "--model", "llama-tiny", "--cluster")
    assert command(*words, "dgx-h100:1", "--dry-run").status == 0
    answer = command(*words, _card(folder), "--dry-run")
    assert answer.status == 1 and "does not fit: a dry run needs" in answer.out


def _card(folder: Path) -> Path:
    """A cluster whose devices have less memory than the states of a small model."""
    path = folder / "cluster.toml"
    path.write_text(
        'nodes = 1\ndevices_per_node = 8\nintra_node_bandwidth = 1e9\ninter_node_bandwidth = 1e9\n'
        'host_memory_bytes = 1_000_000_000\ncores_per_node = 8\n'
        '[device]\nname = "small"\nkind = "cuda"\nmemory_bytes = 4_000_000\npeak_flops = { bf16 = 1e12 }\n'
    )  # fmt: skip
    return path


def test_sarif(command: Command, folder: Path) -> None:
    (folder / "broken.toml").write_text("[training")
    answer = command("lint", "auto", FAULTY, folder / "broken.toml", "--cluster", "dgx-h100:1", "--sarif")
    log = json.loads(answer.out)
    (run,) = log["runs"]
    (result,) = run["results"]
    assert (answer.status, log["version"]) == (2, "2.1.0")
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "torchtitan/global-batch"
    place: dict[str, Any] = result["locations"][0]["physicalLocation"]
    line = FAULTY.read_text().splitlines()[place["region"]["startLine"] - 1]
    assert (line, result["level"]) == ("global_batch_size = 100", "error")
    assert result["properties"]["fix"] == {"training.global_batch_size": 96}
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "broken.toml is not TOML" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


def test_one_unreadable_file_does_not_hide_the_others(command: Command, folder: Path) -> None:
    (folder / "broken.toml").write_text("[training")
    answer = command("lint", FAULTY, "broken.toml", "--ranks", "8")
    assert answer.status == 2 and "training.global_batch_size: refused" in answer.out
    assert answer.err.startswith("autotune: broken.toml: file: broken.toml is not TOML") and answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing", "ds_config.json"), "format: 'nothing' is not known; use auto, deepspeed, torchtitan"),
        (("deepspeed", "none.json"), "file: none.json cannot be read (No such file or directory); give a DeepSpeed"),
        (("deepspeed", "list.json"), "file: list.json does not hold a table; give a DeepSpeed configuration"),
        (("deepspeed", "list.json", "--for", "newest"), "for: 'newest' is not a version; write it as in 0.19.8"),
        (("torchtitan", "list.json", "--for", "0.2"), "for: torchtitan is checked as of"),
        (("auto",), "file: is missing; name the files to check"),
        (("auto", "config.json"), "file: config.json is a Hugging Face config.json; give a DeepSpeed configuration"),
        (("auto", "empty.sh"), "file: empty.sh has no options of a known framework"),
        (("auto", "empty.py"), "file: empty.py is Python source without a function that returns a configuration"),
        (("auto", "bytes.sh"), "file: bytes.sh is not a text"),
        (("auto", "degree.toml"), "parallelism.tensor_parallel_degree: 'two' in degree.toml is not a whole number"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("file")
def test_what_is_no_configuration(command: Command, folder: Path, words: tuple[str, ...], says: str) -> None:
    (folder / "list.json").write_text("[]")
    (folder / "empty.sh").write_text("echo nothing\n")
    (folder / "empty.py").write_text("x = 1\n")
    (folder / "bytes.sh").write_bytes(b"\xff\xfe\x00")
    (folder / "degree.toml").write_text('[parallelism]\ntensor_parallel_degree = "two"\n')
    answer = command("lint", *words)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err and answer.err.count("\n") == 1


@pytest.mark.prove
@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "megatron-bridge", "accelerate", "deepspeed"])
def test_a_file_of_another_framework_passes_no_check(command: Command, folder: Path, framework: str) -> None:
    """It would have nothing that the framework refuses, and a wrong word in a script would switch the check off."""
    files = {
        "deepspeed.json": '{"zero_optimization": {"stage": 9}}', "empty.toml": "", "acc.yaml": "distributed_type: FSDP\n",
        "titan.toml": "[training]\nlocal_batch_size = 2\n", "m.sh": "torchrun a.py --num-layers 8 --micro-batch-size 1\n",
        "titan.sh": "torchrun train.py --training.seq_len 8 --parallelism.tensor_parallel_degree 2\n",
        "ds.sh": "deepspeed train.py --deepspeed ds.json\n", "few.toml": "[model]\nname = 'llama3'\n[training]\nsteps = 3\n",
    }  # fmt: skip
    own = {
        "deepspeed": {"deepspeed.json"}, "accelerate": {"acc.yaml"}, "torchtitan": {"titan.toml", "titan.sh", "few.toml"},
        "megatron": {"m.sh"}, "megatron-bridge": set(),
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
        answer = command("lint", framework, name)
        assert (answer.status == 2) == (name not in own[framework]), f"{name}: {answer.out}{answer.err}"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ('"zero_optimization": {"stage": "x"}', "zero_optimization.stage"),
        ('"zero_optimization": {"stage": 7}', "zero_optimization.stage"),
        ('"zero_optimization": {"stage": [1]}', "zero_optimization.stage"),
        ('"bf16": "auto"', "bf16"),
        ('"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}', "zero_optimization.reduce_bucket_size"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_a_finding(command: Command, folder: Path, setting: str, key: str) -> None:
    (folder / "ds.json").write_text(f'{{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, {setting}}}')
    answer = command("lint", "ds.json", "--model", "llama-tiny", "--cluster", "dgx-h100:1")
    assert answer.status == 1
    assert f"ds.json:1: {key}: refused: " in answer.out
    assert "not predicted, because the configuration does not run" in answer.out


@pytest.mark.parametrize("setting", ['"overlap_comm": 1', '"stage3_max_live_parameters": 0'])
def test_a_value_that_deepspeed_takes_and_we_do_not_is_no_finding(command: Command, folder: Path, setting: str) -> None:
    (folder / "ds.json").write_text(
        f'{{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3, {setting}}}}}'
    )
    answer = command("lint", "ds.json", "--model", "llama-tiny", "--cluster", "dgx-h100:1")
    assert answer.status == 0, answer.out
    assert "ds.json: note: zero_optimization." in answer.out and "ds.json: predicted " in answer.out


def test_a_deep_table_hides_no_other_file(command: Command, folder: Path) -> None:
    (folder / "deep.toml").write_text(f"{'a.' * 3000}a = 1\n")
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 9}}')
    answer = command("lint", "auto", "deep.toml", "ds.json")
    assert answer.status == 2
    assert "ds.json:1: " in answer.out and "deep.toml is nested too deeply" in answer.err


def test_overrides_are_words_of_the_shell(command: Command, folder: Path) -> None:
    (folder / "run.sh").write_text(
        "# see conf.d=[a b] for the list\nexport X=a.b={c\n"
        "torchrun --nproc_per_node 8 run.py model.tensor_model_parallel_size=2 "
        "\"model.recompute_modules=['moe_act', 'layernorm']\"\n"
    )
    settings = read_written(folder / "run.sh")[0].content
    assert settings["model.recompute_modules"] == ["moe_act", "layernorm"]
    answer = command("lint", "megatron-bridge", "run.sh", "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["files"][0]["knobs"]["tensor_parallel_size"] == 2
