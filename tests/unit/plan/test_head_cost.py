import pytest
import torch

from facetrain.plan.backbone_cost import LiveBytes
from facetrain.plan.head_cost import HeadShape, head_bytes
from tests.support.heads import make_head, make_margin

SETTINGS = [
    {},
    {"product_bytes": 2},
    {"sample_rate": 0.2},
    {"sample_rate": 0.2, "product_bytes": 2},
    {"sample_rate": 0.2, "optimizer": "adamw"},
    {"optimizer": "adamw", "product_bytes": 2},
    {"weight_dtype": "bfloat16", "product_bytes": 2},
    {"momentum_dtype": "bfloat16", "sample_rate": 0.2},
    {"momentum_dtype": "int8", "sample_rate": 0.2},
    {"momentum_dtype": "int8"},
    {"sample_rate": 0.2, "fused": False},
    {"fused": False},
    {"sub_centers": 3},
    {"sub_centers": 3, "product_bytes": 2, "sample_rate": 0.2},
    {"chunk_size": None},
    {"chunk_size": None, "sub_centers": 3, "product_bytes": 2},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_heads_bytes_are_forecast_within_five_percent(setting):
    shape = HeadShape(
        num_classes=20_480, embedding_size=64, global_batch=256, world_size=1, cuda=False,
        **{"chunk_size": 2048} | setting,
    )  # fmt: skip
    head = make_head(
        embedding_size=64,
        num_classes=shape.num_classes,
        margin=make_margin("cosface", scale=64, m3=0.4),
        sub_centers=shape.sub_centers,
        sample_rate=shape.sample_rate,
        optimizer=shape.optimizer,
        weight_decay=5e-4,
        weight_dtype=getattr(torch, shape.weight_dtype),
        momentum_dtype=getattr(torch, shape.momentum_dtype),
        update_in_backward=shape.fused,
        chunk_size=shape.chunk_size,
        product_dtype=torch.bfloat16 if shape.product_bytes == 2 else None,
    )
    head.lr = 0.1
    embedding, label = torch.randn(256, 64, requires_grad=True), torch.randint(0, shape.num_classes, (256,))
    with LiveBytes() as live:
        head.begin_step(0)
        head(embedding, label).backward()
        head.step(torch.tensor(1.0), torch.tensor(0.0))
    forecast = head_bytes(shape)
    # The sample is drawn, so its size is known on average alone.
    assert max(forecast.work, forecast.update) == pytest.approx(live.peak, rel=0.05)
    held = head.row_state()
    assert forecast.centers == held["weight"].nbytes
    assert forecast.moments == sum(
        t.nbytes for name, t in held.items() if name not in ("weight", "steps", "hits")
    )


def test_tables_on_the_host_take_nothing_from_the_device():
    shape = HeadShape(num_classes=1000, embedding_size=8, global_batch=4, world_size=3, placement="host")
    there = head_bytes(shape)
    assert (there.centers, there.moments, there.elsewhere) == (0, 0, 334 * 8 * 4 * 2)
