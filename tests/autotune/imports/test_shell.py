"""Options of launch scripts, read without running them."""

import pytest

from autotune.imports.shell import read_options

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
        "--num-layers": 32, "--norm-epsilon": 1e-5, "--hidden-size": 4096, "--swiglu": True, "--micro-batch-size": 2,
        "--global-batch-size": 128, "launcher.nproc_per_node": 8, "launcher.nnodes": 4,
        "launcher.master_addr": "${MASTER_ADDR}",
        "env.CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }  # fmt: skip
    assert found.open == ["--save", "--data-path"]


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


@pytest.mark.parametrize("text", ["", "echo hello\n", "A=$B\nB=$A\necho $A\n", "for x in 1 2; do echo '\n", "$(("])
def test_nothing_to_read(text: str) -> None:
    assert read_options(text).settings == {}
