"""Whatever way a script reaches backward and step: the workers equal one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.parity import assert_same
from tests.support.scripts import SCRIPTS, run_alone, run_together
from tests.support.workers import run_workers

SPECIAL = {"accumulated_with_changing_shares"}
EVERY = sorted(set(SCRIPTS) - SPECIAL)
DENSE_TOO = ["plain", "sometimes_unused", "unfrozen_later", "accumulated", "by_submodules"]
ALL_REDUCED = {"routes": {"*": "all-reduce"}}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_script(name: str, num_workers: int) -> None:
    found = run_workers(run_together, num_workers, name)[0]
    assert_same(found, run_alone(name), torch.float64)


@pytest.mark.parametrize("name", DENSE_TOO)
def test_script_with_all_parameters_dense(name: str) -> None:
    """Adam moves a parameter with a zero gradient, and leaves one with none alone."""
    found = run_workers(run_together, 3, name, "adam", ALL_REDUCED)[0]
    assert_same(found, run_alone(name, "adam"), torch.float64)


def run_every_script() -> dict[str, dict[str, torch.Tensor]]:
    return {name: run_together(name, "adam") for name in EVERY}


def test_scripts_whose_optimizer_changes_every_row() -> None:
    for name, found in run_workers(run_every_script, 3, timeout_seconds=300)[0].items():
        assert_same(found, run_alone(name, "adam"), torch.float64)


def test_each_accumulated_backward_keeps_its_own_weight() -> None:
    found = run_workers(run_together, 2, "accumulated_with_changing_shares")[0]
    assert_same(found, run_alone("accumulated_with_changing_shares"), torch.float64)
