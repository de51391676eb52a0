"""Parts of batches have the samples in order, and weights with which their losses add up."""

import pytest
import torch

from executor.inside.batches import parts_of


def test_parts_are_weighted_by_what_is_counted() -> None:
    labels = torch.tensor([[1, 2, 3], [1, 2, -100], [1, -100, -100]])
    parts = parts_of([{"labels": labels, "ids": torch.arange(3)}], 2)
    assert [part.batch["ids"].tolist() for part in parts] == [[0, 1], [2]]
    assert [part.weight for part in parts] == [1.0, 0.0]
    assert [(part.is_first, part.is_last) for part in parts] == [(True, False), (False, True)]


def test_batches_of_a_step_have_equal_weights() -> None:
    parts = parts_of([torch.arange(3), torch.arange(5)], 8)
    assert [part.weight for part in parts] == [0.5, 0.5]


def test_only_batches_with_equal_shapes_and_counts_are_joined() -> None:
    (part,) = parts_of([torch.arange(2), torch.arange(2, 4)], 4)
    assert part.batch.tolist() == [0, 1, 2, 3]
    uneven = [{"labels": torch.tensor([[0, 1, 2]])}, {"labels": torch.tensor([[0, 1, -100]])}]
    assert len(parts_of(uneven, 4)) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_weights_add_up(size: int) -> None:
    parts = parts_of([torch.arange(7), torch.arange(7), torch.arange(7)], size)
    assert sum(part.weight for part in parts) == pytest.approx(1.0)
    assert torch.cat([part.batch for part in parts]).tolist() == [*range(7)] * 3
