"""Launch lines by torchrun's own parser, and the torch export run by them: layouts train alike."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.errors import ExportRefusedError
from autotune.frameworks.exporters import exporter
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from tests.ports import free_port

STEPS = 3


def launch_words(text: str) -> list[list[str]]:
    """The words of each torchrun of a script."""
    lines = re.findall(r"torchrun (.*?)(?: ;;)?$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.prove
def test_torchrun_reads_the_words(tmp_path: Path) -> None:
    """All in one other process: torchrun's module belongs to torch."""
    written = [(name, case) for name in ("torchrun", "torchtitan", "megatron") for case in cases.CASES]
    words = [
        [plain(word) for word in launch_words(exporter(name)(cases.best(case, tmp_path)).text)[0]] for name, case in written
    ]
    script = (
        "import json, sys\n"
        "from torch.distributed.run import get_args_parser\n"
        "for words in json.load(sys.stdin):\n"
        "    made = get_args_parser().parse_args(words)\n"
        "    print(made.nnodes, made.nproc_per_node, made.node_rank, made.master_port, made.training_script)\n"
    )
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, input=json.dumps(words), capture_output=True, text=True, check=True)
    programs = {"torchrun": "train.py", "torchtitan": "torchtitan.train", "megatron": "pretrain_gpt.py"}
    expected = [f"{'1 2' if case == 'ddp' else '2 8'} 0 29500 {programs[name]}" for name, case in written]
    assert answer.stdout.splitlines() == expected


def plain(word: str) -> str:
    """What bash makes of a word on the first node."""
    return re.sub(r"^(--node-rank=)\$.*", r"\g<1>0", "train.py" if word == "$@" else word)


def test_every_node_has_its_line_and_its_ranks(tmp_path: Path) -> None:
    text = exporter("torchrun")(cases.best("3d", tmp_path)).text
    assert len(launch_words(text)) == 2
    assert "# mesh, innermost first: tp-cp-dp-pp\n" in text
    assert "# node 0: ranks 0-7 (tensor 0-3, data 0-1, pipeline 0)\n" in text
    assert "# node 1: ranks 8-15 (tensor 0-3, data 0-1, pipeline 1)\n" in text


def test_variables_are_quoted() -> None:
    best = exported.document(exported.large())
    best["launch"]["env"] = {"PLAIN": "expandable_segments:True", "SHELL_WOULD_RUN": "$(id);'x'"}
    text = exporter("torchrun")(best).text
    assert "export PLAIN=expandable_segments:True\n" in text
    exports = "".join(line for line in text.splitlines(keepends=True) if line.startswith("export "))
    shown = subprocess.run(["bash", "-c", f'{exports}printf %s "$SHELL_WOULD_RUN"'], capture_output=True, text=True, check=True)
    assert shown.stdout == "$(id);'x'"
    compile(exporter("ray")(best).text, "ray", "exec")


def test_an_environment_is_set_before_processes_start() -> None:
    best = exported.document(
        exported.large(), environment="CUDA_DEVICE_MAX_CONNECTIONS=8 NCCL_PROTO=Simple", tensor_parallel_size=2
    )
    for name in ("torchrun", "slurm", "megatron", "torchtitan"):
        export = exporter(name)(best)
        lines = [line for line in export.text.splitlines() if line.startswith("export ") and "MASTER_ADDR" not in line]
        assert lines == ["export CUDA_DEVICE_MAX_CONNECTIONS=8", "export NCCL_PROTO=Simple"]
        assert not [note for note in export.notes if "environment=" in note]
    script = exporter("ray")(best).text
    assert 'ray.init(runtime_env={"env_vars": environment})' in script
    compile(script, "ray", "exec")
    [note] = [note for note in exporter("transformers")(best).notes if note.startswith("environment=")]
    assert "set these variables before its processes start" in note


def run_with(tool: str, folder: Path, **knobs: Any) -> list[float]:
    """Losses that rank 0 prints where the export `torch` is started by the export `tool`."""
    ranks = knobs.pop("ranks")
    best = exported.document(exported.small(folder, ranks=ranks, lr=1e-3), **knobs)
    (folder / "train.py").write_text(exporter("torch")(best).text)
    (folder / "start.sh").write_text(exporter(tool)(best).text.replace("29500", str(free_port())))
    environment = {**os.environ, "PATH": f"{stand_ins(folder)}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["bash", folder / "start.sh", folder / "train.py", "--tiny", "--steps", str(STEPS)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    losses = re.findall(r"loss (\S+)", answer.stdout)
    assert len(losses) == STEPS
    return [float(loss) for loss in losses]


def stand_ins(folder: Path) -> Path:
    """`torchrun` of this environment; `srun` and `scontrol` of a job of one node."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    bodies = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "srun": 'SLURM_NODEID=0 exec "$@"',
        "scontrol": "echo 127.0.0.1",
    }
    for name, body in bodies.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(stat.S_IRWXU)
    return tools


@pytest.mark.nightly
def test_layouts_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses by sharded data parallelism and by tensor x pipeline, under torchrun's line and under Slurm's script."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "here")
    sharded = run_with("torchrun", tmp_path, ranks=2, zero_stage=3, micro_batch_size=2, activation_checkpointing="full")
    divided = run_with(
        "slurm", tmp_path, ranks=4, tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True,
        micro_batch_size=2,
    )  # fmt: skip
    assert sharded == pytest.approx(divided, abs=2e-5)
    assert len({*sharded}) == STEPS


def test_what_torch_trains_wrong_is_refused() -> None:
    layout = {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv", "reshard_after_forward": False}
    with pytest.raises(ExportRefusedError, match="trains wrong weights under pipeline_schedule=zbv; use "):
        exporter("torch")(exported.document(exported.large(), zero_stage=3, **layout))
    assert exporter("torch")(exported.document(exported.large(), zero_stage=0, **layout)).text


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ExportRefusedError, match=r"context_parallel_size=2.*; use torchtitan or megatron"):
        exporter("torch")(exported.document(exported.large(), context_parallel_size=2))


def script_of(tmp_path: Path, **command: Any) -> dict[str, Any]:
    """The best configuration of a script whose words have blanks and quotes in them."""
    arguments = ["python", "my train.py", "--batch", "{micro_batch_size}", "--note", "it's", "--deepspeed_config", "{config}"]
    fields = {"command": {"arguments": arguments, **command}, "ranks": 2, "strategy": "random"}
    return exported.document(resolve(request_from_fields(fields)), micro_batch_size=4, zero_stage=2)


@pytest.mark.parametrize("tool", ["torchrun", "slurm"])
def test_a_script_is_started_with_its_arguments(tmp_path: Path, tool: str) -> None:
    made = exporter(tool)(script_of(tmp_path))
    (tmp_path / "start.sh").write_text(made.text)
    tools = stand_ins(tmp_path)
    (tools / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "here"}
    answer = subprocess.run(
        ["bash", tmp_path / "start.sh", "--epochs", "3"], env=environment, capture_output=True, text=True, check=True
    )
    words = answer.stdout.splitlines()
    assert words[0] == "--nnodes=1"
    assert words[words.index("my train.py") :] == [
        "my train.py", "--batch", "4", "--note", "it's", "--deepspeed_config", "config.json", "--epochs", "3",
    ]  # fmt: skip
    assert f"config.json: `autotune export {exported.JOB} --format deepspeed --out config.json` writes it" in made.notes


def test_a_program_that_is_no_python_and_another_launcher(tmp_path: Path) -> None:
    fields = {"command": ["./train.sh", "{micro_batch_size}"], "ranks": 2, "strategy": "random"}
    text = exporter("torchrun")(exported.document(resolve(request_from_fields(fields)), micro_batch_size=4)).text
    assert text.splitlines()[-1].endswith(' --no-python ./train.sh 4 "$@"')
    # DeepSpeed would insert --local_rank between another Python and the script.
    words = ["/opt/bin/python3.12", "train.py", "{config}"]
    best = exported.document(resolve(request_from_fields({**fields, "command": {"arguments": words, "launcher": "deepspeed"}})))
    started = "/opt/bin/python3.12 -m deepspeed.launcher.runner --num_nodes=1 --num_gpus=2 train.py config.json"
    assert best["launch"]["command"] == started
    best = script_of(tmp_path, launcher="accelerate", plugin="deepspeed")
    notes = exporter("torchrun")(best).notes
    assert f"it was measured under accelerate, whose variables it may read: {best['launch']['command']}" in notes
    # On CPUs `accelerate launch` starts one process, so that torchrun starts the ranks, with the variables of trials.
    assert best["launch"]["command"].startswith("torchrun --nnodes=1 --nproc-per-node=2 ")
    variables = best["launch"]["env"]
    assert variables["ACCELERATE_USE_CPU"] == variables["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "config.json"
    assert variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"
