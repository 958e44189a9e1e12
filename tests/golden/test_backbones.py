"""The names, shapes and outputs of arcface_torch's networks."""

import json
import math

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from tests.support.golden import golden_path

OURS = {
    "vit_t_dp005_mask0": "vit_t",
    "vit_s_dp005_mask_0": "vit_s",
    "vit_b_dp005_mask_005": "vit_b",
    "vit_l_dp005_mask_005": "vit_l",
}
NAMES = ["r18", "r34", "r50", "r100", "r200", "mbf", "mbf_large", *OURS]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_checkpoint_fits_by_name_shape_and_order(name):
    expected = json.loads(golden_path("backbones.json").read_text())[name]
    with torch.device("meta"):
        net = build_backbone(OURS.get(name, name))
    state = [[key, list(v.shape), str(v.dtype).removeprefix("torch.")] for key, v in net.state_dict().items()]
    assert sorted(state) == sorted(expected["state"])
    assert [entry[0] for entry in state] == [entry[0] for entry in expected["state"]]
    assert sum(p.numel() for p in net.parameters()) == expected["parameters"]


def golden_value(k, key, tensor):
    """The recipe of the recorded weights."""
    v = np.sin(0.7 * np.arange(tensor.numel()) + k)
    if not tensor.is_floating_point():
        v = np.zeros(tensor.numel())
    elif key.endswith("running_var"):
        v = 1 + 0.25 * v
    elif tensor.dim() == 1 and key.endswith("weight"):
        norm = any(part in key for part in ("bn", "downsample.1", "features", "layers.1"))
        v = 1 + 0.1 * v if norm else 0.25 + 0.05 * v
    elif tensor.dim() >= 2:
        v = v * math.sqrt(2 / (tensor.numel() / tensor.shape[0]))
    else:
        v = 0.1 * v
    return torch.from_numpy(v).reshape(tensor.shape).to(tensor.dtype)


@pytest.mark.parametrize(
    "recorded", ["r18_eval", "r18_train", "r50_eval", "mbf_eval", "mbf_train", "vit_t_dp005_mask0_eval"]
)
def test_embeddings_are_the_peers(recorded):
    expected = np.load(golden_path("backbone_outputs.npz"))[recorded]
    name, _, mode = recorded.rpartition("_")
    net = build_backbone(OURS.get(name, name))
    net.load_state_dict({key: golden_value(k, key, v) for k, (key, v) in enumerate(net.state_dict().items())})
    net.train(mode == "train")
    image = torch.from_numpy(np.sin(0.013 * np.arange(2 * 3 * 112 * 112) + 7)).reshape(2, 3, 112, 112).float()
    with torch.no_grad():
        embedding = net(image)
    if mode == "eval":
        np.testing.assert_allclose(embedding.numpy(), expected, atol=2e-4, rtol=1e-3)
    else:
        # Two samples are normalized by their own spread. Where they are nearly alike, rounding decides.
        near = np.isclose(embedding.numpy(), expected, atol=2e-2, rtol=1e-3)
        assert near.mean() > 0.97
