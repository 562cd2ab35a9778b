"""The sampled softmax against the full one, its draws against their stated frequencies."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parallax
from parallax.nn import SampledSoftmaxLoss

CLASSES, WIDTH, BATCH = 50, 6, 16
COUNTS = 1000 / (torch.arange(CLASSES) + 1.0)
PROPOSALS = {
    "log_uniform": {},
    "unigram": {"proposal": "unigram", "counts": COUNTS.flip(0), "power": 0.75},
    "given": {"proposal": torch.rand(CLASSES, generator=torch.Generator().manual_seed(3)) + 0.01},
}


def make(num_samples: int, dtype: torch.dtype = torch.float64, **options) -> SampledSoftmaxLoss:
    torch.manual_seed(0)
    loss = SampledSoftmaxLoss(CLASSES, WIDTH, num_samples, dtype=dtype, **options)
    if loss.bias is not None:
        torch.nn.init.normal_(loss.bias.weight)
    return loss


def make_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return hidden, torch.randint(CLASSES, (BATCH,), generator=generator)


def logits(loss: SampledSoftmaxLoss, hidden: Tensor) -> Tensor:
    bias = None if loss.bias is None else loss.bias.weight.squeeze(1)
    return F.linear(hidden, loss.table.weight, bias)


def gradients(loss: SampledSoftmaxLoss, value: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(loss.parameters())))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_all_classes_as_candidates_are_the_full_softmax(proposal: str, reduction: str) -> None:
    loss = make(CLASSES, reduction=reduction, **PROPOSALS[proposal])
    hidden, targets = make_batch()
    found = loss(hidden, targets)
    expected = F.cross_entropy(logits(loss, hidden), targets, reduction=reduction)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for ours, theirs in zip(
        gradients(loss, found.sum()), gradients(loss, expected.sum()), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_samples", [1, 12, 40])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_classes_are_distinct_and_as_frequent_as_stated(proposal: str, num_samples: int) -> None:
    """Both ways of drawing: 40 of 50 skewed classes need more draws than there are classes."""
    drawn = make(num_samples, **PROPOSALS[proposal]).proposal
    ids, counts, trials = torch.arange(CLASSES), torch.zeros(CLASSES).double(), 500
    for _ in range(trials):
        candidates = drawn.draw(ids.device)
        assert bool((candidates.diff() > 0).all())
        counts[candidates] += 1
    expected = drawn.log_expected_count(ids).exp()
    # Five standard deviations of a binomial share.
    tolerance = 5 * (expected * (1 - expected) / trials).sqrt() + 1e-12
    assert bool(((counts / trials - expected).abs() < tolerance).all())
    at_most = max(1, 0.02 * num_samples)
    assert num_samples <= float(expected.sum()) <= num_samples + at_most


def test_a_power_flattens_counts() -> None:
    drawn = make(12, proposal="unigram", counts=COUNTS, power=0.5).proposal
    chance = drawn.chance(torch.tensor([0, 3]))
    assert float(chance[0] / chance[1]) == pytest.approx(2.0)


def test_both_ways_of_drawing_are_used() -> None:
    assert make(12).proposal.num_draws <= CLASSES < make(40).proposal.num_draws < math.inf
    assert make(CLASSES).proposal.num_draws == math.inf


def test_a_class_far_more_frequent_than_the_others_does_not_stop_the_draw() -> None:
    weights = torch.full((CLASSES,), 1e-12)
    weights[0] = 1.0
    loss = make(CLASSES - 1, proposal=weights)
    assert abs(len(loss.proposal.draw(weights.device)) - CLASSES + 1) < 10
    assert bool(loss(*make_batch()).isfinite())


def test_mean_gradient_of_many_draws_is_close_to_the_full_one() -> None:
    """With 40 of 50 classes and 100 draws the distance is 1.9% of the full gradient's norm,
    1.4% with 400: mostly noise. Without the correction it is 8.4%.
    """
    loss = make(40)
    hidden, targets = make_batch()
    full = torch.cat(
        [g.flatten() for g in gradients(loss, F.cross_entropy(logits(loss, hidden), targets))]
    )
    trials = 100
    mean = sum(
        torch.cat([g.flatten() for g in gradients(loss, loss(hidden, targets))])
        for _ in range(trials)
    )
    distance = (mean / trials - full).norm() / full.norm()
    assert distance < 0.05


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_a_model_that_is_right_stays(proposal: str) -> None:
    """Targets drawn from the model's own softmax: the mean gradient is zero, as the full one's.

    Only the candidates are random: all classes are targets at once, weighted by their probability.
    Measured are 0.01 to 0.02, and 0.044 to 0.050 without the correction.
    """
    loss = make(40, reduction="none", **PROPOSALS[proposal])
    hidden = make_batch()[0][:1]
    chance = logits(loss, hidden).softmax(1).detach()[0]
    targets, trials = torch.arange(CLASSES), 60
    mean = sum(
        gradients(loss, (loss(hidden.expand(CLASSES, -1), targets) * chance).sum())[0]
        for _ in range(trials)
    )
    assert float((mean / trials).norm()) < 0.03


def test_a_target_among_the_candidates_counts_once() -> None:
    loss = make(12, proposal=torch.ones(CLASSES))
    hidden, _ = make_batch()
    candidates = loss.proposal.draw(hidden.device, torch.Generator().manual_seed(5))
    others = torch.tensor([i for i in range(CLASSES) if i not in candidates])
    targets = torch.cat([candidates[:2], candidates[-1:], others[:1], others[-1:]])
    found = loss(hidden[:5], targets, torch.Generator().manual_seed(5))
    # The same by a plain softmax over each row's own set; equal chances need no correction.
    expected = []
    for state, target in zip(hidden, targets, strict=False):
        ids = torch.cat([target[None], candidates[candidates != target]])
        row = logits(loss, state[None])[0, ids]
        expected.append(F.cross_entropy(row[None], torch.zeros(1, dtype=torch.long)))
    torch.testing.assert_close(found, torch.stack(expected).mean(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("chunk_size", [1, 7, CLASSES, 8192])
@pytest.mark.parametrize("bias", [True, False])
def test_exact_evaluation_in_chunks(
    dtype: torch.dtype, limit: float, chunk_size: int, bias: bool
) -> None:
    loss = make(5, dtype, bias=bias)
    hidden, targets = make_batch(dtype)
    expected = F.cross_entropy(logits(loss, hidden), targets)
    found = loss.full(hidden, targets, chunk_size=chunk_size)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), atol=limit, rtol=limit)
    assert loss.perplexity(hidden, targets, chunk_size) == pytest.approx(
        math.exp(expected.item()), rel=5 * limit
    )


def test_windows_keep_their_shape() -> None:
    loss = make(CLASSES, reduction="none")
    hidden, targets = make_batch()
    hidden, targets = hidden.reshape(4, 4, WIDTH), targets.reshape(4, 4)
    torch.testing.assert_close(loss(hidden, targets), loss.full(hidden, targets, 9))
    torch.testing.assert_close(loss.log_prob(hidden, targets), -loss.full(hidden, targets))
    assert loss(hidden, targets).shape == (4, 4)


def test_lookups_never_hold_the_whole_table() -> None:
    loss, sizes = make(5), []
    loss.table.register_forward_hook(lambda m, i, output: sizes.append(len(output)))
    loss.full(*make_batch(), chunk_size=20)
    assert sizes == [BATCH, 20, 20, 10]
    sizes.clear()
    loss(*make_batch())
    assert len(sizes) == 1  # One lookup for targets and candidates.


def test_generators_decide_the_draw() -> None:
    loss, batch = make(12), make_batch()
    first = loss(*batch, torch.Generator().manual_seed(4))
    assert torch.equal(first, loss(*batch, torch.Generator().manual_seed(4)))
    assert not torch.equal(first, loss(*batch, torch.Generator().manual_seed(5)))
    torch.manual_seed(4)
    assert torch.equal(first, loss(*batch))


def test_sparse_gradients() -> None:
    dense, sparse = make(12), make(12, sparse=True)
    for loss in (dense, sparse):
        loss(*make_batch(), torch.Generator().manual_seed(0)).backward()
    assert sparse.table.weight.grad.is_sparse
    torch.testing.assert_close(sparse.table.weight.grad.to_dense(), dense.table.weight.grad)


def test_proposals_are_not_part_of_the_state() -> None:
    loss = make(12, **PROPOSALS["given"])
    assert set(loss.state_dict()) == {"table.weight", "bias.weight"}
    again = copy.deepcopy(loss)
    batch, seed = make_batch(), torch.Generator().manual_seed
    assert torch.equal(again(*batch, seed(1)), loss(*batch, seed(1)))


def test_tables_may_be_on_meta() -> None:
    with torch.device("meta"):
        loss = SampledSoftmaxLoss(10_000, 8, 100, proposal="log_uniform")
    assert loss.table.weight.is_meta
    assert len(loss.proposal.draw(torch.device("cpu"))) > 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": CLASSES + 1}, f"num_samples={CLASSES + 1}: take 1 to {CLASSES}"),
        ({"num_samples": 0}, f"num_samples=0: take 1 to {CLASSES}"),
        ({"proposal": "zipf"}, "'zipf': take 'log_uniform', 'unigram' or a 1-D tensor"),
        ({"proposal": "unigram"}, "needs counts="),
        ({"counts": COUNTS}, "only proposal='unigram' uses them"),
        ({"proposal": COUNTS[:-1]}, r"shape \(49,\): give one value for each of the 50"),
        ({"proposal": COUNTS[None]}, r"shape \(1, 50\)"),
        ({"proposal": "unigram", "counts": torch.arange(CLASSES)}, "0.0 for class 0: every class"),
        ({"proposal": COUNTS.log() - 5}, "finite value above 0"),
        ({"proposal": COUNTS / 0}, "has inf for class 0"),
        ({"reduction": "median"}, "take one of mean, sum, none"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict, message: str) -> None:
    with pytest.raises(parallax.errors.ConfigError, match=message):
        make(**{"num_samples": 5, **options})


@pytest.mark.parametrize("method", ["forward", "full", "log_prob", "perplexity"])
def test_wrong_batches_say_what_is_allowed(method: str) -> None:
    call = getattr(make(5), method)
    hidden, targets = make_batch()
    for wrong in (CLASSES, -1):
        with pytest.raises(
            IndexError, match=f"target {wrong} is out of range: classes are 0 to 49"
        ):
            call(hidden, targets.index_fill(0, torch.tensor([3]), wrong))
    with pytest.raises(ValueError, match="a last dimension of 6"):
        call(hidden[:, :-1], targets)
    with pytest.raises(ValueError, match="take int64 or int32"):
        call(hidden, targets.double())


def test_chunks_are_at_least_one_class() -> None:
    with pytest.raises(ValueError, match="chunk_size=0: take 1 or more"):
        make(5).full(*make_batch(), chunk_size=0)
