"""What belongs to a step."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import parallax
from parallax.observability.ledger import Entry, Ledger, Record


def test_a_record_is_told_whole() -> None:
    record = Record(3, 0.5, samples=7.0, parameters={"a": Entry(1, 2, rows=4), "b": Entry()})
    whole = asdict(record)
    del whole["blocks"]  # They are in the parameters when somebody reads them.
    assert record.as_dict() == whole


def test_a_step_begins_where_the_one_before_ended() -> None:
    ledger = Ledger()
    ledger.header_seconds, ledger.header_bytes = 9.0, 100
    ledger.add("table", rows=3)
    time.sleep(0.05)
    ledger.begin()
    ledger.header_bytes += 10
    ledger.close_step()
    time.sleep(0.05)
    ledger.close_step()
    first, second = (record.seconds for record in ledger.steps)
    assert first < 0.05 <= second
    assert (ledger.steps[0].header_seconds, ledger.steps[0].header_bytes) == (0.0, 10)
    assert ledger.steps[0].parameters == {}


def test_setting_up_is_no_step() -> None:
    """Tables may take minutes to be filled."""
    model = nn.Embedding(10, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fill(ids: torch.Tensor, row_shape: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
        time.sleep(0.3)
        return torch.zeros(len(ids), *row_shape, dtype=dtype)

    session = parallax.parallelize(model, optimizer, init={"weight": fill})
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    assert session.ledger.steps[0].seconds < 0.3
    session.close()
