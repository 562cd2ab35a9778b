"""A contest with real engines on real hosts; nothing of it is timed here."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from benchmarks import convergence
from benchmarks.contest import Contest, Setting, hold
from benchmarks.crew import CrewError
from benchmarks.engines import ENGINES, Engine
from benchmarks.limits import formula_bytes
from benchmarks.report import LOSS_TOLERANCE
from benchmarks.testbed import Testbed
from benchmarks.workloads import by_name

pytestmark = pytest.mark.skipif(Testbed.missing() is not None, reason=str(Testbed.missing()))


@pytest.fixture(scope="module")
def held() -> Contest:
    engines = ("parallax", "ddp-sparse", "broken", "not-here", "alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "broken", Engine("Broken", "no_such_module"))
        patch.setitem(ENGINES, "not-here", Engine("Not here", "x", environment="nowhere"))
        setting = Setting("sparsity-2", 2, "1gbit", False, engines, 2, turn_seconds=0.1)
        return hold(setting, lambda _: None)


def test_engines_train_the_same_and_parallax_moves_what_the_formula_says(held: Contest) -> None:
    results = {each.engine: each for each in held.sittings[0]}
    ours, ddp = results["parallax"], results["ddp-sparse"]
    assert len(ours.turns) == len(ddp.turns) == len(results["alone"].turns) == 2
    expected = formula_bytes(by_name("sparsity-2"), 2)
    assert ours.turns[0].sent_bytes == pytest.approx(expected, rel=0.1)
    assert results["alone"].turns[0].sent_bytes < 0.05 * expected
    assert ours.versions.pop("parallax")
    assert ours.versions == ddp.versions
    assert set(ddp.versions) == {"torch", "python"}
    spans = ours.turns[0].spans
    assert {"forward", "backward", "update", "batch", "rows", "dense", "headers"} == set(spans)
    assert all(seconds > 0 for seconds in spans.values())


def test_an_engine_that_fails_or_is_missing_is_named_and_the_others_go_on(held: Contest) -> None:
    absent = {each.engine: each.absent for sitting in held.sittings for each in sitting}
    assert "no_such_module" in str(absent["broken"])
    assert "runs/logs/sparsity-2-2x1gbit-real/broken-" in str(absent["broken"])
    assert absent["not-here"] == "not installed: `make peer-nowhere`"


def test_the_same_steps_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ("parallax", "ddp-sparse")
    monkeypatch.setitem(ENGINES, "parallax", replace(ENGINES["parallax"], settling_steps=0))
    # So short that every turn has two steps: the losses are those of the same step.
    setting = Setting("sparsity-2", 2, "1gbit", False, engines, 2, turn_seconds=1e-6)
    ours, ddp = hold(setting, lambda _: None).sittings[0]
    assert ours.num_steps == ddp.num_steps == 2
    for mine, theirs in zip(ours.turns, ddp.turns, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.turns[1].loss < ours.turns[0].loss


PEERS = ("ddp-dense", "horovod", "torchrec", "torchrec-table", "deepspeed", "tensorflow")


@pytest.fixture(scope="module")
def beside_peers() -> Contest:
    """Those that are installed, all in one contest: `make peers`."""
    engines = [name for name in PEERS if ENGINES[name].missing is None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "parallax", replace(ENGINES["parallax"], settling_steps=0))
        setting = Setting("sparsity-2", 2, "1gbit", False, ("parallax", *engines), 1, 1e-6)
        return hold(setting, lambda _: None)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.timeout(600)
def test_a_peer_trains_the_same(name: str, request: pytest.FixtureRequest) -> None:
    if ENGINES[name].missing is not None:
        pytest.skip(str(ENGINES[name].missing))
    contest: Contest = request.getfixturevalue("beside_peers")
    results = {each.engine: each for sitting in contest.sittings for each in sitting}
    assert results[name].absent is None
    assert results[name].turns
    if ENGINES[name].is_synchronous:
        assert results[name].loss == pytest.approx(results["parallax"].loss, rel=LOSS_TOLERANCE)


@pytest.mark.skipif(
    ENGINES["tensorflow"].missing is not None, reason=str(ENGINES["tensorflow"].missing)
)
@pytest.mark.parametrize("workload", ["lm", "nmt", "dlrm"])
@pytest.mark.timeout(600)
def test_tensorflow_has_the_same_layers(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has nobody to be asynchronous to, so its losses are those of torch."""
    monkeypatch.setitem(ENGINES, "parallax", replace(ENGINES["parallax"], settling_steps=0))
    engines = ("parallax", "tensorflow")
    setting = Setting(workload, 1, "1gbit", False, engines, 1, turn_seconds=1e-6)
    ours, theirs = hold(setting, lambda _: None).sittings[0]
    assert theirs.loss == pytest.approx(ours.loss, rel=LOSS_TOLERANCE)


@pytest.mark.skipif(find_spec("gensim") is None, reason="the text comes with gensim")
@pytest.mark.timeout(600)
def test_a_race_on_real_text_has_the_same_perplexities() -> None:
    race = convergence.Race(num_hosts=2, rate="1gbit", turn_steps=4, max_steps=8)
    try:
        tracks = convergence.run(race, lambda _: None).tracks
    except CrewError as error:
        if "DDP" in str(error):  # torch's sparse all-reduce over gloo rarely aborts the process.
            pytest.skip(str(error))
        raise
    ours, theirs = tracks["Parallax"], tracks["DDP sparse"]
    assert ours.steps == theirs.steps == [4, 8]
    assert ours.perplexities == pytest.approx(theirs.perplexities, rel=1e-3)
    assert ours.perplexities[1] < ours.perplexities[0]  # Adagrad's very first steps overshoot.
    assert ours.seconds[1] > ours.seconds[0] > 0
