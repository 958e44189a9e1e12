"""Small heads and batches for their tests."""

import torch

from facetrain.head.class_shard import ClassShard
from tests.support.dense_head import MARGINS, sample_classes
from tests.support.heads import combined, make_head

CLASSES, SIZE, BATCH = 23, 8, 12


def small_head(margin="arcface", **options):
    """Build a head in float64 that passes over its 23 classes in chunks of 5."""
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=combined(**MARGINS[margin]),
        **{"weight_dtype": torch.float64, "momentum_dtype": torch.float64, "chunk_size": 5, "weight_decay": 0.01}
        | options,
    )  # fmt: skip
    head.begin_step(0, lr=0.1)
    return head


def batch(number=0):
    """Return random embeddings and labels."""
    generator = torch.Generator().manual_seed(number)
    # Norms on both sides of MagFace's smallest one, 10.
    embedding = 4 * torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
    return embedding.requires_grad_(), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def sample_of(head, label, step, rate):
    """Return the classes that take part in a step of a head on one rank."""
    return sample_classes(ClassShard(0, CLASSES), label, rate, seed=head.seed, step=step)
