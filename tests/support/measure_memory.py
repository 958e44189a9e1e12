"""Trains two steps and prints the bytes of memory that the process came to need, and the forecast."""

import json
import sys
from pathlib import Path

import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.config.load import build_config
from facetrain.head.margin import build_margin
from facetrain.head.margin_head import MarginHead
from facetrain.plan.forecast import forecast


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def warm_up() -> None:
    """Load what a first step loads, in small."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.PReLU(8))
    net(torch.zeros(2, 3, 8, 8)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True).step()


def main(classes: int, batch: int) -> None:
    warm_up()
    before = resident("VmRSS")
    net = build_backbone("r18")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    head = MarginHead(
        embedding_size=512,
        num_classes=classes,
        margin=build_margin("cosface", scale=64, m3=0.4),
        chunk_size=4096,
    )
    head.lr = 0.1
    for step in range(2):
        image = torch.randn(batch, 3, 112, 112)
        head.begin_step(step)
        head(net(image), torch.arange(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = build_config(
        {
            "data": {"train": "x"},
            "model": {"backbone": "r18"},
            "head": {"chunk_size": 4096},
            "train": {"batch_size": batch, "precision": "fp32"},
        },
        "",
    )
    needed = resident("VmHWM") - before
    print(json.dumps({"measured": needed, "forecast": forecast(config, classes, 1, cuda=False).total}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
