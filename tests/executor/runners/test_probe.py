"""A look at a user's factory: in a process of its own, and what is wrong with it in words."""

from pathlib import Path

import pytest

from executor.errors import FactoryError
from executor.runners.one_process import describe_factory
from executor.user_module.factory import load_factory
from search_spaces.models.model import ON_BLOCKS, FactoryModel
from search_spaces.trial import Workload

pytestmark = pytest.mark.usefixtures("forked_ranks")

WORKLOAD = Workload(global_batch_size=4, sequence_length=16)
FACTORIES = """
import torch
from torch import nn

class Loss(nn.Linear):
    def forward(self, input):
        return super().forward(input).mean()

def build():
    module = Loss(3, 2)
    module.bias.requires_grad_(False)
    return module, lambda size, generator: {"input": torch.zeros(size, 3)}

def broken():
    raise KeyError("no such layer")

def leaves():
    raise SystemExit(2)

def no_pair():
    return nn.Linear(3, 2)

def no_module():
    return 1, print

def no_batch():
    return nn.Linear(3, 2), None

def misspelt():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)), print, {"tensor": {"*": "colwise", "layers.*.up": "colwise"}}

def frozen():
    return nn.Linear(3, 2).requires_grad_(False), print

constant = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_factories.py").write_text(FACTORIES)
    (tmp_path / "users_needs.py").write_text("import a_library_that_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("users_factories", "names no factory; write it as module:factory"),
        (
            "not_there:build",
            "there is no module 'not_there'; run in the folder that holds it, or put that folder on PYTHONPATH",
        ),
        ("users_needs:build", "raised ModuleNotFoundError: No module named 'a_library_that_is_not_here'; fix the module"),
        ("users_factories:built", "users_factories.py has no 'built'; define a function of this name there"),
        ("users_factories:constant", "users_factories.py cannot call its 'constant'"),
        ("users_factories:broken", "users_factories:broken raised KeyError: 'no such layer'; fix the factory"),
        ("users_factories:leaves", "raised SystemExit: 2"),
        ("users_factories:no_pair", "returned Linear; return the pair"),
        ("users_factories:no_module", "returned int as the module"),
        ("users_factories:no_batch", "returned NoneType as batch"),
        ("users_factories:frozen", "no parameter requires a gradient"),
        (
            "users_factories:misspelt",
            "plan.tensor names 'layers.*.up', which no module of it has; give a name",
        ),
    ],
)
def test_what_a_factory_does_wrong_is_one_line_with_the_remedy(factories: Path, reference: str, message: str) -> None:
    with pytest.raises(FactoryError) as caught:
        load_factory(reference, WORKLOAD)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_are_counted_in_another_process(factories: Path) -> None:
    model = describe_factory("users_factories:build", WORKLOAD, [str(factories)])
    assert model == FactoryModel(
        reference="users_factories:build", parameter_count=8, frozen_parameter_count=2, python_path=(str(factories),),
        no_stages="no blocks repeat in a ModuleList or Sequential of it", precision="fp32",
        refused_knobs=tuple((knob, "it has no repeated blocks that it calls as modules") for knob in ON_BLOCKS),
        flops_per_sample=24.0,
    )  # fmt: skip


@pytest.mark.prove
def test_an_error_of_the_users_comes_once_with_its_own_traceback(factories: Path) -> None:
    with pytest.raises(FactoryError) as caught:
        describe_factory("users_factories:broken", WORKLOAD, [str(factories)])
    text = str(caught.value)
    assert text.startswith("users_factories:broken raised KeyError: 'no such layer'; fix the factory\nTraceback")
    assert text.count("Traceback") == 1
    assert 'raise KeyError("no such layer")' in text
    assert "load_factory" not in text
