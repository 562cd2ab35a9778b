"""Start values depend on the row alone."""

from __future__ import annotations

import pytest
import torch

from parallax import init

SHAPE = torch.Size([64])


@pytest.mark.parametrize("fill", [init.normal(1.0, 2.0), init.uniform(-1.0, 3.0)])
def test_rows_do_not_depend_on_their_company(fill) -> None:  # type: ignore[no-untyped-def]
    ids = torch.arange(1000)
    whole = fill(ids, SHAPE, torch.float32, 5)
    assert torch.equal(fill(ids[7::3], SHAPE, torch.float32, 5), whole[7::3])
    assert not torch.equal(fill(ids, SHAPE, torch.float32, 6), whole)
    assert whole.dtype == torch.float32
    assert float(whole.mean()) == pytest.approx(1.0, abs=0.03)


def test_normal_has_its_moments_and_no_infinity() -> None:
    values = init.normal(0.0, 3.0)(torch.arange(4000), SHAPE, torch.float64, 0)
    assert bool(values.isfinite().all())
    assert float(values.std()) == pytest.approx(3.0, rel=0.01)
    kurtosis = float((values / 3.0).pow(4).mean())
    assert kurtosis == pytest.approx(3.0, abs=0.05)
    columns = values[:, :-1].flatten(), values[:, 1:].flatten()
    assert abs(float(torch.corrcoef(torch.stack(columns))[0, 1])) < 0.01


def test_uniform_stays_within_its_bounds() -> None:
    values = init.uniform(2.0, 4.0)(torch.arange(4000), SHAPE, torch.float64, 0)
    assert 2.0 <= float(values.min()) < 2.001
    assert 3.999 < float(values.max()) < 4.0


def test_constant() -> None:
    assert (
        init.constant(0.5)(torch.arange(2), torch.Size([]), torch.float64, 0).tolist() == [0.5] * 2
    )
