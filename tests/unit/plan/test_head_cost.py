import pytest
import torch

from facetrain.optim.settings import OptimSettings
from facetrain.plan.head_cost import HeadShape, head_bytes, moved_per_number
from facetrain.torch_private import LiveBytes
from tests.support.head_traffic import step_bytes
from tests.support.heads import make_head, margin_settings

SGD, ADAMW = (OptimSettings(name=name) for name in ("sgd", "adamw"))
SETTINGS = [
    {},
    {"product_bytes": 2},
    {"sample_rate": 0.2},
    {"sample_rate": 0.2, "product_bytes": 2},
    {"sample_rate": 0.2, "optimizer": ADAMW},
    {"optimizer": ADAMW, "product_bytes": 2},
    {"weight_dtype": "bfloat16", "product_bytes": 2},
    {"momentum_dtype": "bfloat16", "sample_rate": 0.2},
    {"momentum_dtype": "int8", "sample_rate": 0.2},
    {"momentum_dtype": "int8"},
    {"sample_rate": 0.2, "update_in_backward": False},
    {"update_in_backward": False},
    {"sub_centers": 3},
    {"sub_centers": 3, "product_bytes": 2, "sample_rate": 0.2},
    {"chunk_size": None},
    {"chunk_size": None, "sub_centers": 3, "product_bytes": 2},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ", ".join(map(str, setting)))
def test_the_heads_bytes_are_forecast_within_five_percent(setting):
    shape = HeadShape(
        num_classes=20_480, embedding_size=64, global_batch=256, world_size=1, cuda=False,
        **{"chunk_size": 2048, "optimizer": SGD} | setting,
    )  # fmt: skip
    head = make_head(
        embedding_size=64,
        num_classes=shape.num_classes,
        margin=margin_settings("cosface", scale=64, m3=0.4),
        sub_centers=shape.sub_centers,
        sample_rate=shape.sample_rate,
        optimizer=shape.optimizer.name,
        weight_decay=5e-4,
        weight_dtype=getattr(torch, shape.weight_dtype),
        momentum_dtype=getattr(torch, shape.momentum_dtype),
        update_in_backward=shape.update_in_backward,
        chunk_size=shape.chunk_size or "auto",
        product_dtype=torch.bfloat16 if shape.product_bytes == 2 else None,
    )
    embedding, label = torch.randn(256, 64, requires_grad=True), torch.randint(0, shape.num_classes, (256,))
    with LiveBytes() as live:
        head.begin_step(0, lr=0.1)
        head(embedding, label).backward()
        head.step(torch.tensor(1.0), torch.tensor(0.0))
    forecast = head_bytes(shape)
    # The sample is random, so only its mean size is known.
    assert max(forecast.work, forecast.update) == pytest.approx(live.peak, rel=0.05)
    held = head.row_state()
    assert forecast.centers == held["weight"].nbytes
    assert forecast.moments == sum(t.nbytes for name, t in held.items() if name not in ("weight", "hits"))


@pytest.mark.parametrize("product_bytes", [2, 4])
def test_a_small_batch_needs_no_more_memory_than_a_large_one(product_bytes):
    works = [
        head_bytes(
            HeadShape(
                num_classes=10_000_000, embedding_size=512, global_batch=batch, world_size=1, cuda=True,
                product_bytes=product_bytes, optimizer=SGD,
            )
        ).work
        for batch in (1, 4, 16, 128)
    ]  # fmt: skip
    assert works == sorted(works)


def test_tables_on_the_host_take_nothing_from_the_device():
    shape = HeadShape(
        num_classes=1000, embedding_size=8, global_batch=4, world_size=3, placement="host", optimizer=SGD
    )
    found = head_bytes(shape)
    assert (found.centers, found.moments, found.elsewhere) == (0, 0, 334 * 8 * 4 * 2)


def test_sgd_without_momentum_keeps_no_moments():
    plain = OptimSettings(momentum=0)
    shape = HeadShape(num_classes=1000, embedding_size=8, global_batch=4, world_size=1, optimizer=plain)
    assert head_bytes(shape).moments == 0


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("weight", "momentum"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("one_pass", [True, False])
def test_the_bytes_that_a_step_moves_are_those_that_the_head_counts(weight, momentum, one_pass, monkeypatch):
    pytest.importorskip("triton")
    shape = HeadShape(
        num_classes=2**14, embedding_size=512, global_batch=256, world_size=1, optimizer=SGD, product_bytes=2,
        weight_dtype=weight, momentum_dtype=momentum,
    )  # fmt: skip
    dtypes = {"weight_dtype": getattr(torch, weight), "momentum_dtype": getattr(torch, momentum)}
    few, many = (step_bytes(monkeypatch, classes, one_pass=one_pass, **dtypes) for classes in (2**13, 2**14))
    # Of each class, a factor for every sample, which is written once and read by two products.
    counted = (many - few) / 2**13 / 512 - 3 * 2 * 256 / 512
    assert moved_per_number(shape, one_pass=one_pass) == pytest.approx(counted, rel=0.03)
