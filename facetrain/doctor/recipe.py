"""A run description against what published recipes and the memory of the device allow."""

from __future__ import annotations

from facetrain.doctor.finding import Finding, ok, warning

# arcface_torch's configs: SGD 0.1 for 8 × 128 images, 0.4 for 4,096, 0.02 for 128; AdamW 0.001 for ViTs.
_SGD_PER_IMAGE = 0.1 / 1024
_FACTOR = 4
_FACTOR_WITH_WARMUP = 10
_ADAMW_HIGHEST = 4e-3


def check_learning_rate(optimizer: str, lr: float, global_batch_size: int, *, warmup: bool) -> list[Finding]:
    """Compare the learning rate with the published ones, which grow with the global batch."""
    found = f"{optimizer}, lr {lr:g} for {global_batch_size:,} images a step"
    if optimizer == "adamw":
        if lr > _ADAMW_HIGHEST:
            return [warning("learning rate", found, "published AdamW recipes use 0.001: lower optim.lr")]
        return [ok("learning rate", found)]
    usual = _SGD_PER_IMAGE * global_batch_size
    if lr > usual * (_FACTOR_WITH_WARMUP if warmup else _FACTOR):
        do = f"published recipes use about {usual:.2g} for this batch: lower optim.lr, or warm up"
        return [warning("learning rate", found, do)]
    if lr < usual / _FACTOR:
        do = f"published recipes use about {usual:.2g} for this batch: raise optim.lr, or train for longer"
        return [warning("learning rate", found, do)]
    return [ok("learning rate", found)]
