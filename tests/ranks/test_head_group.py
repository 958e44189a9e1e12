"""Heads of several datasets on 1 to 3 processes against plain losses of each dataset, in float64."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from facetrain.distributed import collectives
from facetrain.errors import DataError
from facetrain.head.class_shard import ClassShard
from facetrain.head.head_group import HeadGroup
from tests.support.dense_head import dense_loss, sample_classes
from tests.support.heads import combined, make_head, make_net, margin_settings
from tests.support.ranks import run_ranks

SIZE, BATCH, LR, DECAY = 8, 12, 0.1, 0.01
CLASSES = (7, 13, 2)
FIRST = (0, 7, 20)
MARGINS = ({"scale": 64.0, "m2": 0.5}, {"scale": 16.0, "m3": 0.35}, {"scale": 32.0})
WEIGHTS = (1.0, 0.5, 2.0)
# By step: datasets of the images in order, so that a rank has none of some dataset, or no rank has one.
COMPOSITIONS = ([0] * 4 + [1] * 6 + [2] * 2, [1] * 12, [2] * 3 + [0] * 9, [1, 2] * 6)
CASES = [(rate, accumulate) for rate in (1.0, 0.4, 0.0) for accumulate in (1, 2)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    dataset = torch.tensor(COMPOSITIONS[step])
    own = torch.randint(0, 1 << 20, (BATCH,), generator=generator) % torch.tensor(CLASSES)[dataset]
    return image, own + torch.tensor(FIRST)[dataset]


def make_heads(rank, world_size, rate, *, update_in_backward, placement="device", folder=None):
    return [
        make_head(
            embedding_size=SIZE, num_classes=classes, margin=combined(**margin), rank=rank, seed=3 + number,
            world_size=world_size, sample_rate=rate, weight_decay=DECAY, chunk_size=4,
            weight_dtype=torch.float64, momentum_dtype=torch.float64, update_in_backward=update_in_backward,
            placement=placement, folder=folder and folder / f"head_{number}",
        )
        for number, (classes, margin) in enumerate(zip(CLASSES, MARGINS, strict=True))
    ]  # fmt: skip


def train_group():
    """Run every case; return losses, the backbone, and the rows of all classes that this rank has."""
    rank, world_size = collectives.rank(), collectives.world_size()
    results = []
    for rate, accumulate in CASES:
        net = make_net(SIZE)
        wrapped = DistributedDataParallel(net) if world_size > 1 else net
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        heads = make_heads(rank, world_size, rate, update_in_backward=accumulate == 1)
        group = HeadGroup(heads, WEIGHTS, (0.3, 0.5, 0.2))
        losses = []
        for step in range(len(COMPOSITIONS)):
            image, label = batch(step)
            group.begin_step(step, lr=LR)
            optimizer.zero_grad()
            total = 0.0
            for part in torch.arange(BATCH).chunk(accumulate):
                mine = part[rank * len(part) // world_size : (rank + 1) * len(part) // world_size]
                if step % 2:  # labels gathered before the forward pass, as on a GPU
                    group.expect_labels(label[mine])
                loss = group(wrapped(image[mine]), label[mine]) / accumulate
                loss.backward()
                total += loss.item()
            optimizer.step()
            if accumulate > 1:
                group.step(torch.tensor(1.0), torch.tensor(0.0))
            losses.append(total)
        rows = {part.shard: part.head.weight.data for part in group.parts}
        results.append((losses, net.state_dict(), rows, group.take_nearest()))
    return results


def train_plainly(rate, accumulate):
    """One loss per dataset from all logits, by autograd; a dataset without images in a step does not change."""
    net = make_net(SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    weights = [
        head.weight.data.clone().requires_grad_() for head in make_heads(0, 1, 1.0, update_in_backward=True)
    ]
    momenta = [torch.zeros_like(weight) for weight in weights]
    losses = []
    for step in range(len(COMPOSITIONS)):
        image, label = batch(step)
        optimizer.zero_grad()
        updated = [set() for _ in weights]
        total = 0.0
        for part in torch.arange(BATCH).chunk(accumulate):
            for number, weight in enumerate(weights):
                rows = part[torch.tensor(COMPOSITIONS[step])[part] == number]
                if not len(rows):
                    continue
                own, sample = label[rows] - FIRST[number], None
                if rate < 1:
                    shard = ClassShard(0, CLASSES[number])
                    sample = sample_classes(shard, own, rate, seed=3 + number, step=step)
                loss = dense_loss(net(image[rows]), weight, own, MARGINS[number], sample)
                loss = loss * WEIGHTS[number] * len(rows) / len(part) / accumulate
                loss.backward()
                total += loss.item()
                updated[number] |= set(range(CLASSES[number]) if sample is None else sample.tolist())
        optimizer.step()
        with torch.no_grad():
            for weight, momentum, changed in zip(weights, momenta, updated, strict=True):
                rows = sorted(changed)
                if rows:
                    momentum[rows] = 0.9 * momentum[rows] + weight.grad[rows] + DECAY * weight[rows]
                    weight[rows] -= LR * momentum[rows]
                weight.grad = None
        losses.append(total)
    return losses, net.state_dict(), torch.cat(weights).detach()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_the_plain_losses_of_each_dataset(world_size):
    ranks = run_ranks(world_size, train_group) if world_size > 1 else [train_group()]
    for number, (rate, accumulate) in enumerate(CASES):
        losses, state, weight = train_plainly(rate, accumulate)
        results = [results[number] for results in ranks]
        for result in results:
            assert result[0] == pytest.approx(losses, rel=1e-9), (rate, accumulate)
            assert result[0] == results[0][0], "the loss must be the same number on every rank"
            torch.testing.assert_close(result[1], state)
            assert result[3] == results[0][3] and result[3][1] == BATCH * len(COMPOSITIONS)
        rows = sorted((shard, table) for result in results for shard, table in result[2].items())
        torch.testing.assert_close(torch.cat([table for _, table in rows]), weight)


def test_a_group_of_one_head_equals_the_head():
    def losses(make):
        net, head = make_net(SIZE), make_heads(0, 1, 0.4, update_in_backward=True)[1]
        called = make(head)
        for step in range(3):
            image, _ = batch(step)
            called.begin_step(step, lr=LR)
            net.zero_grad()
            loss = called(net(image), torch.arange(BATCH) % CLASSES[1])
            loss.backward()
            yield loss.item(), net.weight.grad.clone(), head.weight.data.clone()

    alone, grouped = losses(lambda head: head), losses(lambda head: HeadGroup([head], [1.0], [1.0]))
    torch.testing.assert_close(list(alone), list(grouped))


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_heads_in_host_memory_or_on_disk_give_the_same_numbers(placement, rate, tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.head.settings.CLASSES_PER_READ", 1)  # the same sample in each placement
    """Rows are fetched one step ahead, also for a head whose dataset then has no image in that step."""

    def train(**options):
        net = make_net(SIZE)
        group = HeadGroup(
            make_heads(0, 1, rate, update_in_backward=True, **options), WEIGHTS, (0.3, 0.5, 0.2)
        )
        losses = []
        for step in range(3 * len(COMPOSITIONS)):
            image, label = batch(step % len(COMPOSITIONS))
            group.begin_step(step, lr=LR)
            loss = group(net(image), label)
            loss.backward()
            losses.append(loss.item())
        return losses, [part.head.row_state() for part in group.parts]

    expected, found = train(), train(placement=placement, folder=tmp_path)
    # A sample that is fetched ahead has its classes in another order, in which float64 sums round differently.
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1])
    assert len(list(tmp_path.glob("head_*/rank_00000"))) == (3 if placement == "disk" else 0)


def test_heads_with_norms_and_averages_keep_their_own():
    margins = [margin_settings(name) for name in ("adaface", "cosface", "magface")]

    def group():
        heads = [
            make_head(embedding_size=SIZE, num_classes=classes, margin=margin, seed=number)
            for number, (classes, margin) in enumerate(zip(CLASSES, margins, strict=True))
        ]
        return HeadGroup(heads, WEIGHTS, (0.3, 0.5, 0.2))

    first = group()
    first.begin_step(0, lr=LR)
    image, label = batch(0)
    embedding = (9 * image.float() @ torch.ones(5, SIZE)).requires_grad_()
    loss = first(embedding, label)
    loss.backward()
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert {name.partition(".")[0] for name in saved} == {"0"}
    alone = make_head(embedding_size=SIZE, num_classes=CLASSES[2], margin=margin_settings("magface"), seed=2)
    alone.begin_step(0, lr=LR)
    last = embedding.detach()[10:].clone().requires_grad_()
    alone(last, label[10:] - FIRST[2]).backward()
    torch.testing.assert_close(embedding.grad[10:], last.grad * WEIGHTS[2] * 2 / BATCH)
    second = group()
    second.load_state(saved)
    torch.testing.assert_close(second.state(), saved)


def test_a_label_outside_all_heads_is_an_error():
    group = HeadGroup(make_heads(0, 1, 1.0, update_in_backward=True), WEIGHTS, (0.3, 0.5, 0.2))
    with pytest.raises(DataError, match="label 22 is outside the 22 classes"):
        group(torch.zeros(2, SIZE), torch.tensor([0, 22]))
    with pytest.raises(DataError, match="label 22 is outside the 22 classes"):
        group.check_labels([0, 22])


def test_saved_rows_load_by_the_labels_of_the_group():
    first, second = (
        HeadGroup(make_heads(0, 1, 1.0, update_in_backward=True), WEIGHTS, (0.3, 0.5, 0.2)) for _ in range(2)
    )
    for part in first.parts:
        for number, table in enumerate(part.head.row_state().values()):
            classes = torch.arange(*part.shard, dtype=table.dtype)
            table.copy_((100 * number + classes)[:, None].expand_as(table))
    names = list(first.parts[0].head.row_state())

    def read(name, start, stop):
        return (100 * names.index(name) + torch.arange(start, stop, dtype=torch.float64))[:, None]

    second.load_rows(read)
    for one, other in zip(first.parts, second.parts, strict=True):
        torch.testing.assert_close(other.head.row_state(), one.head.row_state())
