"""The yardstick itself: batches, limits, ratios and pages, from turns made by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Picture

from benchmarks import goals, limits, origin, report
from benchmarks.contest import Contest, Result, Setting, sittings_of, too_large
from benchmarks.crew import Turn
from benchmarks.engines import ENGINES
from benchmarks.engines.task import Task
from benchmarks.figures import figures_of
from benchmarks.page import write
from benchmarks.results import Results
from benchmarks.workloads import by_name
from benchmarks.workloads.hot import HotApart
from benchmarks.workloads.model import Accelerated, Model, batches, make_layers
from benchmarks.workloads.workload import pieces

WORKLOADS = ["lm", "nmt", "dlrm", "resnet", "small", "sparsity-2"]


def turn(seconds: float, size_bytes: float = 0.0, **spans: float) -> Turn:
    return Turn(seconds, seconds / 2, size_bytes, size_bytes / 2, 1.0, spans)


def contest(workload: str = "lm", num_hosts: int = 8) -> Contest:
    """Parallax at 0.30 s, DDP at 0.90 s, 0.05 s of computing, 5 MB at 200 Mbit/s."""
    names = ("parallax", "ddp-sparse", "horovod", "alone")
    setting = Setting(workload, num_hosts, "200mbit", True, names, repetitions=3)
    results = [
        Result("parallax", {"torch": "1"}, 9, [turn(s, 5e6) for s in (0.2, 0.3, 0.4)]),
        Result("ddp-sparse", {"torch": "1"}, 2, [turn(s, 2e7) for s in (0.6, 0.9, 1.2)]),
        Result("alone", {"torch": "1"}, 50, [turn(0.05, update=0.01)] * 3),
    ]
    return Contest(setting, [results, [Result("horovod", absent="no")]], "today", "here")


@pytest.mark.parametrize("fused", ["", "-fused"])
@pytest.mark.parametrize(("kind", "decays"), [("lm", True), ("dlrm", False)])
def test_adamw_is_for_engines_that_take_it(
    kind: str, decays: bool, fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    task = Task.from_environment(f"{kind}-adam{fused}", is_emulated=True, options={})
    assert task.workload.name == f"{kind}-adam{fused}"
    optimizer = task.optimizer([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["weight_decay"] > 0) == decays
    assert bool(optimizer.defaults["fused"]) == bool(fused)
    with pytest.raises(ValueError, match=f"{kind}-adam.* trains with AdamW"):
        task.adagrad([])


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
        rows = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        assert torch.allclose(rows, torch.tensor(1e-4))


def test_an_emulated_accelerator_hands_out_gradients_in_pieces_and_rows_last() -> None:
    workload = by_name("nmt")
    workload.compute_ms = 0.0  # type: ignore[misc]
    model = Model(workload, make_layers(workload, emulated=True), sparse=True)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: order.append(name))
    ids, others = next(batches(workload, 0))
    model(ids, others).backward()
    assert order[0].startswith("layers.layers.out")
    assert set(order[-2:]) == {"tables.0.weight", "tables.1.weight"}
    names = [name for name, _ in model.named_parameters()]
    assert sorted(order) == sorted(names)
    assert order.index(names[2]) > order.index(names[-3])  # The encoder's first after its last.


def test_pieces_are_consecutive_and_of_about_the_same_size() -> None:
    assert pieces([1, 1, 1, 1, 4, 4, 4], int, 4) == [[1, 1, 1, 1], [4], [4], [4]]
    assert pieces([9], int, 3) == [[9], [], []]


def test_a_table_starts_the_same_in_one_piece_and_in_shards() -> None:
    table = by_name("dlrm").tables[3]
    assert np.array_equal(table.start()[2000:3000], table.start(2000, 3000))


def test_candidates_of_the_language_model_are_distinct() -> None:
    looked_up = by_name("lm").batch(0, 0).ids[1]
    candidates = looked_up[640:]
    assert len(candidates) == len(np.unique(candidates)) == 2048


def test_hot_rows_apart_are_the_same_lookups() -> None:
    whole = by_name("lm")
    apart = HotApart(whole, (64, 512), is_emulated=True)
    *cold, first_hot, second_hot = apart.batch(3, 1).ids
    pairs = zip(cold, [first_hot, second_hot], strict=True)
    for found, ids in zip(pairs, whole.batch(3, 1).ids, strict=True):
        assert np.array_equal(np.sort(np.concatenate(found)), np.sort(ids, axis=None))
    assert first_hot.max() < 64 <= cold[0].min()
    assert second_hot.max() < 512 <= cold[1].min()
    assert [table.num_rows for table in apart.tables[2:]] == [64, 512]
    with pytest.raises(ValueError, match="hot rows of 1 tables are given; lm has 2"):
        HotApart(whole, (64,), is_emulated=True)
    with pytest.raises(ValueError, match="take --emulated"):
        HotApart(whole, (64, 512), is_emulated=False)


@pytest.mark.parametrize(("rate", "bits"), [("200mbit", 2e8), ("1gbit", 1e9), ("0.5gbit", 5e8)])
def test_rates(rate: str, bits: float) -> None:
    assert limits.bits_a_second(rate) == bits


@pytest.mark.parametrize("rate", ["200", "fast", "mbit", "1e3mbit", "-1gbit", "1gbps"])
def test_a_wrong_rate_is_named(rate: str) -> None:
    with pytest.raises(ValueError, match="as in 200mbit"):
        limits.bits_a_second(rate)


@pytest.mark.parametrize(
    "name", ["cnn", "lm-huge", "small-x", "sparsity-0", "sparsity-200", "nmt-x"]
)
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
    # 0.6 between 0.2 and 0.3; 0.9 between 0.3 and 0.4; 1.2 after 0.4
    assert ddp.ratio == pytest.approx(sorted([0.6 / 0.25, 0.9 / 0.35, 1.2 / 0.4])[1])
    assert ours.limit == pytest.approx(0.2)
    assert ours.wire_bytes == 5e6
    assert alone.limit == pytest.approx(0.05)
    assert ours.split == pytest.approx(
        {"compute": 0.04, "update": 0.01, "exchange": 0.2, "wait": 0.05}
    )
    assert sum(ddp.split.values()) == pytest.approx(ddp.seconds)


def test_the_update_is_the_engine_s_own_unless_it_waits_in_it() -> None:
    held = contest()
    results = held.sittings[0]
    results[1].turns = [turn(s, 2e7, update=0.03) for s in (0.6, 0.9, 1.2)]
    assert figures_of(held)[1].split["update"] == 0.03
    results[1].engine = "horovod"
    held.sittings.pop()
    assert figures_of(held)[1].split["update"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("seconds", "compute", "exchange", "wait"),
    [(0.01, 0.0, 0.0, 0.0), (0.03, 0.02, 0.0, 0.0), (0.1, 0.04, 0.05, 0.0), (0.3, 0.04, 0.2, 0.05)],
)
def test_the_parts_of_a_step_are_never_more_than_it(
    seconds: float, compute: float, exchange: float, wait: float
) -> None:
    held = contest()
    held.sittings[0][0].turns = [turn(seconds, 5e6)] * 3
    split = figures_of(held)[0].split
    expected = {"compute": compute, "update": 0.01, "exchange": exchange, "wait": wait}
    assert split == pytest.approx(expected)


def test_without_the_step_alone_the_limit_is_the_accelerator_s_or_the_wire_s() -> None:
    held = contest()
    held.sittings[0].pop()
    held.sittings[0][0].turns = [turn(0.3, 1e3)] * 3
    assert figures_of(held)[0].limit == 0.02
    assert "wire only" not in report.table(held)
    held.setting = dataclasses.replace(held.setting, is_emulated=False)
    assert figures_of(held)[0].limit == pytest.approx(4e-5)
    assert "| 0.0 ms (wire only) |" in report.table(held)


def test_an_engine_of_a_later_sitting_is_compared_with_that_sitting() -> None:
    held = contest()
    slower = [turn(s) for s in (0.6, 0.4, 0.8)]  # the machine had a slow hour
    horovod = Result("horovod", {}, 2, [turn(s) for s in (1.0, 3.0, 0.8)])
    held.sittings[1] = [Result("parallax", {}, 9, slower), horovod]
    by_engine = {each.engine: each for each in figures_of(held)}
    assert by_engine["horovod"].ratio == pytest.approx(2.0)  # of 2, 5 and 1
    assert by_engine["parallax"].seconds == 0.3


def test_the_table_names_who_is_left_out() -> None:
    text = report.table(contest())
    assert "| Parallax | 300.0 ms [200.0–400.0] | 1.00 × | 200.0 ms | 1.50 | 5.00 |" in text
    assert "| DDP sparse | 900.0 ms [600.0–1,200.0] | 2.57 × |" in text
    assert "Horovod is left out: no" in text


def test_with_real_compute_a_synchronous_engine_with_another_loss_is_marked() -> None:
    held = contest()
    for result, loss in zip(held.sittings[0], (2.0, 2.001, 1.5), strict=True):
        result.loss = loss
    assert "loss" not in report.table(held)
    held.setting = dataclasses.replace(held.setting, is_emulated=False)
    assert "another loss" not in report.table(held)
    assert "| 2.001 |" in report.table(held)
    held.sittings[0][1].loss = 2.01
    assert "- **DDP sparse has another loss than Parallax" in report.table(held)
    held.sittings[0][1].loss = math.nan
    assert "- **DDP sparse has another loss than Parallax" in report.table(held)


def test_sittings_are_told() -> None:
    held = contest()
    assert "sittings" not in report.table(held)
    ours, ddp, alone = held.sittings[0]
    later = dataclasses.replace(ours, turns=[turn(s, 5e6) for s in (0.3, 0.4, 0.5)])
    held.sittings[:1] = [[ours, alone], [later, ddp]]
    told = "2 sittings, for memory: no exchange; DDP sparse. Parallax was in each, at 300.0, 400.0"
    assert told in report.table(held)


def test_too_few_bytes_are_told() -> None:
    held = contest()
    for moved, is_told in ((6e6, False), (4e6, True)):
        for turn in held.sittings[0][0].turns:
            turn.sent_bytes = turn.received_bytes = moved
        assert ("- **Parallax moved fewer bytes than it must" in report.table(held)) is is_told


def test_goals_say_what_was_and_was_not_reached() -> None:
    lines = goals.goals_table([contest()]).splitlines()
    assert any(
        "DDP sparse | ≥ 4.5 × | 2.57 × | **not reached**; ms: compute 40, " in line
        for line in lines
    )
    assert any("Horovod | ≥ 6 × | not measured" in line for line in lines)
    assert any("its limit | ≤ 1.25 × | 1.50 × | **not reached**" in line for line in lines)
    assert any("its formula | ≤ 1.05 ×" in line and "| reached" in line for line in lines)
    against = "| lm-8x200mbit-emulated | lm-2x200mbit-emulated | ≤ 1.3 × |"
    assert any(f"{against} not measured" in line for line in lines)
    lines = goals.goals_table([contest(), contest(num_hosts=2)]).splitlines()
    assert any(f"{against} 1.00 × | reached" in line for line in lines)


def test_a_page_of_several_machines_says_so(tmp_path: Path) -> None:
    here, there = contest(), dataclasses.replace(contest(num_hosts=2), machine="there")
    alone = write(Results([here]), tmp_path / "one").read_text()
    assert "Settings were measured on" not in alone
    text = write(Results([here, there]), tmp_path / "two").read_text()
    assert "on 2 machines, as told below each table: 1 on here; 1 on there." in text


def test_what_others_had_of_the_processors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(10.0, 1000.0), (40.0, 1100.0)])
    monkeypatch.setattr(origin, "_processor_time", lambda: next(times))
    held = dataclasses.replace(contest(), stolen=origin.Theft().share())
    assert "Others on the same hardware had 30% of the processors' time." in report.table(held)
    assert "Others on" not in report.table(contest())
    monkeypatch.undo()
    assert 0 <= origin.Theft().share() <= 1


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


def test_an_engine_that_is_too_large_even_alone_is_named() -> None:
    engines = ["parallax", "ddp-sparse", "torchrec", "alone"]
    reasons = too_large(engines, by_name("lm-large"), 8, 21e9)
    assert reasons["ddp-sparse"] == "needs 35 GB beside Parallax, 21 are free"
    assert set(reasons) == {"ddp-sparse", "alone"}
    assert not too_large(engines, by_name("lm-large"), 2, 21e9)


def test_an_engine_of_three_processes_needs_the_memory_of_three() -> None:
    engines, workload = ["parallax", "torchrec", "tensorflow"], by_name("sparsity-2")
    assert "torchrec" not in too_large(engines, workload, 8, 8e9)
    assert "tensorflow" in too_large(engines, workload, 8, 8e9)


def test_results_are_kept_and_become_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contests = [contest(), contest("nmt", 4), contest("sparsity-2", 4), contest("sparsity-50", 4)]
    for number, held in enumerate(contests):
        held.save(tmp_path / f"{number}.json")
        assert Contest.load(tmp_path / f"{number}.json") == held
    drawn: dict[str, list[str]] = {}
    save = Picture.savefig

    def savefig(picture: Picture, path: Path, **options: object) -> None:
        axes = [each for each in picture.axes if each.lines or each.patches]
        handles = [each.get_legend_handles_labels()[1] for each in axes]
        drawn[Path(path).stem] = sorted({label for labels in handles for label in labels})
        save(picture, path, **options)

    monkeypatch.setattr(Picture, "savefig", savefig)
    page = write(Results(contests), tmp_path / "page")
    text = page.read_text()
    assert {"DDP sparse", "Parallax", "Parallax's limit"} <= set(drawn["throughput"])
    assert {"DDP sparse", "Parallax"} <= set(drawn["bytes"])
    assert drawn["split"] == ["compute", "exchange", "update", "wait"]
    assert {"DDP sparse", "Parallax"} <= set(drawn["sparsity"])
    assert "## lm, 8 hosts × 200mbit, emulated accelerator" in text
    for name in ("throughput", "bytes", "split", "sparsity"):
        assert f"![{name}]({name}.png)" in text
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 10_000


def test_a_sweep_alone_becomes_a_page(tmp_path: Path) -> None:
    text = write(Results([contest("sparsity-2", 4)]), tmp_path).read_text()
    assert "![sparsity](sparsity.png)" in text
    assert "throughput" not in text


def test_a_peer_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.ENVIRONMENTS", Path("nowhere"))
    assert ENGINES["horovod"].missing == "not installed: `make peer-horovod`"
    assert ENGINES["ddp-dense"].missing is None


def test_versions_that_changed_between_contests_are_all_told() -> None:
    first, second = contest(), contest()
    second.sittings[0][0].versions["torch"] = "2"
    assert report.versions([first, second]).splitlines()[:2] == [
        "- Parallax: torch 1 and 2",
        "- DDP sparse: torch 1",
    ]
