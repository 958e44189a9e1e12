import pytest
import torch

from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings
from facetrain.plan.head_memory import HeadLoad, head_memory
from facetrain.torch_private import LiveBytes
from tests.support.heads import make_head, margin_settings

BATCH, CLASSES = 256, 20_480
SETTINGS = [
    ({}, {}, None),
    ({}, {}, torch.bfloat16),
    ({"sample_rate": 0.2}, {}, None),
    ({"sample_rate": 0.2}, {}, torch.bfloat16),
    ({"sample_rate": 0.2}, {"name": "adamw"}, None),
    ({}, {"name": "adamw"}, torch.bfloat16),
    ({"weight_dtype": "bfloat16"}, {}, torch.bfloat16),
    ({"momentum_dtype": "bfloat16", "sample_rate": 0.2}, {}, None),
    ({"momentum_dtype": "int8", "sample_rate": 0.2}, {}, None),
    ({"momentum_dtype": "int8"}, {}, None),
    ({"sample_rate": 0.2}, {"accumulate": 2}, None),
    ({}, {"accumulate": 2}, None),
    ({}, {"accumulate": 5}, None),
    ({"momentum_dtype": "int8"}, {"accumulate": 5}, torch.bfloat16),
]


def load_of(head=None, optim=None, *, size=64, rows=CLASSES, batch=BATCH, **options):
    settings, optimizer = HeadSettings(**head or {}), OptimSettings(**optim or {})
    return HeadLoad(settings, optimizer, size, rows, local_batch=batch, global_batch=batch, **options)


@pytest.mark.parametrize(("settings", "optim", "product_dtype"), SETTINGS)
def test_the_heads_bytes_on_a_gpu_are_near_those_of_a_step_on_a_cpu(
    settings, optim, product_dtype, monkeypatch
):
    # It copies its transposed factors, which a GPU does not.
    monkeypatch.setattr("facetrain.head.class_chunk.onednn_linear", None)
    load = load_of({"chunk_size": 2048} | settings, optim, product_dtype=product_dtype)
    head = make_head(
        embedding_size=64,
        num_classes=CLASSES,
        margin=margin_settings("cosface", scale=64, m3=0.4),
        sample_rate=load.settings.sample_rate,
        optimizer=load.optim.name,
        weight_decay=5e-4,
        weight_dtype=getattr(torch, load.settings.weight_dtype),
        momentum_dtype=getattr(torch, load.settings.momentum_dtype),
        update_in_backward=load.optim.accumulate == 1,
        chunk_size=load.settings.chunk_size,
        product_dtype=product_dtype,
    )
    batches = [
        (torch.randn(BATCH, 64, requires_grad=True), torch.randint(0, CLASSES, (BATCH,)))
        for _ in range(load.optim.accumulate)
    ]
    with LiveBytes() as live:
        head.begin_step(0, lr=0.1)
        for embedding, label in batches:
            head(embedding, label).backward()
        head.step(torch.tensor(1.0), torch.tensor(0.0))
    memory = head_memory(load)
    # A CPU computes with other temporaries in AdamW, and the sample is random.
    rel = 0.2 if load.optim.name == "adamw" else 0.02
    assert max(memory.peak, memory.update) == pytest.approx(live.peak, rel=rel)
    held = head.row_state()
    everything = sum(table.nbytes for table in held.values())
    assert (memory.centers, memory.moments) == (held["weight"].nbytes, everything - held["weight"].nbytes)


@pytest.mark.parametrize("product_dtype", [torch.bfloat16, None])
def test_a_small_batch_needs_no_more_memory_than_a_large_one(product_dtype):
    works = [
        head_memory(load_of(size=512, rows=10_000_000, batch=batch, product_dtype=product_dtype)).peak
        for batch in (1, 4, 16, 128)
    ]
    assert works == sorted(works)


@pytest.mark.parametrize(
    ("margin", "product_dtype", "kept"),
    [("arcface", torch.bfloat16, True), ("arcface", None, True), ("curricularface", torch.bfloat16, False)],
)
def test_exponentials_are_kept_only_where_the_logits_are_bounded(margin, product_dtype, kept):
    peaks = {
        recompute: head_memory(
            load_of(
                {"margin": {"type": margin}, "recompute": recompute, "chunk_size": 2048},
                product_dtype=product_dtype,
            )
        ).peak
        for recompute in ("off", "on")
    }
    exponentials = (product_dtype or torch.float32).itemsize * BATCH * CLASSES
    assert peaks["off"] - peaks["on"] == pytest.approx(exponentials if kept else 0, abs=0.35 * exponentials)


def test_sgd_without_momentum_keeps_no_moments():
    memory = head_memory(load_of({}, {"momentum": 0}, size=8, rows=1000))
    assert (memory.centers, memory.moments) == (1000 * 8 * 4, 0)


def test_tables_in_host_memory_are_copied_for_each_chunk():
    works = {
        place: head_memory(load_of({"placement": place, "chunk_size": 2048}, size=64)).peak
        for place in ("device", "host")
    }
    # The centers of one chunk: the momentum is copied for its update, when its slopes no longer exist.
    assert works["host"] - works["device"] == pytest.approx(2048 * 64 * 4, rel=0.1)


def test_the_gradient_of_several_micro_batches_takes_the_memory_of_their_union():
    few, many = (head_memory(load_of({"sample_rate": 0.2}, {"accumulate": count})) for count in (2, 8))
    # Each micro-batch adds the classes of its images.
    assert many.peak < 1.15 * few.peak and 1.2 * few.update < many.update < 1.5 * few.update


def test_micro_batches_with_all_classes_are_counted_up_to_the_second(monkeypatch):
    counted, loss_of = [], PartialFC.loss_of_gathered
    monkeypatch.setattr(
        PartialFC, "loss_of_gathered", lambda *args, **options: counted.append(1) or loss_of(*args, **options)
    )
    head_memory(load_of({}, {"accumulate": 9}))
    assert len(counted) == 2
