import gc

import numpy as np
import pytest
import torch

from facetrain.errors import DataError
from facetrain.head.class_chunk import Chunk, product
from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import own_margin
from facetrain.head.sampling import Stage
from tests.support.dense_head import MARGINS, dense_loss
from tests.support.heads import combined, make_head, make_margin, margin_settings
from tests.unit.head.helpers import BATCH, CLASSES, SIZE, batch, sample_of, small_head


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("rates", [(0.4, 1.0, 0.0), (1.0, 0.4)])
def test_a_head_in_stages_samples_with_the_rate_of_the_stage(rates, placement):
    stages = tuple(Stage(2 * number, rate, "off") for number, rate in enumerate(rates))
    head = small_head(stages=stages, placement=placement)
    # A head that starts in the middle of a stage, as after a resume, continues bit by bit.
    later = small_head(stages=stages, placement=placement)
    weight = head.weight.data.clone().requires_grad_()
    momentum = torch.zeros_like(weight)
    for step in range(2 * len(rates)):
        rate = rates[step // 2]
        if step == 3:
            rows = {name: table.clone() for name, table in head.row_state().items()}
            later.load_rows(lambda name, start, stop, saved=rows: saved[name][start:stop])
        head.begin_step(step, lr=0.1)
        assert head.classes_per_step == CLASSES * rate
        embedding, label = batch(step)
        loss = head(embedding, label)
        loss.backward()
        sample = torch.arange(CLASSES) if rate == 1 else sample_of(head, label, step, rate)
        expected = dense_loss(embedding.detach(), weight, label, MARGINS["arcface"], sample)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        with torch.no_grad():
            momentum[sample] = 0.9 * momentum[sample] + weight.grad[sample] + 0.01 * weight[sample]
            weight[sample] -= 0.1 * momentum[sample]
        weight.grad = None
        torch.testing.assert_close(head.row_state()["weight"], weight.detach())
        if step >= 3:
            later.begin_step(step, lr=0.1)
            later(*batch(step)).backward()
            assert all(torch.equal(later.row_state()[name], rows) for name, rows in head.row_state().items())


@pytest.mark.parametrize("margin", ["arcface", "magface"])
def test_a_loss_scale_scales_the_gradient_of_the_embeddings_and_no_update(margin):
    plain, scaled = (
        make_head(
            embedding_size=SIZE, num_classes=CLASSES, margin=margin_settings(margin), weight_dtype=torch.float64,
            momentum_dtype=torch.float64, chunk_size=5,
        )
        for _ in range(2)
    )  # fmt: skip
    scale = torch.tensor(65536.0, dtype=torch.float64)
    for step in range(2):
        embedding, label = batch(step)
        other = embedding.detach().clone().requires_grad_()
        plain.begin_step(step, lr=0.1)
        scaled.begin_step(step, lr=0.1, loss_scale=scale)
        plain(embedding, label).backward()
        (scaled(other, label) * scale).backward()
        assert torch.equal(other.grad, embedding.grad * 65536)
        assert torch.equal(scaled.weight.data, plain.weight.data)


def test_a_skipped_step_changes_nothing():
    head = small_head(update_in_backward=False)
    before = head.weight.data.clone()
    head(*batch()).backward()
    head.step(torch.tensor(1.0), torch.tensor(1.0))
    head.step(torch.tensor(1.0), torch.tensor(0.0))
    assert torch.equal(head.weight.data, before)


def test_micro_batches_that_sample_different_classes_update_each_class_once():
    head = small_head(update_in_backward=False, sample_rate=0.2)
    weight, is_updated = head.weight.data.clone().requires_grad_(), torch.zeros(CLASSES, dtype=torch.bool)
    embedding, label = batch()
    for part in (slice(0, 6), slice(6, 12)):
        sample = sample_of(head, label[part], 0, 0.2)
        is_updated[sample] = True
        dense_loss(embedding[part].detach(), weight, label[part], MARGINS["arcface"], sample).backward()
        head(embedding[part], label[part]).backward()
    head.step(torch.tensor(1.0), torch.tensor(0.0))
    expected = weight - 0.1 * is_updated[:, None] * (weight.grad + 0.01 * weight)
    torch.testing.assert_close(head.weight.data, expected.detach())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_loss_that_is_not_finite_changes_neither_centers_nor_momentum(optimizer):
    head = small_head(optimizer=optimizer)
    head(*batch()).backward()
    before = {name: t.clone() for name, t in head.row_state().items()}
    embedding, label = batch(1)
    head.begin_step(1, lr=0.1)
    head(embedding * float("nan"), label).backward()
    assert all(torch.equal(head.row_state()[name], t) for name, t in before.items())
    head.begin_step(2, lr=0.1)
    head(*batch(2)).backward()
    assert not torch.equal(head.weight.data, before["weight"])


class SteepPenalty(Margin):
    def target(self, cos_G, norm_G):
        return cos_G

    def penalty(self, norm_G):
        return torch.where(norm_G > 0, 0, (-norm_G).sqrt())


STEEP = {
    "by the cosine": lambda cos: torch.where(cos > 0, cos**1.5, cos),
    "by the norm": lambda cos, norm: torch.where(norm > 0, cos, (-norm).sqrt()),
    "penalty": SteepPenalty(),
}


@pytest.mark.parametrize("name", STEEP)
def test_a_slope_of_the_margin_that_is_not_finite_changes_neither_centers_nor_momentum(name):
    head = small_head()
    head(*batch()).backward()
    head.margin = own_margin(STEEP[name], {}, {})
    before = {name: t.clone() for name, t in head.row_state().items()}
    embedding, label = batch(1)
    head.begin_step(1, lr=0.1)
    loss = head(embedding, label)
    loss.backward()
    assert loss.isfinite() and embedding.grad.isnan().any()
    assert all(torch.equal(head.row_state()[name], t) for name, t in before.items())


def test_adamw_on_all_rows_equals_adamw_of_torch():
    head = small_head(optimizer="adamw")
    weight = torch.nn.Parameter(head.weight.data.clone())
    reference = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.01)
    for step in range(4):
        embedding, label = batch(step)
        head.begin_step(step, lr=0.1)
        head(embedding, label).backward()
        dense_loss(embedding.detach(), weight, label, MARGINS["arcface"]).backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(head.weight.data, weight.data)


@pytest.mark.parametrize("scale", [64.0, 128.0])
def test_the_loss_neither_overflows_nor_underflows_if_all_cosines_are_minus_1(scale):
    head = small_head(margin="cosface")
    head.margin = make_margin("cosface", scale=scale)
    direction = torch.nn.functional.normalize(torch.ones(1, SIZE, dtype=torch.float64))
    head.weight.data.copy_(-direction.expand(CLASSES, SIZE))
    loss = head(direction.expand(BATCH, SIZE).clone(), batch()[1])
    expected = np.log(np.exp(-0.4 * scale) + CLASSES - 1) + 0.4 * scale
    assert loss.item() == pytest.approx(expected)


def test_an_embedding_in_the_direction_of_its_center_has_a_finite_loss():
    head = small_head(weight_dtype=torch.float32)  # the cosines of several rows are rounded to more than 1
    embedding = (3 * head.weight.data).requires_grad_()
    loss = head(embedding, torch.arange(CLASSES))
    loss.backward()
    assert loss.isfinite() and embedding.grad.isfinite().all()


def test_a_center_of_zeros_has_the_cosine_0():
    head = small_head()
    embedding, label = batch()
    other = next(number for number in range(CLASSES) if number not in label)
    head.weight.data[torch.stack([label[0], torch.tensor(other)])] = 0
    reference = embedding.detach().clone().requires_grad_()
    expected = dense_loss(reference, head.weight.data.clone(), label, MARGINS["arcface"])
    loss = head(embedding, label)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(embedding.grad, reference.grad)


def test_a_label_outside_the_classes_is_an_error_and_changes_no_center():
    head = small_head()
    before = head.weight.data.clone()
    for wrong in (-1, CLASSES):
        embedding, label = batch()
        label[3] = wrong
        with pytest.raises(DataError, match=f"label {wrong} .*23 classes"):
            head(embedding, label)
    assert torch.equal(head.weight.data, before)


def test_labels_near_two_to_the_31_update_the_right_centers():
    ranks = 2**27
    head = make_head(
        embedding_size=SIZE, num_classes=2**31, margin=combined(scale=4, m2=0.5), sample_rate=0.0,
        rank=ranks - 1, world_size=ranks,
    )  # fmt: skip
    before = head.weight.data.clone()
    embedding = torch.randn(2, SIZE).requires_grad_()
    head.begin_step(0, lr=0.1)
    head(embedding, torch.tensor([2**31 - 1, 2**31 - 3])).backward()
    moved = (head.weight.data != before).any(1).nonzero()[:, 0]
    assert (moved + head.shard.start).tolist() == [2**31 - 3, 2**31 - 1]
    head.begin_step(1, lr=0.1)
    with pytest.raises(DataError, match="label 2147483648 .*2,147,483,648 classes"):
        head(embedding, torch.tensor([2**31, 5]))


@pytest.mark.parametrize("margin", list(MARGINS))
def test_products_in_bfloat16_stay_close_to_the_dense_reference(margin):
    head = small_head(margin, weight_dtype=torch.float32, product_dtype=torch.bfloat16)
    weight = head.weight.data.double().requires_grad_()
    embedding, label = batch()
    reference = embedding.detach().clone().requires_grad_()
    ours = embedding.detach().float().requires_grad_()
    loss = head(ours, label)
    loss.backward()
    expected = dense_loss(reference, weight, label, MARGINS[margin])
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert torch.nn.functional.cosine_similarity(ours.grad.double(), reference.grad).min() > 0.98


def test_centers_in_bfloat16_have_their_exact_norms():
    head = small_head(weight_dtype=torch.bfloat16)
    embedding, label = batch()
    expected = dense_loss(embedding.detach(), head.weight.data.double(), label, MARGINS["arcface"])
    assert head(embedding, label).item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_that_were_expected_give_the_same_step():
    plain, expecting = small_head(sample_rate=0.3), small_head(sample_rate=0.3)
    for step in range(2):
        embedding, label = batch(step)
        for head in (plain, expecting):
            head.begin_step(step, lr=0.1)
        expecting.expect_labels(label)
        assert plain(embedding, label).item() == expecting(embedding, label).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margin", ["arcface", "filtered"])
def test_exponentials_that_are_kept_or_computed_again_give_the_same_bits(margin, dtype):
    heads = [
        small_head(margin, weight_dtype=torch.float32, product_dtype=dtype, recompute=name)
        for name in ("on", "off")
    ]
    for step in range(2):
        found = []
        for head in heads:
            embedding, label = batch(step)
            embedding = embedding.detach().float().requires_grad_()
            head.begin_step(step, lr=0.1)
            loss = head(embedding, label)
            loss.backward()
            found.append((loss, embedding.grad, head.weight.data))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margin", ["arcface", "filtered"])
def test_bounded_exponentials_are_as_precise_as_a_running_maximum(margin, dtype):
    errors = []
    for bounded in (True, False):
        head = small_head(margin, weight_dtype=torch.float32, product_dtype=dtype)
        if not bounded:
            head.chunk_type = Chunk
        embedding, label = batch()
        weight = head.weight.data.double().requires_grad_()
        reference = embedding.detach().clone().requires_grad_()
        ours = embedding.detach().float().requires_grad_()
        head(ours, label).backward()
        dense_loss(reference, weight, label, MARGINS[margin]).backward()
        errors.append((ours.grad.double() - reference.grad).norm() / reference.grad.norm())
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("expectations", ["off", "fixed"])
def test_no_tensor_of_a_chunk_lives_until_the_backward_pass(expectations):
    # Each would pin the memory around it: the peak of a step was up to a quarter of the tables larger.
    counts = []
    gc.freeze()  # what there was before is not counted, which takes long
    for chunk_size in (64, 1, 4, 64):  # the first pass also fills caches
        head = small_head(chunk_size=chunk_size, expectations=expectations, recompute="on")
        head.begin_step(0, lr=0.1)
        embedding, label = batch(0)
        before = live_tensors()
        loss = head(embedding, label)
        counts.append(live_tensors() - before)
        loss.backward()
    gc.unfreeze()
    assert len(set(counts[1:])) == 1


def live_tensors():
    gc.collect()
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


def test_products_equal_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(17, 33, generator=generator), torch.randn(33, 21, generator=generator)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        expected = (x.double() @ y.double()).to(dtype)
        for result in (product(x, y), product(x, y.T.contiguous().T), product(x.T.contiguous().T, y)):
            torch.testing.assert_close(result, expected)
