"""Whole training steps of facetrain beside steps of arcface_torch, in turn.

On several ranks: `torchrun --nproc-per-node 2 -m benchmarks.arcface_torch`. Of arcface_torch's present code
(insightface, recognition/arcface_torch, commit 7fadd42) it has:

NCHW, a backbone in autocast with a GradScaler, DDP with the 16-bit hook, logits of all of a rank's classes at once, the
margin applied under `no_grad`, softmax over the ranks by two reductions, one dense SGD over backbone and centers, the
loss read by the host in every step. Embeddings and centers are multiplied in float32 in every precision; the code of
2022, whose results are published, multiplied them in 16 bits. Sources: the documents and configs of the repository and
An et al., Partial FC, arXiv 2203.15565.

In three places this step does less than the original, in favor of the baseline: it applies arccos and cos to the target
logits alone, it subtracts 1 at the targets instead of a one-hot matrix, and it reads no scalar in the backward pass.
"""

# B local batch   G gathered batch   D embedding   K this rank's classes

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import run
from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.train import TakeSteps, measure_training
from facetrain.bench.workloads import DEFAULT_CONFIG, RunWorkload, Turns
from facetrain.config.loading import build_config
from facetrain.config.schema import Config
from facetrain.data.images.normalize import normalize
from facetrain.distributed import collectives
from facetrain.distributed.ddp import LOCAL_BUFFERS
from facetrain.distributed.world import World
from facetrain.head.class_shard import shard_classes
from facetrain.run.parts.backbone import describe_model
from facetrain.run.parts.step_schedule import local_batch_size

NAME = "arcface_torch"

_SCALE, _MARGIN, _MOMENTUM, _WEIGHT_DECAY, _CLIP_NORM = 64.0, 0.5, 0.9, 5e-4, 5.0
_LR = 1e-6
"""Small enough that noise with random labels cannot make the loss diverge."""
_AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _DistributedCrossEntropy(torch.autograd.Function):
    """Softmax cross-entropy over logits that are split over the ranks; label −1: a class of another rank."""

    @staticmethod
    def forward(ctx: Any, logits_GK: Tensor, label_G: Tensor) -> Tensor:
        logits_GK -= collectives.max_(logits_GK.amax(1, keepdim=True))
        logits_GK.exp_()
        logits_GK.div_(collectives.sum_(logits_GK.sum(1, keepdim=True)))
        here = (label_G >= 0).nonzero()[:, 0]
        target_G = logits_GK.new_zeros(len(label_G))
        target_G[here] = logits_GK[here, label_G[here]]
        ctx.save_for_backward(logits_GK, label_G, here)
        return -collectives.sum_(target_G).clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits_GK, label_G, here = ctx.saved_tensors
        logits_GK[here, label_G[here]] -= 1
        return logits_GK.div_(len(label_G)).mul_(grad), None


class _AutocastBackbone(nn.Module):
    """Backbone with convolutions in 16 bits; the last layer and its norm in float32."""

    def __init__(self, backbone: Backbone, precision: str, device_type: str) -> None:
        super().__init__()
        self._backbone, self._precision, self._device_type = backbone, precision, device_type

    def forward(self, image_BCHW: Tensor) -> Tensor:
        dtype = _AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self._device_type, dtype, enabled=dtype is not None):
            feature = self._backbone.trunk(image_BCHW)
        return self._backbone.neck(feature.float())


def _wrap_in_ddp(network: nn.Module, device: torch.device) -> nn.Module:
    if collectives.world_size() == 1:
        return network
    wrapped = DistributedDataParallel(
        network,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=16,
        static_graph=True,
        **LOCAL_BUFFERS,
    )
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


class ArcfaceTorchStep:
    """Backbone, class centers and optimizer of one rank."""

    def __init__(self, backbone: Backbone, num_classes: int, precision: str, device: torch.device) -> None:
        # The original has no PReLU but PyTorch's.
        use_torch_backward(backbone)
        self._backbone = backbone.to(device)
        self._shard = shard_classes(num_classes, collectives.rank(), collectives.world_size())
        self.centers = nn.Parameter(
            # As PartialFC_V2 draws its centers.
            torch.empty(self._shard.size, backbone.embedding_size, device=device).normal_(0, 0.01)
        )
        self._network = _wrap_in_ddp(_AutocastBackbone(self._backbone, precision, device.type), device)
        self._scaler = torch.amp.GradScaler(device.type, growth_interval=100, enabled=precision == "fp16")
        self.optimizer = torch.optim.SGD(
            [{"params": [p for p in backbone.parameters() if p.requires_grad]}, {"params": [self.centers]}],
            lr=_LR,
            momentum=_MOMENTUM,
            weight_decay=_WEIGHT_DECAY,
        )

    def __call__(self, image_BCHW: Tensor, label_B: Tensor) -> float:
        """Take one step with float32 images in [−1, 1] and int64 labels; return the loss. Collective."""
        embedding_BD = self._network(image_BCHW)
        loss = self._loss(embedding_BD, label_B)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self._backbone.parameters(), _CLIP_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def _loss(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        embedding_GD = collectives.GatheredRows(embedding_BD).wait()
        label_G = collectives.gather(label_B).flatten() - self._shard.start
        label_G[(label_G < 0) | (label_G >= self._shard.size)] = -1
        cos_GK = F.linear(F.normalize(embedding_GD), F.normalize(self.centers)).clamp(-1, 1)
        here = (label_G >= 0).nonzero()[:, 0]
        with torch.no_grad():
            cos_GK[here, label_G[here]] = (cos_GK[here, label_G[here]].arccos() + _MARGIN).cos()
        loss: Tensor = _DistributedCrossEntropy.apply(cos_GK * _SCALE, label_G)
        return loss


def measure_steps(
    identities: int = 10_000,
    steps: int = 5,
    rounds: int = 3,
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE")] = [],  # noqa: B006
) -> dict[str, Any] | None:
    """Return the report of `facetrain bench train` with arcface_torch's speed, and the ratios to it.

    `--set` changes values of the config; both have the same backbone, batch and precision.
    """
    config = build_config(DEFAULT_CONFIG, "the defaults", set_)
    workload = RunWorkload(identities=identities)
    report = measure_training(config, workload, Turns(steps, rounds), {NAME: build_baseline})
    if report is not None:
        baseline = report["others"][NAME]["images_per_s"]
        report["times_arcface_torch"] = {
            name: found["images_per_s"] / baseline for name, found in report["inputs"].items()
        }
    return report


def build_baseline(config: Config, world: World, num_classes: int) -> TakeSteps:
    """Return a function that takes steps with one batch of random images and labels.

    The images are already normalized, so the baseline is spared the augmentation of a run. It also profits from
    facetrain's allocator settings, which hold for the whole process.
    """
    torch.manual_seed(0)
    batch, side = local_batch_size(config, world.size), config.data.image_size
    options = describe_model(config)["backbone"]
    step = ArcfaceTorchStep(build_backbone(**options), num_classes, config.train.precision, world.device)
    image_BHWC = torch.randint(256, (batch, side, side, 3), dtype=torch.uint8)
    image_BCHW = normalize(image_BHWC.to(world.device)).contiguous()
    label_B = torch.randint(num_classes, (batch,)).to(world.device)

    def take_steps(count: int) -> None:
        for _ in range(count):
            step(image_BCHW, label_B)

    return take_steps


if __name__ == "__main__":
    run(measure_steps)
