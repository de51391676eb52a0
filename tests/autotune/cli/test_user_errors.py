"""What users do wrong reaches the terminal as their own error, with its traceback from the rank, once, and the remedy."""

import sys
from pathlib import Path

import pytest
from called import Command

pytestmark = pytest.mark.usefixtures("forked_ranks")

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    steps = 0

    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 8)

    def forward(self, x):
        return self.inner(x).square().mean()


class Late(Net):
    def forward(self, x):
        Late.steps += 1  # a look at the module takes one
        return super().forward(x[:, :7] if Late.steps > 2 else x)


def batch(samples, generator):
    return {"x": torch.randn(samples, 8, generator=generator)}


def raises():
    return {"inner": Net()}["outer"], batch


def wrong_shape():
    return Net(width=16), batch


def frozen():
    return Net().requires_grad_(False), batch


def late():
    return Late(), batch
"""


@pytest.fixture
def models(folder: Path) -> str:
    """The name of a module of its own in the current folder, so that no test finds another's."""
    name = f"users_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(MODELS)
    return name


@pytest.mark.prove
@pytest.mark.parametrize(
    ("factory", "status", "error", "where", "remedy"),
    [
        ("raises", 2, "KeyError: 'outer'", 'return {"inner": Net()}["outer"]', "fix the factory"),
        ("wrong_shape", 1, "mat1 and mat2 shapes cannot be multiplied", "return self.inner(x)", "fix the module"),
        pytest.param(
            "late",
            1,
            "mat1 and mat2 shapes cannot be multiplied",
            "return super().forward(x[:, :7]",
            "fix the module",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_error_of_the_users_code(
    models: str, command: Command, factory: str, status: int, error: str, where: str, remedy: str
) -> None:
    answer = command("sweep", f"{models}:{factory}", "--runner", "local", "--ranks", 2, "--trials", 6, "--trial-seconds", 0.1)
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.count("Traceback (most recent call last)") == 1, answer.err
    assert where in answer.err
    assert error in answer.err.splitlines()[-1]
    assert remedy in answer.err


def test_a_module_without_anything_to_train(models: str, command: Command, folder: Path) -> None:
    answer = command("sweep", f"{models}:frozen", "--runner", "local", "--ranks", 2)
    assert answer.status == 2
    (line,) = answer.err.splitlines()
    assert "no parameter requires a gradient; return a module that can be trained" in line
    assert not (folder / "jobs.db").exists()


@pytest.mark.prove
def test_none_of_it_is_imported_here(models: str, command: Command) -> None:
    command("sweep", f"{models}:frozen", "--runner", "local", "--ranks", 2)
    assert models not in sys.modules
