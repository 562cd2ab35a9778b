"""Where a lookup's ids lie in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.data.recipe import find_recipe, leaves_of

FIRST = torch.arange(24).reshape(4, 6)
SECOND = torch.arange(100, 130).reshape(5, 6)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x,
        lambda x: x[:, :-1],
        lambda x: x[:, 1:],
        lambda x: x[1:],
        lambda x: x[:-1],
        lambda x: x[:, 4],
        lambda x: x.flatten(),
        lambda x: x[:, 1:].reshape(-1),
        lambda x: x.to(torch.int32),
        lambda x: x.clone(),
    ],
)
def test_the_same_part_is_taken_of_the_next_batch(cut: Any) -> None:
    labels = torch.ones(4, dtype=torch.int64)
    recipe = find_recipe(cut(FIRST), leaves_of((labels, {"ids": FIRST})))
    assert recipe is not None
    found = recipe.ids(leaves_of((torch.ones(5, dtype=torch.int64), {"ids": SECOND})))
    assert found is not None
    assert found.flatten().tolist() == cut(SECOND).flatten().tolist()


@pytest.mark.parametrize("ids", [FIRST + 1, FIRST[:, ::2], FIRST[:2], FIRST.flip(0)])
def test_ids_that_are_no_part_of_the_batch_have_no_recipe(ids: Tensor) -> None:
    assert find_recipe(ids, [FIRST]) is None


def test_a_batch_of_another_structure_has_no_such_part() -> None:
    column = find_recipe(FIRST[:, 4], [FIRST])
    cut = find_recipe(FIRST[:, 1:], [FIRST])
    second = find_recipe(FIRST, [FIRST + 1, FIRST])
    assert column is not None
    assert cut is not None
    assert second is not None
    assert column.ids([FIRST[:, :3]]) is None
    assert cut.ids([torch.tensor([1, 2])]) is None
    assert cut.ids([torch.empty(3, 0, dtype=torch.int64)]) is None
    assert second.ids([FIRST]) is None


def test_only_whole_numbers_can_be_ids() -> None:
    @dataclass
    class Sample:
        ids: Tensor
        values: Tensor
        name: str

    batch = [Sample(FIRST, FIRST.float(), "x"), (FIRST.bool(), FIRST.short()), None]
    assert [leaf.dtype for leaf in leaves_of(batch)] == [torch.int64, torch.int16]
