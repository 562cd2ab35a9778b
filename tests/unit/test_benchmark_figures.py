"""The yardstick itself: batches, limits, ratios and pages, from turns made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import goals, limits, report
from benchmarks.contest import Contest, Result, Setting, sittings_of
from benchmarks.crew import Turn
from benchmarks.engines import ENGINES
from benchmarks.figures import figures_of
from benchmarks.page import write
from benchmarks.workloads import by_name
from benchmarks.workloads.model import Accelerated, Model, batches, make_layers

WORKLOADS = ["lm", "nmt", "dlrm", "resnet", "sparsity-2"]


def turn(seconds: float, size_bytes: float = 0.0, **spans: float) -> Turn:
    return Turn(seconds, seconds / 2, size_bytes, size_bytes / 2, 1.0, spans)


def contest(workload: str = "lm", num_hosts: int = 8) -> Contest:
    """Parallax at 0.30 s, DDP at three times that, 0.05 s of computing, 5 MB at 200 Mbit/s."""
    names = ("parallax", "ddp-sparse", "horovod", "alone")
    setting = Setting(workload, num_hosts, "200mbit", True, names, repetitions=3)
    results = [
        Result("parallax", {"torch": "1"}, 9, [turn(s, 5e6) for s in (0.2, 0.3, 0.4)]),
        Result("ddp-sparse", {"torch": "1"}, 2, [turn(s, 2e7) for s in (0.6, 0.9, 1.2)]),
        Result("alone", {"torch": "1"}, 50, [turn(0.05, update=0.01)] * 3),
    ]
    return Contest(setting, [results, [Result("horovod", absent="no")]], "today", "here")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_trains_and_its_batches_depend_on_step_and_worker_only(name: str) -> None:
    workload = by_name(name)
    first, again, other = (workload.batch(3, 1), workload.batch(3, 1), workload.batch(3, 2))
    for one, two in zip([*first.ids, *first.others], [*again.ids, *again.others], strict=True):
        assert np.array_equal(one, two)
    changed = zip([*first.ids, *first.others], [*other.ids, *other.others], strict=True)
    assert any(not np.array_equal(*pair) for pair in changed)
    model = Model(workload, make_layers(workload, emulated=False), sparse=True)
    ids, others = next(batches(workload, 0))
    loss = model(ids, others)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_emulated_accelerator_gives_every_parameter_a_gradient() -> None:
    workload = by_name("sparsity-2")
    workload.compute_ms = 0.0  # type: ignore[misc]
    layers = make_layers(workload, emulated=True)
    assert isinstance(layers, Accelerated)
    model = Model(workload, layers, sparse=True)
    ids, others = next(batches(workload, 0))
    model(ids, others).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.all(parameter.grad.to_dense().abs().sum() > 0)


def test_a_table_starts_the_same_in_one_piece_and_in_shards() -> None:
    table = by_name("dlrm").tables[3]
    assert np.array_equal(table.start()[2000:3000], table.start(2000, 3000))


def test_candidates_of_the_language_model_are_distinct() -> None:
    looked_up = by_name("lm").batch(0, 0).ids[1]
    candidates = looked_up[640:]
    assert len(candidates) == len(np.unique(candidates)) == 2048


@pytest.mark.parametrize(("rate", "bits"), [("200mbit", 2e8), ("1gbit", 1e9), ("0.5gbit", 5e8)])
def test_rates(rate: str, bits: float) -> None:
    assert limits.bits_a_second(rate) == bits


@pytest.mark.parametrize("rate", ["200", "fast", "mbit", "1e3mbit", "-1gbit", "1gbps"])
def test_a_wrong_rate_is_named(rate: str) -> None:
    with pytest.raises(ValueError, match="as in 200mbit"):
        limits.bits_a_second(rate)


@pytest.mark.parametrize("name", ["cnn", "lm-huge", "sparsity-0", "sparsity-200", "nmt-x"])
def test_a_wrong_workload_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        by_name(name)


def test_the_limit_is_the_larger_of_computing_and_the_wire() -> None:
    assert limits.limit_seconds(0.05, 5e6, "200mbit") == pytest.approx(0.2)
    assert limits.limit_seconds(0.05, 5e6, "10gbit") == pytest.approx(0.05)


def test_the_formula_counts_rows_both_ways_and_the_layers() -> None:
    workload = by_name("sparsity-2")  # 400 rows of 256, and 256 × 8 + 8 of the layers
    rows = 2 * 400 * (256 * 4 + 4) * 3 / 4
    layers = 2 * (256 * 8 + 8) * 4 * 3 / 4
    assert limits.formula_bytes(workload, 4) == pytest.approx(rows + layers)
    whole = 2 * 20_000 * 256 * 4 * 3 / 4
    assert limits.formula_bytes(by_name("sparsity-100"), 4) == pytest.approx(whole + layers)


def test_figures_are_medians_and_ratios_of_neighbouring_turns() -> None:
    ours, ddp, alone = figures_of(contest())
    assert (ours.seconds, ours.fastest, ours.slowest, ours.ratio) == (0.3, 0.2, 0.4, 1.0)
    assert ddp.ratio == pytest.approx(3.0)
    assert ours.limit == pytest.approx(0.2)
    assert ours.wire_bytes == 5e6
    assert alone.limit == pytest.approx(0.05)
    assert ours.split == pytest.approx(
        {"compute": 0.04, "update": 0.01, "exchange": 0.2, "wait": 0.05}
    )
    assert sum(ddp.split.values()) == pytest.approx(ddp.seconds)


def test_an_engine_of_a_later_sitting_is_compared_with_that_sitting() -> None:
    held = contest()
    slower = [turn(2 * s) for s in (0.2, 0.3, 0.4)]  # the machine had a slow hour
    horovod = Result("horovod", {}, 2, [turn(4 * s) for s in (0.2, 0.3, 0.4)])
    held.sittings[1] = [Result("parallax", {}, 9, slower), horovod]
    by_engine = {each.engine: each for each in figures_of(held)}
    assert by_engine["horovod"].ratio == pytest.approx(2.0)
    assert by_engine["parallax"].seconds == 0.3


def test_the_table_names_who_is_left_out() -> None:
    text = report.table(contest())
    assert "| Parallax | 300.0 ms [200.0–400.0] | 1.00 × | 200.0 ms | 1.50 | 5.00 |" in text
    assert "| DDP sparse | 900.0 ms [600.0–1,200.0] | 3.00 × |" in text
    assert "Horovod is left out: no" in text


def test_goals_say_what_was_and_was_not_reached() -> None:
    lines = goals.goals_table([contest()]).splitlines()
    assert any("DDP sparse | ≥ 4.5 × | 3.00 × | **not reached**" in line for line in lines)
    assert any("Horovod | ≥ 6 × | not measured" in line for line in lines)
    assert any("its limit | ≤ 1.25 × | 1.50 × | **not reached**" in line for line in lines)
    assert any("its formula | ≤ 1.05 ×" in line and "| reached" in line for line in lines)


def test_engines_sit_together_as_memory_allows() -> None:
    workload = by_name("lm")
    engines = ["parallax", "ddp-sparse", "horovod", "torchrec", "deepspeed", "alone"]
    assert sittings_of(engines, workload, 2, 100e9) == [
        ["parallax", "alone", "ddp-sparse", "horovod", "torchrec", "deepspeed"]
    ]
    apart = sittings_of(engines, workload, 8, 24e9)
    assert len(apart) > 1
    assert all(sitting[0] == "parallax" for sitting in apart)
    assert sorted(name for sitting in apart for name in sitting[1:]) == sorted(engines[1:])


def test_results_are_kept_and_become_a_page(tmp_path: Path) -> None:
    contests = [contest(), contest("nmt", 4), contest("sparsity-2", 4), contest("sparsity-50", 4)]
    for number, held in enumerate(contests):
        held.save(tmp_path / f"{number}.json")
        assert Contest.load(tmp_path / f"{number}.json") == held
    page = write(contests, None, tmp_path / "page")
    text = page.read_text()
    assert "## lm, 8 hosts × 200mbit, emulated accelerator" in text
    for name in ("throughput", "bytes", "split", "sparsity"):
        assert f"![{name}]({name}.png)" in text
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 10_000


def test_a_peer_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.ENVIRONMENTS", Path("nowhere"))
    assert ENGINES["horovod"].missing == "not installed: `make peer-horovod`"
    assert ENGINES["ddp-dense"].missing is None
