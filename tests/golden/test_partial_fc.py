"""Losses and gradients of arcface_torch's own PartialFC_V2 and margins."""

import numpy as np
import pytest
import torch

from facetrain.distributed import collectives
from facetrain.head.build import build_margin
from facetrain.head.partial_fc import PartialFC
from tests.support.dense_head import margin_logits
from tests.support.golden import golden_path
from tests.support.heads import combined
from tests.support.ranks import run_ranks

# The peer does not differentiate ArcFace's margin.
PEERS = {
    "arcface": {"scale": 64.0, "m2": 0.5, "gradient": "straight_through"},
    "cosface": {"scale": 64.0, "m3": 0.4},
}


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("name", list(PEERS))
def test_our_oracle_gives_the_peers_logits(name, threshold):
    golden = np.load(golden_path("margins.npz"))
    label = torch.from_numpy(golden["labels"])[:, 0]
    here = label >= 0
    cos = torch.from_numpy(golden["cosine"]).double()[here]
    ours = margin_logits(cos, label[here], PEERS[name] | {"filter_threshold": threshold})
    expected = golden[f"{name}_filter{threshold}"][here.numpy()]
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-4)


def one_rank(margin, weight, embeddings, labels):
    rank, world_size = collectives.rank(), collectives.world_size()
    head = PartialFC(build_margin(combined(**margin)), embedding_size=16, num_classes=23, chunk_size=4)
    head.load_state_dict({"weight": torch.from_numpy(weight)})
    mine = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
    embedding = torch.from_numpy(embeddings)[mine].requires_grad_()
    loss = head(embedding, torch.from_numpy(labels)[mine].long())
    loss.backward()
    return loss.detach(), embedding.grad, head.weight.grad


def losses(margin, weight, embeddings, labels):
    """The mean loss, and the peer's: it takes no probability for smaller than 1e-30, in the loss alone."""
    unit, center = (torch.nn.functional.normalize(torch.from_numpy(x).double()) for x in (embeddings, weight))
    label = torch.from_numpy(labels).long()
    each = torch.nn.functional.cross_entropy(
        margin_logits(unit @ center.T, label, margin), label, reduction="none"
    )
    return each.mean().item(), each.clamp_max(-np.log(1e-30)).mean().item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", list(PEERS))
def test_loss_and_both_gradients_are_the_peers(name, world_size):
    golden = np.load(golden_path("partial_fc.npz"))
    arguments = (PEERS[name], golden["weight"], golden["embeddings"], golden["labels"])
    results = [one_rank(*arguments)] if world_size == 1 else run_ranks(world_size, one_rank, *arguments)
    plain, capped = losses(*arguments)
    for result, expected in zip(results, golden[f"{name}_world{world_size}_loss"], strict=True):
        assert result[0].item() == pytest.approx(plain, rel=1e-5)
        assert capped == pytest.approx(float(expected), rel=1e-5)
    # Both leave the embeddings' gradient multiplied by the world size, for DDP's mean.
    for place, what in ((1, "embedding_grad"), (2, "weight_grad")):
        ours = torch.cat([result[place] for result in results]).numpy()
        np.testing.assert_allclose(ours, golden[f"{name}_world{world_size}_{what}"], rtol=2e-3, atol=2e-5)
