import pytest
import torch

from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings
from facetrain.plan.head_cost import HeadLoad, head_work, moved_per_number, table_bytes
from facetrain.torch_private import LiveBytes
from tests.support.head_traffic import step_bytes
from tests.support.heads import make_head, margin_settings

BATCH, CLASSES = 256, 20_480
SETTINGS = [
    ({}, {}, 4),
    ({}, {}, 2),
    ({"sample_rate": 0.2}, {}, 4),
    ({"sample_rate": 0.2}, {}, 2),
    ({"sample_rate": 0.2}, {"name": "adamw"}, 4),
    ({}, {"name": "adamw"}, 2),
    ({"weight_dtype": "bfloat16"}, {}, 2),
    ({"momentum_dtype": "bfloat16", "sample_rate": 0.2}, {}, 4),
    ({"momentum_dtype": "int8", "sample_rate": 0.2}, {}, 4),
    ({"momentum_dtype": "int8"}, {}, 4),
    ({"sample_rate": 0.2}, {"accumulate": 2}, 4),
    ({}, {"accumulate": 2}, 4),
    ({"chunk_size": "auto"}, {}, 4),
    ({"chunk_size": "auto"}, {}, 2),
]


def load_of(head=None, optim=None, *, size=64, rows=CLASSES, batch=BATCH, world_size=1, **options):
    settings, optimizer = HeadSettings(**head or {}), OptimSettings(**optim or {})
    return HeadLoad(
        settings, optimizer, size, rows=rows, global_batch=batch, world_size=world_size, **options
    )


@pytest.mark.parametrize(("settings", "optim", "product_bytes"), SETTINGS)
def test_the_heads_bytes_are_forecast_within_five_percent(settings, optim, product_bytes):
    load = load_of({"chunk_size": 2048} | settings, optim, product_bytes=product_bytes, cuda=False)
    head = make_head(
        embedding_size=64,
        num_classes=CLASSES,
        margin=margin_settings("cosface", scale=64, m3=0.4),
        sample_rate=load.settings.sample_rate,
        optimizer=load.optim.name,
        weight_decay=5e-4,
        weight_dtype=getattr(torch, load.settings.weight_dtype),
        momentum_dtype=getattr(torch, load.settings.momentum_dtype),
        update_in_backward=load.updates_in_backward,
        chunk_size=load.settings.chunk_size,
        product_dtype=torch.bfloat16 if product_bytes == 2 else None,
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
    work = head_work(load)
    # The sample is random, so only its mean size is known.
    assert max(work.peak, work.update) == pytest.approx(live.peak, rel=0.05)
    held = head.row_state()
    everything = sum(table.nbytes for table in held.values())
    assert table_bytes(load) == (held["weight"].nbytes, everything - held["weight"].nbytes)


@pytest.mark.parametrize("product_bytes", [2, 4])
def test_a_small_batch_needs_no_more_memory_than_a_large_one(product_bytes):
    works = [
        head_work(load_of(size=512, rows=10_000_000, batch=batch, product_bytes=product_bytes)).peak
        for batch in (1, 4, 16, 128)
    ]
    assert works == sorted(works)


def test_sgd_without_momentum_keeps_no_moments():
    assert table_bytes(load_of({}, {"momentum": 0}, size=8, rows=1000)) == (1000 * 8 * 4, 0)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("weight", "momentum"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("one_pass", [True, False])
def test_the_bytes_that_a_step_moves_are_those_that_the_head_counts(weight, momentum, one_pass, monkeypatch):
    pytest.importorskip("triton")
    stored = {"weight_dtype": weight, "momentum_dtype": momentum}
    load = load_of(stored, size=512, rows=2**14, product_bytes=2)
    dtypes = {name: getattr(torch, dtype) for name, dtype in stored.items()}
    few, many = (step_bytes(monkeypatch, classes, one_pass=one_pass, **dtypes) for classes in (2**13, 2**14))
    # Of each class, a factor for every sample, which is written once and read by two products.
    counted = (many - few) / 2**13 / 512 - 3 * 2 * 256 / 512
    assert moved_per_number(load, one_pass=one_pass) == pytest.approx(counted, rel=0.03)
