"""Copies of chunks between host memory and a GPU: their order, their streams, and the numbers that come out."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.head.chunk_transfer import ChunkTransfer, CopyStreams
from facetrain.head.class_centers import RowTables
from tests.support.fake_cuda import GPU, FakeStream, fake_cuda, fake_streams
from tests.support.heads import head_step, make_head, margin_settings

CPU = torch.device("cpu")


def test_rows_on_their_way_to_the_host_are_not_read_before_they_arrive(monkeypatch):
    fake_streams(monkeypatch)
    streams, table = CopyStreams(CPU), torch.arange(20.0).view(10, 2)
    transfer = ChunkTransfer(table, streams)
    rows = transfer.fetch(slice(0, 4))
    assert transfer.fetch(slice(0, 4)) is rows and not streams.to_device.waited_for
    transfer.begin(slice(4, 8))
    transfer.store(slice(0, 4), rows + 100)
    transfer.begin(slice(4, 8))
    assert not streams.to_device.waited_for, "other rows are copied at once"
    transfer.begin(slice(3, 5))
    assert len(streams.to_device.waited_for) == 1, "these wait for the copy to the host"
    assert torch.equal(transfer.fetch(slice(3, 5))[:, 0], torch.tensor([106.0, 8.0]))
    transfer.wait()
    assert FakeStream.waits == 1 and torch.equal(table[:4], torch.arange(8.0).view(4, 2) + 100)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", [{}, {"update_in_backward": False}, {"momentum_dtype": torch.bfloat16}])
def test_a_head_whose_chunks_are_copied_ahead_gives_the_same_numbers(options, optimizer, monkeypatch):
    fake_streams(monkeypatch)
    heads = [
        make_head(
            embedding_size=8,
            num_classes=23,
            margin=margin_settings(),
            chunk_size=5,
            optimizer=optimizer,
            **options,
        )
        for _ in range(2)
    ]
    there = heads[1]
    tables = {name: table.data for name, table in there._tables.by_name.items()}
    there._tables = there._sampler._tables = RowTables(tables, CPU, streams=CopyStreams(CPU))
    for step in range(3):
        embedding, label = torch.randn(12, 8), torch.randint(0, 23, (12,))
        losses = []
        for head in heads:
            head.begin_step(step, lr=0.1)
            loss = head(embedding.clone().requires_grad_(), label)
            loss.backward()
            if options.get("update_in_backward") is False:
                head.step(torch.tensor(1.0), torch.tensor(0.0))
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for name, table in heads[0].row_state().items():
        assert torch.equal(there.row_state()[name], table), name


class CountedTransfer(ChunkTransfer):
    """Counts the chunks that are on the device at once."""

    most = 0

    def begin(self, rows):
        super().begin(rows)
        self.most = max(self.most, len(self._copies))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("update_in_backward", [True, False])
def test_moments_are_on_the_device_for_the_update_and_at_most_one_chunk_ahead(
    update_in_backward, optimizer, monkeypatch
):
    fake_streams(monkeypatch)
    monkeypatch.setattr("facetrain.head.class_centers.ChunkTransfer", CountedTransfer)
    head = make_head(
        embedding_size=8, num_classes=100, margin=margin_settings(), chunk_size=10, optimizer=optimizer,
        update_in_backward=update_in_backward,
    )  # fmt: skip
    tables = {name: table.data for name, table in head._tables.by_name.items()}
    head._tables = head._sampler._tables = RowTables(tables, CPU, streams=CopyStreams(CPU))
    moments = [table._transfer for name, table in head._tables.by_name.items() if name != "weight"]
    for step in range(2):
        head.begin_step(step, lr=0.1)
        for _ in range(1 if update_in_backward else 2):
            head(torch.randn(12, 8, requires_grad=True), torch.randint(0, 100, (12,))).backward()
        if not update_in_backward:
            assert not any(transfer._copies for transfer in moments), "nothing is updated before `step`"
            head.step(torch.tensor(1.0), torch.tensor(0.0))
        assert not any(transfer._copies for transfer in moments)
    assert {transfer.most for transfer in moments} == {1 if update_in_backward else 2}


class CopiesByStream(TorchDispatchMode):
    """Records the stream and the rows of every copy between host and GPU of a whole chunk."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[func is torch.ops.aten.copy_.default]
            if source.device != result.device and len(result) >= 100:
                self.found.append((FakeStream.current, result.device.type))
        return result


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_no_chunk_in_host_memory_blocks_the_host_or_is_copied_on_the_computing_stream(monkeypatch):
    fake_streams(monkeypatch)
    monkeypatch.setattr(
        "facetrain.head.class_centers.page_locked", lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    with fake_cuda(monkeypatch) as blocking, CopiesByStream() as copies:
        head = make_head(
            embedding_size=32,
            num_classes=400,
            margin=margin_settings(),
            device=GPU,
            chunk_size=100,
            placement="host",
        )
        head_step(head, 0, monkeypatch)
        FakeStream.waits = 0
        for record in (blocking, copies.found):
            record.clear()
        head_step(head, 1, monkeypatch)
    streams = head.weight._transfer._streams
    # Centers: forward and backward pass, of which the first chunk of the backward pass is begun in the forward pass.
    # Momentum: backward pass. Both back.
    assert copies.found.count((streams.to_device, "cuda")) == 4 + 4 + 4
    assert copies.found.count((streams.to_host, "cpu")) == 4 + 4
    assert len(copies.found) == 20 and not blocking
    assert FakeStream.waits == 1, "only for the batch's own centers, which the host reads"
