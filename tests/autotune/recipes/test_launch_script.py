"""A carried launch script under bash: with stubs for its launchers it starts one rank for each device of the target."""

import os
import subprocess
from pathlib import Path

import pytest

from autotune.frameworks.framework import Surroundings
from autotune.frameworks.imported import flat
from autotune.frameworks.read import read_written
from autotune.recipes.carry import BatchRule, Carried, carry
from autotune.recipes.launch_script import edited_scripts, launch_anew, relaunched, unkept
from autotune.recipes.recipe import recipe_of
from search_spaces.clusters.presets import resolve_cluster

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --vocab-size 128256 "
    "--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --use-distributed-optimizer --bf16"
)
LAYOUT = "--tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 256"
SCRIPTS = {
    "arrays": f"""\
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
TP=1
RANKS=(
    --nproc_per_node 8      # of a node
    --nnodes $SLURM_NNODES
    --rdzv_backend c10d --rdzv_endpoint head:29500
)
LAYOUT=(
    # was --micro-batch-size 4
    --tensor-model-parallel-size $TP
    --micro-batch-size ${{MICRO:-1}}
    --global-batch-size 256
)
srun torchrun "${{RANKS[@]}}" pretrain_gpt.py {MODEL} "${{LAYOUT[@]}}"
""",
    "tasks": f"""\
#SBATCH -N 4
#SBATCH --ntasks-per-node=8
srun --cpu-bind=none \\
    python3 pretrain_gpt.py {MODEL} {LAYOUT}
""",
    "counted": f"""\
#SBATCH --nodes=4
#SBATCH --ntasks=32
#SBATCH --gpus-per-node=8
ARGS="{MODEL} {LAYOUT}"
srun -n 32 python3 pretrain_gpt.py $ARGS
""",
    "mpi": f"""\
GPUS=8
NODES=4
mpirun -np $((GPUS*NODES)) --map-by ppr:8:node python pretrain_gpt.py {MODEL} {LAYOUT}
""",
    "one node before": f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {LAYOUT}\n",
    "no counts": f"torchrun pretrain_gpt.py {MODEL} {LAYOUT}\n",
    "variables": f"""\
export NNODES=4
GPUS_PER_NODE=8
python -m torch.distributed.run --nnodes=$NNODES --nproc-per-node=$GPUS_PER_NODE pretrain_gpt.py {MODEL} {LAYOUT}
""",
}
STUB = '#!/bin/bash\nprintf "%s " "$(basename "$0")" "$@" >> "$STARTED"\n'
STUBS = ("srun", "torchrun", "mpirun", "python", "python3")


def started(text: str, folder: Path) -> list[str]:
    """The words of the launch when bash runs the script with stubs."""
    for name in STUBS:
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    (folder / "run.sh").write_text(text)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STARTED": str(folder / "started"),
        "SLURM_NNODES": _sbatch(text, "nodes", "N"),
    }
    subprocess.run(["bash", str(folder / "run.sh")], check=True, env=variables, timeout=60)
    return (folder / "started").read_text().split()


def _sbatch(text: str, name: str, short: str = "") -> str:
    """The value of an option in the `#SBATCH` lines; empty: none."""
    words = " ".join(line.removeprefix("#SBATCH") for line in text.splitlines() if line.startswith("#SBATCH"))
    parts = words.replace("=", " ").split()
    names = [word for word in (f"--{name}", f"-{short}") if word in parts]
    return parts[parts.index(names[0]) + 1] if names else ""


def ranks(text: str, words: list[str]) -> int:
    """Ranks that the launch starts, by the manuals of its launchers."""
    words = [part for word in words for part in word.replace("nproc-per-node", "nproc_per_node").split("=", 1)]

    def of(*names: str) -> int:
        return next((int(words[words.index(name) + 1]) for name in names if name in words), 0)

    nodes = int(_sbatch(text, "nodes", "N") or 1)
    tasks = of("-n", "--ntasks") or int(_sbatch(text, "ntasks", "n") or 0) or nodes * int(_sbatch(text, "ntasks-per-node") or 1)
    if words[0] == "mpirun":
        return of("-np")
    if "torchrun" not in words and "torch.distributed.run" not in words:
        return tasks
    launched = of("--nproc_per_node") or 1
    return launched * (of("--nnodes") or 1) if words[0] != "srun" or tasks == of("--nnodes") else -1


def carried(text: str, to: str, folder: Path) -> Carried:
    (folder / "launch.sh").write_text(f"#!/bin/bash\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n{text}")
    recipe = recipe_of(str(folder / "launch.sh"), Surroundings(cluster=resolve_cluster("dgx-h100:4")), lambda _: {})
    return carry(recipe, resolve_cluster(to), BatchRule.FIXED, None, 1)


@pytest.mark.prove(every=5)
@pytest.mark.parametrize("to", ["dgx-h100:2", "gb200-nvl72:1"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_starts_a_rank_for_each_device(name: str, to: str, tmp_path: Path) -> None:
    target = carried(SCRIPTS[name], to, tmp_path).target
    assert (target.anew, target.lost) == (False, ())
    assert target.text.count("\n") >= SCRIPTS[name].count("\n")
    words = started(target.text, tmp_path)
    assert ranks(target.text, words) == resolve_cluster(to).world_size, target.text
    assert words[0] == next(word for word in SCRIPTS[name].split() if word in STUBS)


def test_settings_are_edited_where_they_stand() -> None:
    source = (
        "TP=1\nA=(\n  # --micro-batch-size 4\n  --tensor-model-parallel-size $TP  # degree\n  --micro-batch-size 1\n)\nB=$TP\n"
    )
    through, direct = edited_scripts(source, {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}, {})
    assert through == source.replace("TP=1", "TP=2").replace("  # degree", " --sequence-parallel  # degree")
    assert direct == source.replace("$TP  #", "2  #").replace("  # degree", " --sequence-parallel  # degree")


def test_the_word_after_a_switch_is_not_its_value() -> None:
    source = "A=(\n  --recompute-activations \\\n  $FURTHER\n)\ntorchrun train.py --recompute-activations ${A[@]}\n"
    for text in edited_scripts(source, {"--recompute-activations": None}, {"--recompute-activations": True}):
        assert text == source.replace("--recompute-activations", "")


TITAN = (
    "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --compile.no-enable "
    "--training.local-batch-size 2 --parallelism.tensor_parallel_degree 1 --training.dataset 'a|b'"
)
CHANGED = {"compile.enable": True, "parallelism.enable_sequence_parallel": False, "training.local_batch_size": 4}


def test_switches_of_torchtitan_have_no_values() -> None:
    for text in edited_scripts(f"{TITAN}\n", CHANGED, {}, True):
        words = text.split()
        assert "--compile.enable" in words and "--compile.no-enable" not in words
        assert "--parallelism.no_enable_sequence_parallel" in words and "--training.local-batch-size 4" in text
        assert not {"true", "false"} & set(words)


def test_what_the_scheduler_and_a_command_decide_is_not_written_as_the_launchers(tmp_path: Path) -> None:
    text = (
        "H=$(hostname)\nL='python -m torch.distributed.run --nproc_per_node 8 --master_addr '$H\n"
        f'srun --jobid $SLURM_JOB_ID bash -c "$L pretrain_gpt.py {MODEL} {LAYOUT}"\n'
    )
    (tmp_path / "launch.sh").write_text(text)
    (recipe,) = read_written(tmp_path / "launch.sh")
    launch = launch_anew(recipe, text, dict(flat(recipe.content)), None).splitlines()[1]
    assert launch == "srun --jobid $SLURM_JOB_ID torchrun --nproc_per_node 8 pretrain_gpt.py \\"


def test_a_script_of_torchtitan_is_written_anew_with_its_module(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(f"{TITAN}\n")
    (recipe,) = read_written(tmp_path / "launch.sh")
    settings = {**dict(flat(recipe.content)), **CHANGED, "model.converters": ["float8", "mx"]}
    (tmp_path / "anew.sh").write_text(launch_anew(recipe, f"{TITAN}\n", settings, None))
    words = started((tmp_path / "anew.sh").read_text(), tmp_path)
    assert words[words.index("--module") : words.index("--module") + 2] == ["--module", "llama3"]
    assert {"--compile.enable", "--parallelism.no_enable_sequence_parallel", "a|b", "mx"} <= set(words)
    assert not {"true", "false"} & set(words)
    (again,) = read_written(tmp_path / "anew.sh")
    assert dict(flat(again.content)) == settings | {"model.converters": "float8 mx"}


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    batch = "#SBATCH --nodes=4 --partition=a100 -w node[1-4]\n"
    launch = f"mpirun -np $N --hostfile hosts python pretrain_gpt.py {MODEL} {LAYOUT}\n"
    notes = carried(batch + launch, "gb200-nvl72:1", tmp_path).target.notes
    for text in (
        "-np $N: N is to be 4",
        "--hostfile hosts: lists hosts: it needs",
        "-w node[1-4]: names nodes",
        "--partition=a100",
    ):
        assert any(text in note for note in notes), notes


@pytest.mark.parametrize(
    ("launch", "note"),
    [
        ("deepspeed --num_gpus 8 own.py", "--hostfile with 2 hosts"),
        ("deepspeed --hostfile hosts own.py", "lists hosts: it needs 2"),
        ("accelerate launch --config_file own.yaml own.py", "num_machines: 2, num_processes: 16"),
        ("accelerate launch --config_file own.yaml --num_processes 16 own.py", ""),
        ("A=1 \\\n NPROC_PER_NODE=8 \\\n swift sft --model own", "NNODES=2, NODE_RANK"),
        ("NNODES=2 NPROC_PER_NODE=8 swift sft --model own", ""),
    ],
)
def test_a_launch_that_does_not_state_its_nodes_is_said(launch: str, note: str) -> None:
    notes = list(unkept(f"{launch}\n", resolve_cluster("dgx-h100:2"), resolve_cluster("dgx-h100")))
    assert [note in line for line in notes] == ([True] if note else [])


def test_one_task_a_node_that_starts_torchrun_stays_one() -> None:
    text, notes = relaunched(
        "#SBATCH -N 2\n#SBATCH -n 2\nsrun torchrun --nproc_per_node=8 --nnodes=2 a.py\n", resolve_cluster("dgx-h100:4")
    )
    assert text == "#SBATCH -N 4\n#SBATCH -n 4\nsrun torchrun --nproc_per_node=8 --nnodes=4 a.py\n" and not notes


def test_another_launch_in_a_branch_is_edited_too(tmp_path: Path) -> None:
    """Where two branches launch, the settings are read of one, and both start on the target."""
    script = f"""\
OPTIONS=" \\
    {MODEL} {LAYOUT} \\
    "
if [[ $INTERACTIVE -eq 1 ]]; then
    torchrun --nproc_per_node 8 pretrain_gpt.py ${{OPTIONS}}
else
    srun --label sh -c "python -u pretrain_gpt.py ${{OPTIONS}}"
fi
"""
    target = carried(script, "dgx-h100:2", tmp_path).target
    assert not target.anew and "torchrun --nnodes 2 --nproc_per_node 8 " in target.text
    assert any("--nodes=2 --ntasks-per-node=8" in note for note in target.notes)
    assert any("--node_rank" in note for note in target.notes)
