"""Expectations of the classes against LVFace's equations, in float64."""

import pytest
import torch
import torch.nn.functional as F

from facetrain.head.sampling import Stage
from tests.support.dense_head import margin_logits
from tests.support.dense_stages import CLASSES, MARGIN, SCALE, SEED, STAGES, DenseReference, log_ratio
from tests.support.heads import make_head, margin_settings

SIZE, BATCH = 8, 12


def staged_head(stages=STAGES, margin="cosface", **options):
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=margin_settings(margin), stages=stages, seed=SEED,
        expectation_margin=MARGIN, weight_dtype=torch.float64, momentum_dtype=torch.float64, chunk_size=5, **options,
    )  # fmt: skip
    return head


def batch(step):
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
    # Few classes, so that some have several embeddings in the batch.
    return embedding.requires_grad_(), torch.randint(0, CLASSES // 2, (BATCH,), generator=generator)


@pytest.mark.parametrize("margin", ["cosface", "arcface"])
def test_without_negatives_the_expectations_give_no_gradient_that_is_not_a_number(margin):
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=margin_settings(margin), seed=SEED, expectation_margin=1.0,
        stages=(Stage(0, 0.0, "moving"),),
    )  # fmt: skip
    label = torch.full((2,), 3)
    embedding = (-head.row_state()["weight"][label].float() + 0.01).detach().requires_grad_()
    head.begin_step(0, lr=0.1)
    loss = head(embedding, label)
    loss.backward()
    assert loss.isfinite() and embedding.grad.isfinite().all()


def test_all_stages_equal_the_papers_equations():
    head = staged_head()
    dense = DenseReference(head.weight.data)
    for step in range(7):
        embedding, label = batch(step)
        other = embedding.detach().clone().requires_grad_()
        head.begin_step(step, lr=0.1)
        loss = head(embedding, label)
        loss.backward()
        expected, *rest = dense.loss(other, label, step)
        expected.backward()
        dense.update(*rest, label)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(embedding.grad, other.grad)
        torch.testing.assert_close(head.weight.data, dense.weight.detach())
        if dense.expectation is not None:
            torch.testing.assert_close(head.row_state()["expectation"], dense.expectation)


def load(head, saved):
    tables = {name: table.clone() for name, table in saved.row_state().items()}
    head.load_state({name: tensor.clone() for name, tensor in saved.state().items()})
    head.load_rows(lambda name, start, stop: tables[name][start:stop])
    return tables


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_head_loaded_at_any_step_continues_bit_by_bit(at):
    head = staged_head()
    for step in range(at):
        head.begin_step(step, lr=0.1)
        head(*batch(step)).backward()
    loaded = staged_head()
    load(loaded, head)
    for step in range(at, 7):
        for each in (head, loaded):
            each.begin_step(step, lr=0.1)
            each(*batch(step)).backward()
        states = head.row_state(), loaded.row_state()
        assert states[0].keys() == {"weight", "momentum", "expectation"}
        assert all(torch.equal(table, states[1][name]) for name, table in states[0].items())


def stages_from(first_step):
    """Return the stages of a head whose expectations begin with a step; None: never."""
    return Stage(0, 0.4, "off"), *([] if first_step is None else [Stage(first_step, 0.4, "moving")])


def trained_head(stages, steps):
    head = staged_head(stages)
    for step in range(steps):
        head.begin_step(step, lr=0.1)
        head(*batch(step)).backward()
    return head


@pytest.mark.parametrize(("border", "other_border"), [(5, 2), (2, 5), (None, 2)])
@pytest.mark.parametrize("ranks", [1, 3, 30])
def test_a_resumed_run_with_another_border_begins_expectations_once_and_keeps_learned_ones(
    ranks, border, other_border, monkeypatch
):
    monkeypatch.setattr("facetrain.head.class_shard._PIECE", 4)
    saved = trained_head(stages_from(border), 4)
    heads = [staged_head(stages_from(other_border), rank=rank, world_size=ranks) for rank in range(ranks)]
    for head in heads:
        tables = load(head, saved)
        for step in (4, 5):
            head.begin_step(step, lr=0.1)
    expectation = torch.cat([head.row_state()["expectation"] for head in heads])
    if border != 2:
        torch.testing.assert_close(expectation, F.normalize(tables["weight"]))
        assert all(head.state()["expectations_begun"] for head in heads)
    else:
        assert torch.equal(expectation, tables["expectation"])


def test_expectations_begin_at_the_centers_of_a_state_dict_which_has_no_table_of_them():
    saved, loaded = (trained_head((Stage(0, 1.0, "moving"),), steps) for steps in (3, 1))
    loaded.load_state_dict(saved.state_dict())
    loaded.begin_step(3, lr=0.1)
    rows = loaded.row_state()
    assert torch.equal(rows["weight"], saved.row_state()["weight"])
    torch.testing.assert_close(rows["expectation"], F.normalize(rows["weight"]))


def test_before_their_first_step_expectations_take_no_part_in_an_evaluation():
    staged, plain = staged_head((Stage(0, 1.0, "moving"),)), staged_head((Stage(0, 1.0),))
    assert torch.equal(*(head.eval()(*batch(0)) for head in (staged, plain)))


def test_a_loss_that_is_not_finite_moves_no_expectation():
    head = staged_head((Stage(0, 1.0, "moving"),))
    head.begin_step(0, lr=0.1)
    before = head.row_state()["expectation"].clone()
    embedding, label = batch(0)
    head(embedding * float("nan"), label).backward()
    assert torch.equal(head.row_state()["expectation"], before)
    head.begin_step(1, lr=0.1)
    head(*batch(1)).backward()
    assert not torch.equal(head.row_state()["expectation"], before)


@pytest.mark.parametrize("margin", ["arcface", "softmax", "curricularface", "elastic_arcface"])
def test_every_margin_can_take_the_place_of_the_first_one(margin):
    head, plain = staged_head((Stage(0, 1.0, "fixed"),), margin), staged_head((), margin)
    embedding, label = (tensor[:1].detach() for tensor in batch(0))
    head.begin_step(0, lr=0.1)
    plain.begin_step(0, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    expectation = head.row_state()["expectation"].normal_(generator=generator)
    inputs = [embedding.clone().requires_grad_() for _ in range(3)]
    loss = head(inputs[0], label)
    loss.backward()
    first_loss = plain(inputs[1], label)
    first_loss.backward()
    cos = F.normalize(inputs[2]) @ F.normalize(expectation).T
    second = log_ratio(margin_logits(cos, label, {"scale": SCALE, "m3": MARGIN}), label)
    second.sum().backward()
    torch.testing.assert_close(loss, torch.logaddexp(first_loss.detach(), second.detach()).sum())
    parts = (first_loss - loss).exp() * inputs[1].grad + (second - loss).exp() * inputs[2].grad
    torch.testing.assert_close(inputs[0].grad, parts.detach())


def test_without_expectations_nothing_of_them_is_kept():
    head = staged_head((Stage(0, 0.4, "off"),))
    assert "expectation" not in head.row_state() and not head.state()
