import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError

SMALL = {"layers": (1, 1, 1, 1), "widths": (8, 8, 16, 16), "embedding_size": 32}


@pytest.mark.parametrize("size", [112, 64, 100])
def test_any_image_size_gives_embeddings_of_the_size_asked_for(size):
    net = build_backbone("iresnet", image_size=size, **SMALL)
    image = torch.randn(2, 3, size, size)
    assert net(image).shape == (2, 32)
    torch.testing.assert_close(net.eval()(image), net.neck(net.trunk(image)))


def test_mobilefacenet_and_torchvision_take_other_sizes_too():
    for name in ("mbf", "resnet18", "vit_t"):
        net = build_backbone(name, image_size=96, embedding_size=64).eval()
        assert net(torch.randn(1, 3, 96, 96)).shape == (1, 64)


def test_activations_computed_again_give_the_same_gradients_and_count_the_batch_once():
    image = torch.randn(3, 3, 64, 64)
    gradients, buffers = [], []
    for again in (False, True):
        torch.manual_seed(0)
        net = build_backbone("iresnet", image_size=64, checkpoint_activations=again, **SMALL)
        net(image).square().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
        buffers.append(dict(net.named_buffers()))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(buffers[0], buffers[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [("r05", "did you mean r50"), ("transformer", "there are r18"), ("iresnet", "layers and widths")],
)
def test_a_name_that_does_not_exist_is_answered_with_one_that_does(name, said):
    with pytest.raises(ModelError, match=said):
        build_backbone(name)


def test_the_last_scale_is_not_trained():
    net = build_backbone("iresnet", image_size=64, **SMALL)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["features.weight"]
