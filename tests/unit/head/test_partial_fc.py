"""The head in a loop with an optimizer of PyTorch, on one process, against the plain head in float64."""

import copy
import io
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import facetrain
from facetrain.distributed import collectives
from facetrain.errors import DataError, ModelError, UsageError
from facetrain.head.center_gradient import ParameterGradient
from facetrain.head.class_centers import Storage
from facetrain.head.dense import dense_loss
from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import make_margin
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.head.sampling import Stage
from facetrain.torch_private import LiveBytes
from tests.support.dense_head import sample_classes
from tests.unit.head.helpers import CLASSES, SIZE, batch


def own_margin(cos):
    """CosFace, as a user would write it."""
    return cos - 0.4


def small_head(margin="cosface", **options):
    options = {"embedding_size": SIZE, "num_classes": CLASSES, "chunk_size": 5, "seed": 3} | options
    return facetrain.PartialFC(margin, **options).double()


@pytest.mark.parametrize("margin", ["cosface", own_margin])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_loss_gradients_and_centers_in_a_loop_with_sgd_equal_the_plain_head(margin, rate):
    head = small_head(margin, sample_rate=rate)
    weight = nn.Parameter(head.weight.detach().clone())
    optimizers = [
        torch.optim.SGD([each], lr=0.1, momentum=0.9, weight_decay=0.01) for each in (head.weight, weight)
    ]
    for step in range(4):
        embedding, label = batch(step)
        reference = embedding.detach().clone().requires_grad_()
        loss = head(embedding, label)
        loss.backward()
        sample = None if rate == 1 else sample_classes(head.shard, label, rate, seed=3, step=step)
        expected = dense_loss(reference, weight, label, own_margin, class_S=sample)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(embedding.grad, reference.grad)
        torch.testing.assert_close(head.weight.grad, weight.grad)
        if sample is not None:
            others = torch.ones(CLASSES, dtype=torch.bool).index_fill(0, sample, False)
            assert others.any() and not head.weight.grad[others].any()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(head.weight, weight)


def test_a_sparse_gradient_has_the_rows_of_the_sample_and_the_numbers_of_the_dense_one():
    gradients = []
    for sparse in (False, True):
        head = small_head(sample_rate=0.3, sparse=sparse)
        head(*batch()).backward()
        gradients.append(head.weight.grad)
    dense, sparse = gradients
    torch.testing.assert_close(sparse.to_dense(), dense)
    label = batch()[1]
    assert (
        sparse.coalesce().indices()[0].tolist()
        == sample_classes(head.shard, label, 0.3, seed=3, step=0).tolist()
    )


def test_a_rank_without_classes_in_the_step_has_a_sparse_gradient_too():
    head = small_head(sample_rate=0.0, sparse=True, place=(1, 2))
    gradient = ParameterGradient(head.weight, sparse=True).take()
    assert gradient.is_sparse and gradient.shape == head.weight.shape and not gradient.to_dense().any()


@pytest.mark.parametrize("margin", ["cosface", "adaface"])
def test_without_negatives_there_is_no_gradient_however_low_the_target_logit(margin):
    head = facetrain.PartialFC(margin, SIZE, CLASSES, sample_rate=0.0)
    label = torch.full((2,), 3)
    embedding = (-20 * head.weight[label] + 0.01).detach().requires_grad_()
    loss = head(embedding, label)
    loss.backward()
    assert loss == 0 and not embedding.grad.any() and not head.weight.grad.any()


def test_an_evaluation_changes_nothing_that_training_uses():
    head = facetrain.PartialFC("adaface", SIZE, CLASSES).eval()
    before = {name: value.clone() for name, value in head.margin.state().items()}
    with torch.no_grad():
        head(torch.randn(8, SIZE) * 30, torch.arange(8))
    assert before and all(torch.equal(value, before[name]) for name, value in head.margin.state().items())
    head.train()(torch.randn(8, SIZE) * 30, torch.arange(8))
    assert not all(torch.equal(value, before[name]) for name, value in head.margin.state().items())


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_copy_of_a_head_and_a_saved_one_continue_as_it_does(rate):
    head = small_head(sample_rate=rate)
    head(*batch()).backward()
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    copies = [copy.deepcopy(head), torch.load(file, weights_only=False)]
    loss = head(*batch(1))
    for other in copies:
        torch.testing.assert_close(other(*batch(1)), loss, rtol=0, atol=0)


def test_a_converted_head_does_not_keep_the_centers_that_it_had_before():
    head, file = facetrain.PartialFC("cosface", SIZE, 5000).half(), io.BytesIO()
    torch.save(head, file)
    assert len(file.getvalue()) < 1.2 * head.weight.nbytes


@pytest.mark.parametrize(
    "options",
    [{}, {"update": CenterUpdate(), "storage": Storage(torch.float64)}],
    ids=["optimizer", "update"],
)
def test_a_state_that_is_assigned_has_the_centers_that_the_loss_is_of(options):
    head, other = small_head(**options), small_head(seed=4)
    head.eval().load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(head(*batch()), other.eval()(*batch()))
    assert torch.equal(head.row_state()["weight"], other.weight) and torch.equal(head.weight, other.weight)


@pytest.mark.parametrize(
    "replace",
    [
        facetrain.PartialFC.double,
        lambda head: head.double().float(),
        lambda head: setattr(head.weight, "data", torch.ones(CLASSES, SIZE)),
        lambda head: setattr(head, "weight", nn.Parameter(torch.ones(CLASSES, SIZE), requires_grad=False)),
    ],
    ids=["converted", "converted twice", "other data", "other parameter"],
)
@pytest.mark.parametrize(
    "options",
    [{"update": CenterUpdate()}, {"trained": False, "storage": Storage(placement="host")}],
    ids=["update", "host"],
)
def test_a_head_with_tables_is_refused_once_its_parameter_shows_other_rows(options, replace):
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, **options)
    replace(head)
    for use in (head.state_dict, lambda: head.eval()(*batch())):
        with pytest.raises(UsageError, match=r"`update`.*`device` and `storage`.*weight\.copy_"):
            use()


def test_centers_that_are_copied_into_the_parameter_of_a_head_with_an_update_are_trained():
    head, other = (
        facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate(), seed=i) for i in (0, 1)
    )
    head.weight.copy_(other.weight)
    for each in (head, other):
        each.begin_step(0, lr=0.1)
        each(*batch()).backward()
    assert torch.equal(head.state_dict()["weight"], other.state_dict()["weight"])


def test_centers_in_place_of_the_drawn_ones_are_those_of_the_loss_and_get_its_gradient():
    head, called, other = small_head(), small_head(), small_head(seed=4)
    head.weight, weight = (nn.Parameter(other.weight.detach().clone()) for _ in range(2))
    expected = other(*batch())
    expected.backward()
    for loss, parameter in (
        (head(*batch()), head.weight),
        (torch.func.functional_call(called, {"weight": weight}, batch()), weight),
    ):
        loss.backward()
        assert torch.equal(loss, expected) and torch.equal(parameter.grad, other.weight.grad)


@pytest.mark.parametrize("margin", ["arcface", "magface"])
def test_the_loss_in_inference_mode_is_that_without_gradients(margin):
    head = small_head(margin).eval()
    embedding, label = (each.detach() for each in batch())
    with torch.inference_mode():
        loss = head(embedding, label)
    assert torch.equal(loss, head(embedding, label))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_copy_of_a_head_that_updates_its_rows_has_the_last_update_and_continues_as_it_does(placement):
    head = facetrain.PartialFC(
        "cosface", SIZE, CLASSES, 0.3, storage=Storage(placement=placement), update=CenterUpdate()
    )

    def train(head, step):
        embedding, label = batch(step)
        head.begin_step(step, lr=0.1)
        loss = head(embedding.float(), label)
        loss.backward()
        return loss.detach()

    train(head, 0), train(head, 1)
    other = copy.deepcopy(head)
    assert torch.equal(other.weight, head.weight)
    assert all(torch.equal(train(other, step), train(head, step)) for step in (2, 3))
    assert torch.equal(other.row_state()["weight"], head.row_state()["weight"])
    assert torch.equal(other.state_dict()["weight"], head.state_dict()["weight"])


@pytest.mark.parametrize("between", ["forward", "state_dict"])
def test_rows_that_went_back_to_host_memory_before_their_update_are_refused(between):
    head = facetrain.PartialFC(
        "cosface", SIZE, CLASSES, 0.3, storage=Storage(placement="host"), update=CenterUpdate()
    )
    embedding, label = batch()
    head.begin_step(0, lr=0.1)
    loss = head(embedding.float(), label)
    head.state_dict() if between == "state_dict" else head.eval()(embedding.float(), label)
    with pytest.raises(UsageError, match=r"call backward\(\) first"):
        loss.backward()


def test_micro_batches_of_a_step_have_one_size_or_a_given_number_of_classes_in_a_chunk(monkeypatch):
    monkeypatch.setattr(
        "facetrain.head.partial_fc.default_chunk_size", lambda batch, size, device: 8 if batch > 2 else 12
    )
    for chunk_size in (None, 8):
        head = facetrain.PartialFC(
            "cosface", SIZE, CLASSES, update=CenterUpdate(in_backward=False), chunk_size=chunk_size
        )
        head.begin_step(0, lr=0.1)
        for count in (4, 2):
            head(torch.randn(count, SIZE, requires_grad=True), torch.arange(count)).backward()
        fits = nullcontext() if chunk_size else pytest.raises(UsageError, match="micro-batches of one step")
        with fits:
            head.step(torch.ones(()), torch.zeros(()))


@pytest.mark.parametrize("form", [lambda label: label[:, None], torch.Tensor.int, torch.Tensor.byte])
def test_labels_are_expected_in_each_form_in_which_they_are_taken(form):
    head, (embedding, label) = small_head(sample_rate=0.3), batch()
    loss = head(embedding, label)
    head.set_extra_state(head.get_extra_state() | {"calls": 0})
    head.expect_labels(form(label))
    assert torch.equal(head(embedding, form(label)), loss)


def test_expected_labels_of_a_call_that_failed_do_not_serve_the_next():
    head, (embedding, label) = small_head(sample_rate=0.3).eval(), batch()
    loss = head(embedding, label)
    head.expect_labels(label.flip(0))  # of a step that an error has ended before the head
    for _ in range(2):
        with pytest.raises(DataError, match="label 23"):
            head(embedding, torch.full_like(label, CLASSES))
    assert torch.equal(head(embedding, label), loss)
    for other in (label.flip(0), label[:-1]):
        head.expect_labels(other)
        with pytest.raises(UsageError, match="not those that expect_labels"):
            head(embedding, label)


@pytest.mark.parametrize(
    "stages", [[Stage(5, 1.0)], [Stage(0, 1.0), Stage(9, 0.5), Stage(5, 1.0)], [Stage(0, 1.5)]]
)
def test_stages_that_do_not_follow_each_other_are_refused(stages):
    with pytest.raises(UsageError, match="stage"):
        facetrain.PartialFC("cosface", SIZE, CLASSES, stages=stages)


@pytest.mark.parametrize(("placement", "keeps"), [("device", True), ("host", False)])
def test_exponentials_are_kept_beside_centers_on_the_device_alone(placement, keeps, monkeypatch):
    monkeypatch.setattr("facetrain.head.partial_fc._SMALL_BYTES", 0)
    head = facetrain.PartialFC(
        "cosface", SIZE, CLASSES, storage=Storage(placement=placement), update=CenterUpdate()
    )
    assert head._keeps_exponentials(CLASSES, None) == keeps


def test_a_copy_of_a_head_with_its_rows_on_disk_is_refused(tmp_path):
    storage = Storage(placement="disk", folder=tmp_path)
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, storage=storage, update=CenterUpdate())
    with pytest.raises(UsageError, match="state_dict"):
        copy.deepcopy(head)


def test_the_options_of_a_margin_are_not_taken_for_norms():
    def own(cos, m):
        return cos - m

    head = small_head(make_margin(own, m=0.4))
    torch.testing.assert_close(head(*batch()), small_head(own_margin)(*batch()))


def test_a_margin_whose_state_appears_with_the_first_batch_is_refused():
    class Late(Margin):
        mean = None

        def update_averages(self, norm_G, cos_G):
            self.mean = cos_G.mean()

        def target(self, cos_G, norm_G):
            return cos_G - self.mean

        def state(self):
            return {} if self.mean is None else {"mean": self.mean}

    with pytest.raises(UsageError, match="the margin Late: mean .*__init__"):
        small_head(Late)(*batch())


@pytest.mark.parametrize("in_state", [torch.tensor, float])
def test_a_margin_whose_state_cannot_be_loaded_is_refused(in_state):
    class Counts(Margin):
        count = 0.0

        def target(self, cos_G, norm_G):
            return cos_G - self.count

        def state(self):
            return {"count": in_state(self.count)}

    with pytest.raises(UsageError, match="the margin Counts: count .* no tensor, or a new one"):
        small_head(Counts)


class Follows(nn.Module):
    """CosFace whose margin follows the cosines: a module with a buffer, which it changes in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, cos_G, norm_G):
        if self.training:
            self.mean.lerp_(cos_G.detach().mean(), 0.1)
        return cos_G - 0.4 - self.mean + 0 * norm_G


class LogitsFollow(Follows):
    """The same as a loss of arcface_torch."""

    s = 16.0

    def forward(self, logits, labels):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * logits.detach().mean()
        return (logits - 0.4 - self.mean) * self.s


@pytest.mark.parametrize("margin", [Follows, LogitsFollow])
def test_a_margin_that_is_a_module_gets_norms_and_is_saved_and_evaluated_with_the_head(margin):
    head, loaded = small_head(margin()), small_head(margin())
    for step in range(3):
        head(*batch(step))
    loaded.load_state_dict(head.state_dict())
    losses = [each.eval()(*batch(3)) for each in (head, head, loaded, head.train().eval())]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert head.margin.state()["mean"] and torch.equal(
        *(each.margin.state()["mean"] for each in (head, loaded))
    )


def test_expectations_without_the_update_that_saves_them_are_refused():
    with pytest.raises(UsageError, match="`update`"):
        small_head(stages=[Stage(0, 1.0, "moving")])
    with pytest.raises(DataError, match="no images"):
        small_head()(torch.empty(0, SIZE), torch.empty(0, dtype=torch.int64))


def test_an_update_whose_step_was_not_begun_is_refused():
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate())
    with pytest.raises(UsageError, match="begin_step"):
        head(*batch())
    with pytest.raises(UsageError, match="needs the learning rate"):
        head.begin_step(0)
    head.eval()(*batch())  # needs no learning rate


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_step_with_an_update_ends_with_its_one_call_or_with_step(in_backward):
    # The chunks of a second call would be computed from centers that the first has changed, or at the rate of its step.
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate(in_backward=in_backward))
    embedding, label = batch()
    for step in range(2):
        head.begin_step(step, lr=0.1)
        with torch.no_grad():
            head(embedding.float(), label)  # has no backward pass
        losses = [head(embedding.float(), label) for _ in range(1 if in_backward else 3)]
        sum(losses).backward()
        if not in_backward:
            head.step(torch.ones(()), torch.zeros(()))
        with pytest.raises(UsageError, match=r"begin_step.*in_backward=False\), and call head\.step"):
            head(embedding.float(), label)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_gradient_in_evaluation_mode_trains_no_centers(in_backward):
    heads = [
        facetrain.PartialFC(
            "cosface", SIZE, CLASSES,
            update=CenterUpdate(in_backward=in_backward), stages=[Stage(0, 1.0, "moving")],
        )
        for _ in range(2)
    ]  # fmt: skip
    for head in heads:
        head.begin_step(0, lr=0.1)
        head(*batch()).backward()
        if head is heads[1]:
            embedding, label = batch(1)
            for _ in range(2):
                head.eval()(embedding, label).backward()
            assert embedding.grad.any()
        head.step(torch.ones(()), torch.zeros(()))
    torch.testing.assert_close(heads[1].row_state(), heads[0].row_state(), rtol=0, atol=0)


def test_a_loss_that_is_not_finite_or_a_step_given_up_changes_no_center():
    head, other = (
        facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate(in_backward=False))
        for _ in range(2)
    )

    def train(head, step, *losses):
        head.begin_step(step, lr=0.1)
        for number, factor in losses:
            embedding, label = batch(number)
            head(embedding.float() * factor, label).backward()
        head.step(torch.ones(()), torch.tensor(0))

    before = head.weight.clone()
    train(head, 0, (1, 1.0), (2, torch.inf), (3, 1.0))
    assert torch.equal(head.weight, before)
    head.begin_step(1, lr=0.1)
    head(*batch(4)).backward()
    train(head, 2, (5, 1.0))
    train(other, 2, (5, 1.0))
    assert torch.equal(head.weight, other.weight) and not torch.equal(head.weight, before)
    saved = other.state_dict()
    for each in (head, other):
        if each is head:  # it fails in the step, and goes back to what was saved
            each.begin_step(3, lr=0.1)
            each(batch(6)[0] * torch.inf, batch(6)[1]).backward()
        each.load_state_dict(saved)
        train(each, 3, (7, 1.0))
    assert torch.equal(head.weight, other.weight)


@pytest.mark.parametrize("margin", ["cosface", "elastic_arcface"])
def test_a_step_may_begin_before_each_of_its_calls(margin):
    heads = [
        facetrain.PartialFC(margin, SIZE, CLASSES, update=CenterUpdate(in_backward=False)) for _ in range(2)
    ]
    for head, times in zip(heads, (1, 2), strict=True):
        for number in range(2):
            if number < times:
                head.begin_step(3, lr=0.1)
            head(*batch(number)).backward()
        head.step(torch.ones(()), torch.tensor(0))
    assert torch.equal(heads[0].weight, heads[1].weight)


@pytest.mark.parametrize(("fp16", "dtype"), [(True, torch.bfloat16), (False, None)])
def test_the_kernels_of_the_logits_are_chosen_by_the_products_that_fp16_gives(monkeypatch, fp16, dtype):
    dtypes = []
    monkeypatch.setattr(
        "facetrain.head.partial_fc.fused_chunks_available", lambda device, margin, dtype: dtypes.append(dtype)
    )
    facetrain.PartialFC("cosface", SIZE, CLASSES, fp16=fp16).use_kernels()
    assert dtypes == [dtype]


def test_a_step_that_begins_again_before_its_call_has_the_last_learning_rate():
    heads = [facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate()) for _ in range(2)]
    for head, rates in zip(heads, ([0.1], [1.0, 0.1]), strict=True):
        for lr in rates:  # a loop leaves a batch out after the start of its step
            head.begin_step(3, lr=lr)
        head(*batch(0)).backward()
    assert torch.equal(heads[0].weight, heads[1].weight)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_second_backward_pass_through_a_call_that_updates_the_centers_is_refused(in_backward):
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate(in_backward=in_backward))
    embedding, label = batch()
    head.begin_step(0, lr=0.1)
    loss = head(embedding.float(), label)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize("shape", [(2, SIZE + 1), (2, 2 * SIZE), (2, SIZE - 1), (2, SIZE, 1)])
def test_embeddings_of_another_size_than_the_centers_are_refused(shape):
    with pytest.raises(ModelError, match=rf"\(B, {SIZE}\), and got .*embedding_size"):
        small_head()(torch.randn(shape), torch.tensor([0, 1]))


@pytest.mark.parametrize("shape", [(3,), (4, CLASSES)])
def test_labels_that_are_not_one_number_for_each_embedding_are_refused(shape):
    # Such as the last labels of an epoch with other embeddings, or one-hot labels.
    with pytest.raises(DataError, match=rf"labels of shape {re.escape(str(shape))} for 4 embeddings; give"):
        small_head()(torch.ones(4, SIZE), torch.zeros(shape))


def test_labels_in_floating_point_are_refused():
    # In float32, identity 16,777,217 is 16,777,216.
    with pytest.raises(DataError, match=r"labels of torch\.float32; give integers"):
        small_head()(torch.randn(2, SIZE), torch.tensor([0.0, 1.0]))


def test_a_second_derivative_is_refused():
    # The loss gets no gradient of its own, so torch would take that of the embeddings for a constant.
    embedding = torch.randn(2, SIZE, dtype=torch.float64, requires_grad=True)
    loss = small_head()(embedding, torch.tensor([0, 1]))
    with pytest.raises(UsageError, match="second derivative.*create_graph"):
        torch.autograd.grad(loss, embedding, create_graph=True)


def test_the_update_in_the_backward_pass_moves_the_centers_as_sgd_does():
    numbers = {"momentum": 0.9, "weight_decay": 0.01}
    head = small_head()
    own = facetrain.PartialFC(
        "cosface", SIZE, CLASSES, chunk_size=5, seed=3, storage=Storage(torch.float64),
        update=CenterUpdate(**numbers, moment_dtype=torch.float64),
    )  # fmt: skip
    with torch.no_grad():
        own.weight.copy_(head.weight)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, **numbers)
    for step in range(3):
        own.begin_step(step, lr=0.1)
        own(*batch(step)).backward()
        optimizer.zero_grad()
        head(*batch(step)).backward()
        optimizer.step()
        torch.testing.assert_close(own.weight, head.weight.detach(), check_stride=False)
    assert own.weight.grad is None


def test_an_update_beside_the_gradient_of_an_optimizer_is_refused():
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, update=CenterUpdate()).requires_grad_(True)
    head.begin_step(0, lr=0.1)
    with pytest.raises(UsageError, match="requires_grad_.*trained=False"):
        head(*batch())


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_given_loss_scale_does_not_change_the_update(in_backward):
    centers = []
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        factor, update = torch.tensor(scaler.get_scale()), CenterUpdate(in_backward=in_backward)
        head = facetrain.PartialFC("cosface", SIZE, CLASSES, seed=3, update=update)
        embedding, label = batch()
        head.begin_step(0, lr=0.1, loss_scale=factor if in_backward else None)
        scaler.scale(head(embedding.float(), label)).backward()
        if not in_backward:
            head.step(factor, torch.tensor(0))
        centers.append(head.weight.detach().clone())
    torch.testing.assert_close(*centers)


def test_the_update_in_the_backward_pass_also_follows_embeddings_that_are_not_trained():
    centers = []
    for trained in (True, False):
        head = facetrain.PartialFC("cosface", SIZE, CLASSES, seed=3, update=CenterUpdate())
        embedding, label = batch()
        head.begin_step(0, lr=0.1)
        head(embedding.detach().float().requires_grad_(trained), label).backward()
        centers.append(head.weight.detach().clone())
    assert torch.equal(*centers)


def test_gradients_of_several_calls_add_up():
    whole, parts = small_head(), small_head()
    embedding, label = batch()
    whole(embedding, label).backward()
    for half in (slice(0, 6), slice(6, 12)):
        (parts(embedding[half], label[half]) / 2).backward()
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)


class Copies(TorchDispatchMode):
    """Shapes of the tensors that operations have copied."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.clone.default, torch.ops.aten.new_empty_strided.default):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_gradient_of_all_centers_is_not_copied(rate):
    head = facetrain.PartialFC("arcface", SIZE, CLASSES, rate)
    embedding, label = batch()
    loss = head(embedding, label)
    with Copies() as copies:
        loss.backward()
    assert head.weight.grad is not None and tuple(head.weight.shape) not in copies.shapes


def test_a_second_backward_pass_through_a_call_adds_the_same_gradient():
    for sparse in (False, True):
        head = facetrain.PartialFC("arcface", SIZE, CLASSES, 0.5, sparse=sparse)
        loss = head(*batch())
        loss.backward(retain_graph=True)
        once = head.weight.grad.clone()
        loss.backward()
        torch.testing.assert_close(head.weight.grad.to_dense(), 2 * once.to_dense())


def test_the_exponentials_are_freed_before_the_backward_pass_of_the_backbone():
    head = facetrain.PartialFC("cosface", SIZE, 4000, chunk_size=500, recompute=False, trained=False)
    backbone, label = nn.Linear(SIZE, SIZE), torch.arange(256)
    held = []
    with LiveBytes() as live:
        embedding = backbone(torch.randn(256, SIZE))
        embedding.register_hook(lambda gradient: held.append(live.now))
        loss = head(embedding, label)
        held.append(live.now)
        loss.backward()
    after_forward, after_backward_of_head = held
    assert after_forward - after_backward_of_head > 0.9 * 4 * 256 * 4000


def test_under_autocast_only_the_large_products_are_rounded():
    head, plain = small_head().float(), small_head().float()
    embedding, label = batch()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = head(embedding.float(), label)
    exact = plain(embedding.float(), label)
    assert rounded.dtype == torch.float32 and rounded != exact
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_pass_under_autocast_has_the_gradients_of_one_outside(dtype, recompute):
    gradients = []
    for inside in (False, True):
        head = small_head(fp16=True, recompute=recompute)
        embedding, label = batch()
        embedding = embedding.detach().requires_grad_()
        with torch.autocast("cpu", dtype):
            loss = head(embedding, label)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append((embedding.grad, head.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_gradients_of_a_batch_do_not_depend_on_the_averages_of_a_later_one(recompute):
    gradients = []
    for later in (False, True):
        head = small_head("curricularface", recompute=recompute)
        for _ in range(50):  # until the average is large enough for hard negatives
            head(*batch())
        embedding, label = batch()
        embedding = embedding.detach().requires_grad_()
        loss = head(embedding, label)
        if later:
            head(*batch(1))
        loss.backward()
        gradients.append((embedding.grad, head.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_centers_that_changed_since_the_forward_pass_are_refused():
    head = small_head()
    loss = head(*batch())
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk_size", value) for value in (0, -5)),
        *(("sample_rate", value) for value in (-1.0, 10.0, float("nan"))),
        *(("scale", value) for value in (0.0, -64.0, float("nan"), float("inf"))),
        *(("filter_threshold", value) for value in (-0.5, 25.6, float("nan"))),
        *(("expectation_margin", value) for value in (-0.4, float("nan"), float("inf"))),
        ("num_classes", 0),
        ("embedding_size", 0),
    ],
)
def test_a_number_out_of_its_range_is_refused(name, value):
    with pytest.raises(UsageError, match=rf"^PartialFC: {name} {value}: give a number "):
        facetrain.PartialFC(
            **{"margin": "arcface", "embedding_size": SIZE, "num_classes": CLASSES, name: value}
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler, which hides it
def test_a_network_that_is_compiled_with_the_head_in_it_is_compiled_once():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(SIZE, SIZE).double(), small_head(sample_rate=0.3)

        def forward(self, image, label):
            return self.head(self.backbone(image), label)

    def counted(graph, inputs):
        compiled.append(graph)
        return graph

    compiled, plain = [], Whole()
    whole = torch.compile(copy.deepcopy(plain), backend=counted)
    for step in range(3):
        image, label = batch(step)
        assert whole(image.detach(), label).item() == plain(image.detach(), label).item()
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": CenterUpdate(name="adam")}, "update: name 'adam': give one of sgd, adamw"),
        ({"storage": Storage(placement="cpu")}, "storage: placement 'cpu': give one of device, host, disk"),
        (
            {"stages": [Stage(0, 1.0, "Moving")]},
            "stages: expectations 'Moving': give one of off, moving, fixed",
        ),
    ],
    ids=["optimizer", "placement", "expectations"],
)
def test_an_unknown_name_is_refused(options, message):
    with pytest.raises(UsageError, match=f"^PartialFC: {message}$"):
        facetrain.PartialFC("arcface", SIZE, CLASSES, **{"update": CenterUpdate()} | options)


def test_a_rank_outside_of_the_process_group_has_no_head():
    with pytest.raises(UsageError, match="not in process_group"):
        small_head(place=(-1, 2))


def test_a_head_that_was_built_before_the_process_group_is_refused(monkeypatch):
    # Each rank would hold all classes, and count them once more in the loss.
    head = small_head()
    monkeypatch.setattr(collectives, "world_size", lambda group=None: 2)
    with pytest.raises(UsageError, match="built for 1 rank, and is called on 2; .*init_process_group"):
        head(*batch())


def test_a_filter_without_effect_is_refused():
    with pytest.raises(UsageError, match="curricularface has no filter_threshold"):
        facetrain.PartialFC("curricularface", SIZE, CLASSES, filter_threshold=0.1)


def test_frozen_centers_have_no_gradient():
    head = small_head().requires_grad_(False)
    embedding, label = batch()
    head(embedding, label).backward()
    assert head.weight.grad is None and embedding.grad.any()


def test_frozen_centers_need_no_learning_rate_and_take_several_calls_in_a_step():
    head = facetrain.PartialFC("cosface", SIZE, CLASSES, trained=False, update=CenterUpdate())
    before, (embedding, label) = head.weight.clone(), batch()
    head.begin_step(0)
    for _ in range(2):
        head(embedding.float(), label).backward()
    head.step(torch.ones(()), torch.zeros(()))
    assert torch.equal(head.weight, before) and embedding.grad.any()
    assert list(head.row_state()) == ["weight"]


def test_saved_averages_and_samples_continue_as_the_head_that_saved_them():
    saved, loaded = (small_head("adaface", sample_rate=0.3) for _ in range(2))
    for step in range(3):
        saved(*batch(step))
    loaded.load_state_dict(saved.state_dict())
    assert loaded(*batch(3)).item() == saved(*batch(3)).item()


def test_a_saved_average_of_another_shape_is_refused_and_not_broadcast():
    class Wide(Margin):
        def __init__(self, **options):
            super().__init__(**options)
            self.mean = torch.zeros(3)

        def target(self, cos_G, norm_G):
            return cos_G - self.mean.mean()

        def state(self):
            return {"mean": self.mean}

    with pytest.raises(ValueError, match=r"mean has the shape \[\], and here \[3\]"):
        small_head(Wide()).load_state({"mean": torch.tensor(7.0)})


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_a_state_dict_has_the_rows_that_a_step_has_on_the_device(placement, tmp_path):
    def head():
        options = {"folder": tmp_path} if placement == "disk" else {}
        storage = Storage(placement=placement, **options)
        return facetrain.PartialFC(
            "cosface", SIZE, CLASSES, sample_rate=0.3, storage=storage, update=CenterUpdate()
        )

    trained = head()
    for step in range(3):
        trained.begin_step(step, lr=0.1)
        trained(*batch(step)).backward()
    saved = {name: torch.clone(value) for name, value in trained.state_dict().items() if name == "weight"}
    assert torch.equal(saved["weight"], trained.row_state()["weight"])
    changed = head()
    changed.begin_step(3, lr=0.1)
    changed(*batch(3)).backward()
    changed.load_state_dict(trained.state_dict())
    assert torch.equal(changed.row_state()["weight"], saved["weight"])


def test_states_of_some_ranks_only_or_of_other_classes_are_refused():
    states = [small_head(place=(rank, 3)).state_dict() for rank in range(3)]
    joined = facetrain.PartialFC.join_state_dicts(reversed(states))
    assert torch.equal(joined["weight"], torch.cat([state["weight"] for state in states]))
    with pytest.raises(UsageError, match="class 8"):
        facetrain.PartialFC.join_state_dicts([states[0], states[2]])
    with pytest.raises(UsageError, match="join_state_dicts"):
        small_head(place=(1, 3)).load_state_dict(states[0])
    with pytest.raises(UsageError, match="23 classes.*24"):
        small_head(num_classes=24).load_state_dict(joined)


def test_states_of_arcface_torch_are_joined_in_their_order():
    parts = [{"weight": torch.randn(size, SIZE).double()} for size in (12, 11)]
    head = small_head(place=(1, 3))
    head.load_state_dict(facetrain.PartialFC.join_state_dicts(parts))
    whole = torch.cat([part["weight"] for part in parts])
    assert torch.equal(head.weight, whole[head.shard.start : head.shard.stop])


def test_centers_elsewhere_without_an_own_update_are_refused():
    with pytest.raises(UsageError, match="host"):
        small_head(storage=Storage(placement="host"))


class PeersMargin(nn.Module):
    """CosFace in the form of arcface_torch's losses: it changes the target's entry, and multiplies by its scale."""

    def __init__(self):
        super().__init__()
        self.s = 30.0

    def forward(self, logits, labels):
        index = torch.where(labels != -1)[0]
        logits[index, labels[index].view(-1)] -= 0.4
        return logits * self.s


def test_the_arguments_and_the_margin_of_arcface_torch_are_taken():
    embedding, label = batch()
    found = facetrain.PartialFC(PeersMargin(), SIZE, CLASSES, 1.0, False, seed=3).double()
    expected = small_head(scale=30.0)
    file = io.BytesIO()
    torch.save(found, file)  # with its margin, which is a class of its own
    torch.testing.assert_close(found(embedding, label[:, None]), expected(embedding, label))


def test_centers_in_float64_take_embeddings_of_fewer_bits():
    embedding, label = (each.detach() for each in batch())
    leaf = embedding.float().requires_grad_()
    loss = small_head()(leaf, label)
    loss.backward()
    assert torch.equal(loss, small_head()(embedding.float().double(), label)) and leaf.grad.any()


def test_a_copy_of_a_head_has_its_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        head = small_head(process_group=dist.new_group([0]))
        copied = copy.deepcopy(head)
        assert copied.group is head.group and torch.equal(copied(*batch()), head(*batch()))
    finally:
        dist.destroy_process_group()
