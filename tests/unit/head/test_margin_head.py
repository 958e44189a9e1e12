import itertools

import numpy as np
import pytest
import torch

from facetrain.errors import ConfigError, DataError
from facetrain.head.class_shard import ClassShard, shard_classes
from facetrain.head.head_settings import HeadStage
from facetrain.head.margins import CombinedMargin
from facetrain.head.sampling import draw_classes, is_drawn
from tests.support.dense_head import MARGINS, dense_loss, sample_classes
from tests.support.heads import make_head, make_margin

CLASSES, SIZE, BATCH = 23, 8, 12


def small_head(margin="arcface", **options):
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=CombinedMargin(**MARGINS[margin]),
        **{"weight_dtype": torch.float64, "momentum_dtype": torch.float64, "chunk_size": 5, "weight_decay": 0.01}
        | options,
    )  # fmt: skip
    head.lr = 0.1
    return head


def batch(number=0):
    generator = torch.Generator().manual_seed(number)
    embedding = torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
    return embedding.requires_grad_(), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def sample_of(head, label, step, rate):
    return sample_classes(ClassShard(0, CLASSES), label, rate, seed=head._seed, step=step)


@pytest.mark.parametrize("rate", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("margin", list(MARGINS))
def test_loss_gradient_and_update_equal_the_dense_reference(margin, rate):
    head = small_head(margin, sample_rate=rate)
    weight = head.weight.data.clone().requires_grad_()
    momentum = torch.zeros_like(weight)
    for step in range(3):
        embedding, label = batch(step)
        reference = embedding.detach().clone().requires_grad_()
        head.begin_step(step)
        loss = head(embedding, label)
        loss.backward()
        sample = None if rate == 1 else sample_of(head, label, step, rate)
        expected = dense_loss(reference, weight, label, MARGINS[margin], sample)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(embedding.grad, reference.grad)
        rows = torch.arange(CLASSES) if sample is None else sample
        with torch.no_grad():
            momentum[rows] = 0.9 * momentum[rows] + weight.grad[rows] + 0.01 * weight[rows]
            weight[rows] -= 0.1 * momentum[rows]
        weight.grad = None
        torch.testing.assert_close(head.weight.data, weight.detach())
        torch.testing.assert_close(head.row_state()["momentum"], momentum)


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("rates", [(0.4, 1.0, 0.0), (1.0, 0.4)])
def test_a_head_in_stages_samples_with_the_rate_of_the_stage(rates, placement):
    stages = tuple(HeadStage(2 * number, rate, "off") for number, rate in enumerate(rates))
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
        head.begin_step(step)
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
            later.begin_step(step)
            later(*batch(step)).backward()
            assert all(torch.equal(later.row_state()[name], rows) for name, rows in head.row_state().items())


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_accumulated_micro_batches_with_a_loss_scale_equal_an_update_in_the_backward_pass(rate):
    whole, parts = small_head(sample_rate=rate), small_head(sample_rate=rate, update_in_backward=False)
    for step in range(2):
        embedding, label = batch(step)
        if rate < 1:  # a micro-batch samples its own classes, so give both the same classes
            label = label[:6].repeat(2)
        for head in (whole, parts):
            head.begin_step(step)
        whole(embedding, label).backward()
        for half in (slice(0, 6), slice(6, 12)):
            (parts(embedding[half], label[half]) / 2 * 1024).backward()
        parts.step(torch.tensor(1024.0), torch.tensor(0.0))
    torch.testing.assert_close(parts.weight.data, whole.weight.data)


@pytest.mark.parametrize("margin", ["arcface", "magface"])
def test_a_loss_scale_scales_the_gradient_of_the_embeddings_and_no_update(margin):
    plain, scaled = (
        make_head(
            embedding_size=SIZE, num_classes=CLASSES, margin=make_margin(margin), weight_dtype=torch.float64,
            momentum_dtype=torch.float64, chunk_size=5,
        )
        for _ in range(2)
    )  # fmt: skip
    plain.lr = scaled.lr = 0.1
    scaled.loss_scale = torch.tensor(65536.0, dtype=torch.float64)
    for step in range(2):
        embedding, label = batch(step)
        other = embedding.detach().clone().requires_grad_()
        plain(embedding, label).backward()
        (scaled(other, label) * scaled.loss_scale).backward()
        assert torch.equal(other.grad, embedding.grad * 65536)
        assert torch.equal(scaled.weight.data, plain.weight.data)


def test_a_skipped_step_changes_nothing():
    head = small_head(update_in_backward=False)
    before = head.weight.data.clone()
    head(*batch()).backward()
    head.step(torch.tensor(1.0), torch.tensor(1.0))
    head.step(torch.tensor(1.0), torch.tensor(0.0))
    assert torch.equal(head.weight.data, before)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_loss_that_is_not_finite_changes_neither_centers_nor_momentum(optimizer):
    head = small_head(optimizer=optimizer)
    head(*batch()).backward()
    before = {name: t.clone() for name, t in head.row_state().items()}
    embedding, label = batch(1)
    head(embedding * float("nan"), label).backward()
    assert all(torch.equal(head.row_state()[name], t) for name, t in before.items())
    head(*batch(2)).backward()
    assert not torch.equal(head.weight.data, before["weight"])


def test_adamw_on_all_rows_equals_adamw_of_torch():
    head = small_head(optimizer="adamw")
    weight = torch.nn.Parameter(head.weight.data.clone())
    reference = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.01)
    for step in range(4):
        embedding, label = batch(step)
        head.begin_step(step)
        head(embedding, label).backward()
        dense_loss(embedding.detach(), weight, label, MARGINS["arcface"]).backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(head.weight.data, weight.data)


@pytest.mark.parametrize("scale", [64.0, 128.0])
def test_the_loss_neither_overflows_nor_underflows_if_all_cosines_are_minus_1(scale):
    head = small_head(margin="cosface")
    head._margin = CombinedMargin(scale=scale, m3=0.4)
    direction = torch.nn.functional.normalize(torch.ones(1, SIZE, dtype=torch.float64))
    head.weight.data.copy_(-direction.expand(CLASSES, SIZE))
    loss = head(direction.expand(BATCH, SIZE).clone(), batch()[1])
    expected = np.log(np.exp(-0.4 * scale) + CLASSES - 1) + 0.4 * scale
    assert loss.item() == pytest.approx(expected)


def test_a_label_outside_the_classes_is_an_error_and_changes_no_center():
    head = small_head()
    before = head.weight.data.clone()
    for wrong in (-1, CLASSES):
        embedding, label = batch()
        label[3] = wrong
        with pytest.raises(DataError, match=f"label {wrong} is outside the 23 classes"):
            head(embedding, label)
    assert torch.equal(head.weight.data, before)


def test_the_sample_does_not_depend_on_the_shards_and_contains_the_batchs_classes():
    positive = torch.tensor([3, 500, 999])
    whole = sample_classes(ClassShard(0, 1000), positive, 0.2, seed=4, step=7)
    pieces = []
    for rank in range(3):
        shard = shard_classes(1000, rank, 3)
        mine = positive[(positive >= shard.start) & (positive < shard.stop)] - shard.start
        pieces.append(sample_classes(shard, mine, 0.2, seed=4, step=7) + shard.start)
    assert torch.equal(torch.cat(pieces), whole)
    assert set(positive.tolist()) <= set(whole.tolist())
    assert 150 < len(whole) < 260
    other = sample_classes(ClassShard(0, 1000), positive, 0.2, seed=4, step=8)
    assert not torch.equal(whole, other)
    only = sample_classes(ClassShard(0, 1000), positive, 0.0, seed=4, step=7)
    assert only.tolist() == [3, 500, 999]


def test_labels_near_two_to_the_31_update_the_right_centers():
    ranks = 2**27
    head = make_head(
        embedding_size=SIZE, num_classes=2**31, margin=CombinedMargin(scale=4, m2=0.5), sample_rate=0.0,
        rank=ranks - 1, world_size=ranks,
    )  # fmt: skip
    head.lr = 0.1
    before = head.weight.data.clone()
    embedding = torch.randn(2, SIZE).requires_grad_()
    head(embedding, torch.tensor([2**31 - 1, 2**31 - 3])).backward()
    moved = (head.weight.data != before).any(1).nonzero()[:, 0]
    assert (moved + head.shard.start).tolist() == [2**31 - 3, 2**31 - 1]
    with pytest.raises(DataError, match="label 2147483648 is outside the 2,147,483,648 classes"):
        head(embedding, torch.tensor([2**31, 5]))


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_every_class_is_drawn_with_probability_sample_rate(rate, block):
    hits, steps = torch.zeros(1000), 2000
    for step in range(steps):
        drawn = draw_classes(ClassShard(0, 1000), rate, seed=1, step=step, block=block)
        assert (drawn.diff() > 0).all()
        assert len(drawn) == pytest.approx(1000 * rate, abs=2 * block)
        hits[drawn] += 1
    deviation = (rate * (1 - rate) / steps) ** 0.5
    assert (hits / steps - rate).abs().max() < 5 * deviation


@pytest.mark.parametrize("block", [1, 8])
def test_the_draw_of_classes_near_two_to_the_31_does_not_depend_on_the_shards(block):
    start = 2**31 - 1000
    options = {"seed": 4, "step": 7, "block": block}
    whole = draw_classes(ClassShard(start, start + 3000), 0.01, **options)
    edges = [start, start + 997, start + 2005, start + 3000]
    parts = [draw_classes(ClassShard(a, b), 0.01, **options) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    assert (whole.diff() > 0).all() and 30 - 2 * block <= len(whole) <= 30 + 2 * block


def test_classes_of_a_block_are_drawn_together_and_blocks_differ_from_step_to_step():
    apart = set()
    for step in range(50):
        drawn = draw_classes(ClassShard(0, 10_000), 0.01, seed=1, step=step, block=8)
        assert (drawn.diff() == 1).float().mean() > 0.8
        apart.update((drawn[:-1][drawn.diff() > 1] % 8).tolist())
    assert apart == set(range(8))


def test_centers_outside_the_sample_do_not_change():
    head = small_head(sample_rate=0.2)
    before = head.weight.data.clone()
    embedding, label = batch()
    head.begin_step(0)
    head(embedding, label).backward()
    moved = (head.weight.data != before).any(1).nonzero()[:, 0]
    assert torch.equal(moved, sample_of(head, label, 0, 0.2)) and len(moved) < CLASSES


def test_initial_centers_do_not_depend_on_the_number_of_ranks():
    whole = small_head(seed=5).weight.data
    parts = [small_head(seed=5, rank=r, world_size=3).weight.data for r in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(parts[0][:7], parts[1][:7])
    assert not torch.equal(small_head(seed=6).weight.data, whole)


def test_saved_rows_load_into_shards_of_another_world_size():
    whole = small_head(seed=1)
    whole(*batch()).backward()
    state = whole.row_state()
    for rank in range(3):
        part = small_head(seed=2, rank=rank, world_size=3)
        part.load_rows(lambda name, start, stop: state[name][start:stop])
        shard = part.shard
        assert torch.equal(part.weight.data, state["weight"][shard.start : shard.stop])
        assert torch.equal(part.row_state()["momentum"], state["momentum"][shard.start : shard.stop])


@pytest.mark.parametrize("rate", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_centers_in_host_memory_or_on_disk_give_the_same_numbers(placement, optimizer, rate, tmp_path):
    options = {"sample_rate": rate, "sample_block": 2, "optimizer": optimizer}
    here, there = small_head(**options), small_head(**options, placement=placement, folder=tmp_path)
    # Cases of the prefetcher: consecutive steps, a flush by row_state, skipped step 4, and step 6 twice.
    for step in (0, 1, 2, 3, 5, 6, 6, 7):
        losses = []
        for head in (here, there):
            head.begin_step(step)
            loss = head(*batch(step))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        if step in (2, 7):
            for name, table in here.row_state().items():
                torch.testing.assert_close(there.row_state()[name], table)
    assert len(list(tmp_path.glob("rank_00000/rows.bin"))) == (placement == "disk")


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_8_bit_momentum_and_its_scales_share_a_row_on_disk(weight_dtype, tmp_path):
    head = make_head(
        embedding_size=256, num_classes=50, margin=CombinedMargin(64.0, m2=0.5), placement="disk", folder=tmp_path,
        weight_dtype=weight_dtype, momentum_dtype=torch.int8, sample_rate=0.3,
    )  # fmt: skip
    head.lr = 0.1
    head.begin_step(0)
    before = {name: table.clone() for name, table in head.row_state().items()}
    label = torch.arange(12)
    head(torch.randn(12, 256, requires_grad=True), label).backward()
    after = head.row_state()
    assert (tmp_path / "rank_00000/rows.bin").stat().st_size == 50 * (256 * weight_dtype.itemsize + 256 + 64)
    for name in ("weight", "momentum", "momentum_scale"):
        assert (after[name] != before[name])[label].any(1).all()
    untouched = (after["momentum_scale"] == 0).all(1)
    assert untouched.any() and torch.equal(after["weight"][untouched], before["weight"][untouched])


def test_training_with_bfloat16_storage_stays_close_to_float32():
    exact = small_head(weight_dtype=torch.float32, momentum_dtype=torch.float32)
    small = small_head(weight_dtype=torch.bfloat16, momentum_dtype=torch.bfloat16)
    assert small.weight.data.dtype == torch.bfloat16
    for step in range(20):
        losses = []
        for head in (exact, small):
            head.begin_step(step)
            embedding, label = batch(step % 4)
            loss = head(embedding.float(), label)
            loss.backward()
            losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_training_with_8_bit_momentum_stays_close_to_float32_and_saves_its_scales(rate):
    exact, small = (
        small_head(weight_dtype=torch.float32, momentum_dtype=dtype, sample_rate=rate)
        for dtype in (torch.float32, torch.int8)
    )
    assert {name: t.dtype for name, t in small.row_state().items()} == {
        "weight": torch.float32, "momentum": torch.int8, "momentum_scale": torch.float32,
    }  # fmt: skip
    for step in range(20):
        losses = []
        for head in (exact, small):
            head.begin_step(step)
            embedding, label = batch(step % 4)
            loss = head(embedding.float(), label)
            loss.backward()
            losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_8_bit_moments_are_an_error_with_adamw():
    with pytest.raises(ConfigError, match="use bfloat16 with adamw"):
        small_head(optimizer="adamw", momentum_dtype=torch.int8)


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


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("rate", [0.003, 0.07, 0.5, 0.97])
def test_the_host_knows_which_classes_are_drawn_without_drawing_all(rate, block):
    far = 2**31 - 1000
    for step, (start, stop) in itertools.product(
        range(5), [(0, 700), (13, 14), (300, 701), (far, far + 900), (9, 9)]
    ):
        options = {"seed": 2, "step": step, "block": block}
        drawn = draw_classes(ClassShard(start, stop), rate, **options).numpy()
        classes = np.arange(start, stop)
        np.testing.assert_array_equal(is_drawn(classes, rate, **options), np.isin(classes, drawn))
        whole = draw_classes(ClassShard(max(start - 2000, 0), stop + 2000), rate, **options).numpy()
        np.testing.assert_array_equal(drawn, whole[(whole >= start) & (whole < stop)])


def test_labels_that_were_expected_give_the_same_step():
    plain, expecting = small_head(sample_rate=0.3), small_head(sample_rate=0.3)
    for step in range(2):
        embedding, label = batch(step)
        for head in (plain, expecting):
            head.begin_step(step)
        expecting.expect_labels(label)
        wrong = torch.zeros_like(label)  # on a GPU the labels there are not read
        assert plain(embedding, label).item() == expecting(embedding, wrong).item()
