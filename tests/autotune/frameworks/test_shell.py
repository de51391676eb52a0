"""Options of launch scripts, read without running them."""

from pathlib import Path

import pytest

from autotune.errors import RequestError
from autotune.frameworks.read import read_imported
from autotune.frameworks.shell import read_options

ARRAYS = """#!/bin/bash
# don't run this (it's long)
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-"4"}
WORLD=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE  # one for each GPU
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR}
)
MODEL_ARGS=(
    --num-layers 32
    --norm-epsilon 1e-5
    # --hidden-size 1
    --hidden-size $((4 * 1024))
    --save "$(date +%s)/out"
)
if [ "$1" = on ]; then
    MODEL_ARGS+=(--swiglu)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --micro-batch-size 2 --global-batch-size $((WORLD * 4)) --data-path $DATA_PATH
echo --done
"""


def test_arrays_variables_and_arithmetic() -> None:
    found = read_options(ARRAYS)
    assert found.settings == {
        "--num-layers": 32, "--norm-epsilon": 1e-5, "--hidden-size": 4096, "--micro-batch-size": 2,
        "--global-batch-size": 128, "launcher.nproc_per_node": 8, "launcher.nnodes": 4,
        "launcher.master_addr": "$MASTER_ADDR",
        "env.CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }  # fmt: skip
    assert found.open == {"--save": "a command", "--swiglu": "a branch", "--data-path": "$DATA_PATH"}


def test_quoted_options_over_several_lines() -> None:
    arguments = 'ARGS="\n  --tensor-model-parallel-size 2 \\\n  --bf16\n"\n'
    text = arguments + "NCCL_DEBUG=INFO torchrun --nproc_per_node=8 train.py $ARGS --lr=3e-4\n"
    found = read_options(text)
    assert found.settings == {
        "--tensor-model-parallel-size": 2, "--bf16": True, "--lr": 3e-4, "launcher.nproc_per_node": 8, "env.NCCL_DEBUG": "INFO",
    }  # fmt: skip


def test_a_plain_list_of_options() -> None:
    assert read_options("--num-layers 24 --bf16\n--layout 'Et|tL'\n").settings == {
        "--num-layers": 24, "--bf16": True, "--layout": "Et|tL",
    }  # fmt: skip


def test_options_that_another_script_launches() -> None:
    assert read_options('MODEL_ARGS=" \\\n --num-layers 36 \\\n --swiglu \\\n"\n').settings == {
        "--num-layers": 36,
        "--swiglu": True,
    }


def test_the_launch_with_the_most_options_counts() -> None:
    text = "torchrun train.py --a 1 --b 2 --c 3\npython convert.py --a 2\n"
    assert read_options(text).settings == {"--a": 1, "--b": 2, "--c": 3}


@pytest.mark.parametrize(
    ("option", "count"),
    [
        ("gres=gpu:8,tmpdisk:100", 8),
        ("gres=tmpdisk:9,gpu:h100:4(S:0-1)", 4),
        ("gres=gpu", 1),
        ("gpus-per-node=a100:4,v100:2", 6),
    ],
)
def test_devices_of_a_node_in_a_job(option: str, count: int) -> None:
    assert read_options(f"#SBATCH --{option}\npython t.py --a $SLURM_GPUS_ON_NODE\n").settings == {"--a": count}


def test_a_value_of_an_option_ends_before_an_option_of_one_letter() -> None:
    found = read_options("accelerate launch --num_processes 8 -m axolotl.cli.train own.yaml\n")
    assert (found.settings, found.program, found.arguments) == (
        {"launcher.num_processes": 8}, "axolotl.cli.train", ("own.yaml",),
    )  # fmt: skip
    assert read_options("torchrun t.py --a 1 -v 2 --b -1 -3e-5\n").settings == {"--a": 1, "--b": "-1 -3e-5"}


def test_what_slurm_states() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node 2  # two each\n#SBATCH -c16\n"
        "#SBATCH --export=ALL,NCCL_DEBUG=INFO\n#SBATCH --gpus-per-node=$N\necho\n#SBATCH --gpus=9\n"
        "srun python train.py --a $SLURM_NNODES --b $SLURM_NTASKS --c $SLURM_CPUS_PER_TASK "
        "--d $SLURM_GPUS_PER_NODE --e $SLURM_GPUS\n"
    )
    found = read_options(text)
    assert found.settings == {"--a": 4, "--b": 8, "--c": 16, "env.NCCL_DEBUG": "INFO"}
    assert found.open == {"--d": "$SLURM_GPUS_PER_NODE", "--e": "$SLURM_GPUS"}


@pytest.mark.parametrize(
    ("lines", "settings", "undecided"),
    [
        ("A=$1", {}, {"--a": "$1"}),
        ("A=${1:-8}", {"--a": 8}, {}),
        ("A=${TP:-1}", {"--a": 1}, {}),
        ("if [ $1 = x ]; then A=1; else A=2; fi", {}, {"--a": "a branch"}),
        ("if [ $1 = x ]; then A=2; else A=2; fi", {"--a": 2}, {}),
        ("N=4\nif [[ $N -gt 2 ]]; then A=1; elif [ $1 = x ]; then A=2; fi", {"--a": 1}, {}),
        ("N=4\nif [ $N -eq 2 ]\nthen\nA=1\nelse\nA=3\nfi", {"--a": 3}, {}),
        ("A=1\n[ -n $1 ] && A=2", {}, {"--a": "a branch"}),
        ("A=1\nB=\n[[ -z $B ]] && A=2", {"--a": 2}, {}),
        ("A=1\nB=x\n[ -z $B ] && A=2 || A=3", {"--a": 3}, {}),
        ("case $1 in\n8B) A=1 ;;\n70B) A=2 ;;\nesac", {}, {"--a": "a branch"}),
        ("B=70B\ncase $B in\n8B) A=1 ;;\n7*) A=2 ;;\n*) A=3 ;;\nesac", {"--a": 2}, {}),
        ("for A in 1 2; do", {}, {"--a": "a branch"}),
    ],
)
def test_what_the_script_decides(lines: str, settings: dict[str, object], undecided: dict[str, str]) -> None:
    found = read_options(f"{lines}\ntorchrun train.py --a $A\n")
    assert (found.settings, found.open) == (settings, undecided)


def test_further_options_are_no_values() -> None:
    found = read_options('E=""\ntorchrun train.py --on $E --size 2 $MORE --last "$@" 2>&1 | tee log\n')
    assert found.settings == {"--on": True, "--size": 2, "--last": True}
    assert found.open == {"$MORE": "further options", "$@": "further options"}


@pytest.mark.parametrize("launch", ["env A=1 torchrun", "mpirun -x A=1 python", "srun --export=ALL,A=1 python"])
def test_variables_of_the_launch(launch: str) -> None:
    assert read_options(f". ./setup\n{launch} train.py --b 2\n").settings == {"env.A": 1, "--b": 2}
    assert read_options("source x.sh\nmpirun -x A python t.py --b 2\n").open == {"env.A": "-x"}


@pytest.mark.parametrize("text", ["", "echo hello\n", "A=$B\nB=$A\necho $A\n", "for x in 1 2; do echo '\n", "$(("])
def test_nothing_to_read(text: str) -> None:
    assert read_options(text).settings == {}


def test_what_names_a_torchtitan_recipe_is_no_setting(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "torchrun -m torchtitan.train --module llama3 --config llama3_70b --training.local_batch_size 2 --compile.no_enable\n"
    )
    imported = read_imported(tmp_path / "train.sh")
    assert not {"config", "job.config_file"} & imported.settings.keys() and imported.settings["module"] == "llama3"
    assert imported.settings["compile.enable"] is False
    assert not [note for note in imported.notes if note.startswith(("module", "config"))]
    assert imported.knobs["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("script", "settings", "undecided"),
    [
        ("if [ $# -lt 1 ]; then exit 1; fi\nA=$1", {}, {"--a": "$1"}),
        ('if [ -z "$A" ]; then A=4; fi', {"--a": 4}, {}),
        ('if [ -z "$1" ]; then A=4; else A=$1; fi', {"--a": 4}, {}),
        ("A=1\nwhile [ $# -gt 0 ]; do A=$1; shift; done", {}, {"--a": "a branch"}),
        ("A=$(nproc)", {}, {"--a": "a command"}),
        ("A='1 '$(options)", {"--a": 1}, {"$(a command)": "further options"}),
        ("set -- -t 4 x\ngetopts t: o\nshift $((OPTIND-1))\nA=$1", {}, {"--a": "a command"}),
        ("A=$(($2 * 4))", {}, {"--a": "$2"}),
        ("A=${M%%-*}", {}, {"--a": "$M"}),
        ("declare -A T=([x]=1 [y]=2)\nA=${T[$1]}", {}, {"--a": "a branch"}),
        ("read A", {}, {"--a": "a command"}),
        ("false && A=1 || A=2", {"--a": 2}, {}),
        ("x | read A\nA=3", {"--a": 3}, {}),
        ("while true; do A=$((A+1)); done", {}, {"--a": "a branch"}),
        ("for i in {1..200}; do for j in {1..200}; do A=$j; done; done", {}, {"--a": "a branch"}),
        ("A=$((9**9**9**9))", {}, {"--a": "a command"}),
        ("A=$((((2**62)**62)**62 << 62))", {}, {"--a": "a command"}),
    ],
)
def test_what_stays_undecided(script: str, settings: dict[str, object], undecided: dict[str, str]) -> None:
    found = read_options(f"{script}\ntorchrun train.py --a $A\n")
    assert (found.settings, found.open) == (settings, undecided)


def test_launches_of_which_one_runs_agree_or_are_undecided() -> None:
    script = "if [ $1 = one ]; then torchrun t.py --a 1 --b 2; else torchrun t.py --a 1 --b 3 --c; fi\n"
    found = read_options(script)
    assert (found.settings, found.open) == ({"--a": 1}, {"--b": "a branch", "--c": "a branch"})
    found = read_options("for T in 1 2; do torchrun t.py --a 7 --t $T; done\n")
    assert (found.settings, found.open) == ({"--a": 7}, {"--t": "a branch"})


def test_a_text_that_looks_like_a_launch_is_a_value() -> None:
    found = read_options("python train.py --name 'run old.py again' --size 2\n")
    assert found.settings == {"--name": "run old.py again", "--size": 2}


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("srun -l python", 32),
        ("srun bash -c 'python", 32),
        ("srun -n 4 python", None),
        ("srun torchrun", None),
        ("python", None),
    ],
)
def test_tasks_of_a_job_are_ranks_without_a_launcher(launch: str, ranks: int | None) -> None:
    quote = "'" * launch.count("'")
    script = f"#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n{launch} train.py --a 1{quote}\n"
    found = read_options(script)
    assert (found.settings["--a"], found.ranks) == (1, ranks)


def test_options_after_a_comment_are_named() -> None:
    found = read_options("torchrun train.py --a 1 \\\n  # why \\\n  --b 2 --c 3\n")
    assert (found.settings, found.stray) == ({"--a": 1}, ("--b",))


def test_a_sourced_file_is_read_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export QUEUES=1\nTP=4\n")
    script = '. "$(dirname "$0")/env.sh"\nsource ./other.sh\ntorchrun train.py --tp $TP\n'
    found = read_options(script, tmp_path / "run.sh")
    assert (found.settings, found.sourced) == ({"env.QUEUES": 1, "--tp": 4}, ["./other.sh"])
    (tmp_path / "below").mkdir()
    for name in (tmp_path / "env.sh", "../env.sh", "e" * 300):
        outside = read_options(f"source {name}\ntorchrun train.py --tp $TP\n", tmp_path / "below" / "run.sh")
        assert (outside.settings, outside.sourced) == ({}, [str(name)])
    assert read_options(script).sourced == ["$0/env.sh", "./other.sh"]


def test_a_value_that_the_script_sets_itself_is_not_stated() -> None:
    script = "TP=4\nPP=$2\ntorchrun train.py --tp $TP --pp $PP\n"
    found = read_options(script, None, {"PP": "8", "TP": "2", "NONE": "1"})
    assert (found.settings, found.unused) == ({"--tp": 4, "--pp": 8}, ("TP", "NONE"))


@pytest.mark.prove
def test_values_are_limited_and_real_scripts_are_not() -> None:
    doubling = "A=aaaaaaaaaa\n" + "A=$A$A\n" * 30 + "torchrun train.py --a $A\n"
    stripping = f"A={'y' * 999}\n" + "B=${A#*x}\n" * 10_000
    branching = "".join(f"V{number}=1\n" for number in range(3000)) + "if x; then A=1; fi\n" * 3000
    for script in (doubling, stripping, branching, 'A=\'eval "$A" "$A"\'\neval $A\n'):
        with pytest.raises(RequestError, match="more than 1,000,000 characters"):
            read_options(script)
    long = f'DATA="{"1.0 /data/part " * 400}"\n' + "for i in {1..200}; do echo $DATA; done\n" + "torchrun train.py --a 1\n"
    assert read_options(long).settings == {"--a": 1}
