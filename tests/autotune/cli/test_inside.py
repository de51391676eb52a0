"""`autotune sweep --inside` refuses what it cannot steer, before it starts the run."""

from pathlib import Path

import pytest
from called import Command

from autotune.cli.inside import require_steered
from autotune.errors import RequestError
from autotune.inside.job import templated


def test_a_loop_of_its_own_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfor batch in loader: ...\n")
    with pytest.raises(RequestError, match="InRunTuner"):
        require_steered(["python", str(script)])


def test_trainers_are_steered(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTTrainer\nSFTTrainer(model).train()\n")
    require_steered(["python", str(script)])


def test_a_placeholder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="placeholder"):
        require_steered(["python", str(tmp_path / "train.py"), "{micro_batch_size}"])


def test_the_job_carries_the_knobs_in_the_users_own_arguments() -> None:
    words = ["python", "train.py", "--per_device_train_batch_size", "4", "--gradient-accumulation-steps=2", "--lr", "1"]
    assert templated(words)[3:5] == ["{micro_batch_size}", "--gradient-accumulation-steps={gradient_accumulation_steps}"]


@pytest.mark.parametrize(("words", "said"), [(("--share", 0.02), "add --inside"), (("--inside", "--share", 2), "one percent")])
def test_a_share_is_part_of_such_a_run(command: Command, words: tuple[str | float, ...], said: str) -> None:
    answer = command("sweep", *words, "--", "python", "-m", "train")
    assert answer.status == 2
    assert said in answer.err
