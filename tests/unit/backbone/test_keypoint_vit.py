import math

import pytest
import torch
import torch.nn.functional as F

from facetrain.backbone.keypoint_vit import BUCKETS, KeypointVisionTransformer, bucket_ids, landmark_offsets
from facetrain.backbone.vit import VisionTransformer
from facetrain.face_landmarks import NORMALIZED_TEMPLATE

CPU = torch.device("cpu")
SMALL = {"heads": 2, "mlp_ratio": 2, "drop_path": 0.0, "embedding_size": 12, "image_size": 40}


def network(**options):
    torch.manual_seed(0)
    net = KeypointVisionTransformer(8, 3, **(SMALL | options))
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2.0 if name.startswith("keypoint") else 0.4)
    torch.nn.init.normal_(net.keypoint_linear.bias)
    return net


def inputs(count=3, side=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=generator), torch.rand(
        count, 5, 2, generator=generator
    )


def piecewise(distance, alpha=1.9, beta=3.8, gamma=8 * 1.9):
    """iRPE's equation 18, with the rounding and the cast to whole numbers of its code."""
    if abs(distance) <= alpha:
        return round(distance)
    size = alpha + math.log(abs(distance) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(round(size), beta), distance))


def test_buckets_are_those_of_the_piecewise_function():
    side = 14
    ids = bucket_ids(side, CPU)
    for i in range(0, side**2, 17):
        for j in range(side**2):
            row = piecewise(i // side - j // side) + 3
            column = piecewise(i % side - j % side) + 3
            assert ids[i, j] == row * 7 + column
    assert int(ids.max()) == BUCKETS - 1


def reference(net, image, landmarks):
    """The network in float64, one image, head and pair of patches after the other."""
    state = {name: value.double() for name, value in net.state_dict().items()}
    weight = state["keypoint_linear.weight"].view(3, 2, BUCKETS, 10)
    constant = state["keypoint_linear.bias"].view(3, 2, BUCKETS)
    side, ids = 5, bucket_ids(5, CPU)

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    x = F.conv2d(image.double(), state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=8)
    x = x.flatten(2).transpose(1, 2) + state["pos_embed"]
    for block in range(3):
        name = f"blocks.{block}"
        qkv = norm(x, f"{name}.norm1") @ state[f"{name}.attn.qkv.weight"].T
        q, k, v = qkv.view(len(x), 25, 3, 2, 4).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(2, 3) / 2
        for b in range(len(x)):
            for i in range(25):
                center = torch.tensor([(i % side + 0.5) / side, (i // side + 0.5) / side]).double()
                offset = (center - landmarks[b].double()).flatten()
                for head in range(2):
                    score[b, head, i] += weight[block, head, ids[i]] @ offset + constant[block, head, ids[i]]
        y = (score.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = x + y @ state[f"{name}.attn.proj.weight"].T + state[f"{name}.attn.proj.bias"]
        y = norm(x, f"{name}.norm2") @ state[f"{name}.mlp.fc1.weight"].T + state[f"{name}.mlp.fc1.bias"]
        y = F.relu6(y) @ state[f"{name}.mlp.fc2.weight"].T + state[f"{name}.mlp.fc2.bias"]
        x = x + y
    return net.double().neck(norm(x, "norm").flatten(1))


def test_embeddings_are_those_of_a_plain_float64_network():
    net = network().eval()
    image, landmarks = inputs(2)
    with torch.no_grad():
        embedding = net(image, landmarks)
        assert (net(image, landmarks.flip(0)) - embedding).abs().max() > 0.01
        expected = reference(net, image, landmarks)
    torch.testing.assert_close(embedding.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_new_network_computes_what_one_without_landmarks_does():
    net = KeypointVisionTransformer(8, 3, **SMALL).eval()
    plain = VisionTransformer(8, 3, **SMALL, patch=8, mask_token=False).eval()
    state = net.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    image, landmarks = inputs()
    torch.testing.assert_close(net(image, landmarks), plain(image))


def test_without_landmarks_they_are_those_of_an_aligned_face():
    net = network().eval()
    image, _ = inputs()
    aligned = torch.from_numpy(NORMALIZED_TEMPLATE).expand(3, -1, -1)
    torch.testing.assert_close(net(image), net(image, aligned), rtol=0, atol=0)


def test_offsets_are_from_the_centers_of_the_patches():
    offsets = landmark_offsets(torch.zeros(1, 5, 2), 14)
    assert offsets.shape == (1, 196, 10)
    torch.testing.assert_close(offsets[0, 15, :2], torch.tensor([1.5, 1.5]) / 14)
    torch.testing.assert_close(offsets[0, 1, 8:], torch.tensor([1.5, 0.5]) / 14)


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_activations_give_the_same_gradients(autocast):
    gradients = []
    for recompute in (False, True):
        net = network(checkpoint_activations=recompute)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            feature = net.trunk(*inputs())
        net.neck(feature.float()).square().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    assert gradients[0]["keypoint_linear.weight"].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])
