"""The comparison of our readings with the frameworks', and the cases of recipes: what counts as right and as wrong."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.frameworks.cases import Answer, Expectation, ask, commands, problems
from benchmarks.frameworks.launched_words import launched, slurm_variables, world_of
from benchmarks.frameworks.public_recipes import Reading, differences

OWN_ARGUMENT = Reading(verdict="refused", reason="unrecognized arguments: --own 1")
LEGAL = Reading(verdict="accepted", values={"zero_stage": 3, "micro_batch_size": 2})


@pytest.mark.parametrize(
    ("judge", "own", "wrong"),
    [
        (LEGAL, Reading(verdict="accepted", values={"zero_stage": 3, "micro_batch_size": 2}), []),
        (LEGAL, Reading(verdict="refused", values={"zero_stage": 3, "micro_batch_size": 2}), ["legal, but refused"]),
        (LEGAL, Reading(verdict="unread"), ["legal, but unread"]),
        (
            LEGAL,
            Reading(verdict="accepted", values={"zero_stage": 3, "micro_batch_size": 1}),
            ["micro_batch_size: 1, the framework 2"],
        ),
        (LEGAL, Reading(verdict="accepted", values={"zero_stage": 3}, remarks="micro_batch_size=1 is assumed"), []),
        (Reading(verdict="refused"), Reading(verdict="accepted"), ["missed refusal"]),
        (
            Reading(verdict="refused", reason="error: unrecognized arguments: --own 1"),
            Reading(verdict="accepted", remarks="--own"),
            [],
        ),
        (Reading(verdict="unjudged"), Reading(verdict="refused"), []),
        (
            Reading(verdict="accepted", values={"samples_per_rank": 4, "tensor_parallel_size": 2, "world": 8}),
            Reading(verdict="accepted", values={"global_batch_size": 32, "tensor_parallel_size": 2}),
            ["global_batch_size: 32, the framework 16"],
        ),
    ],
)
def test_what_is_wrong(judge: Reading, own: Reading, wrong: list[str]) -> None:
    assert list(differences(judge, own)) == wrong


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """A folder that a user without rights can read, as whom scripts run."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_words_that_a_script_gives_to_its_program(readable_folder: Path) -> None:
    script = readable_folder / "run.sh"
    script.write_text(
        "#!/bin/bash\nTP=${TP:-4}\nA=(--layers '([0]*1+[1]*2)' $UNSET)\n"
        'srun -l bash -c "torchrun --nproc_per_node $SLURM_GPUS_PER_NODE --nnodes=2 train.py --tp $TP ${A[0]} \\"${A[1]}\\""\n'
        "#SBATCH --gpus-per-node=4\n"
    )
    words, variables = launched(script, readable_folder, [])
    assert words == ["torchrun", "--nproc_per_node", "4", "--nnodes=2", "train.py", "--tp", "4", "--layers", "([0]*1+[1]*2)"]
    assert variables["SLURM_GPUS_PER_NODE"] == slurm_variables(script.read_text())["SLURM_GPUS_PER_NODE"]
    assert world_of(words, variables) == 8


def test_a_case_is_asked_in_its_folder(tmp_path: Path) -> None:
    case = tmp_path / "case.txt"
    case.write_text("command: autotune lint a.json --json; diff a b\n")
    (tmp_path / "a.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    (words,) = commands(case)
    answer = ask(words, tmp_path)
    right = Expectation(
        status=0, values={"files.0.knobs.zero_stage": 2, "files.0.knobs.micro_batch_size": (1, 2)}, has=("deepspeed",)
    )
    assert list(problems(right, answer)) == []
    wrong = Expectation(status=1, values={"files.0.knobs.zero_stage": 3}, lacks=("deepspeed",), written={"out": (("x",), ())})
    assert len(list(problems(wrong, answer))) == 4


def test_a_file_that_a_case_writes() -> None:
    expected = Expectation(status=0, written={"a.sh": (("^srun",), ("torchrun",))})
    assert list(problems(expected, Answer(status=0, text="", files={"a.sh": "srun python"}))) == []
    assert len(list(problems(expected, Answer(status=0, text="", files={"a.sh": "torchrun"})))) == 2
