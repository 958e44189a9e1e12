"""DINOv2 and CLIP: embeddings equal those of timm.

`image_encoder_embeddings.json` was computed on 2026-11-25 with timm 1.0.31 and torch 2.13 in float64, from the weights
of `weight_of` in the published layout (positions of 518 and 224 pixels), which `checkpoint_filter_fn` of timm loaded
into a network for 112 pixels, and from `images` in timm's normalization. The embedding of DINOv2 is its class token,
and of CLIP the projected one.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import load_config
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.initialize_from import initialize_backbone
from tests.support import training
from tests.support.made_weights import images, weight_of

EXPECTED = json.loads(Path(__file__).with_name("image_encoder_embeddings.json").read_text())
DINO, CLIP = EXPECTED
PUBLISHED_SIZE = {DINO: 518, CLIP: 224}

pytest.importorskip("timm", reason="timm is not installed")


def published_weights(name):
    with torch.device("meta"):
        state = build_backbone(f"timm/{name}", image_size=PUBLISHED_SIZE[name]).state_dict()
    layout = {key.removeprefix("network."): tuple(value.shape) for key, value in state.items()}
    without = ("head.weight", "head.bias") if name == DINO else ("patch_embed.proj.bias",)
    layout = {key: shape for key, shape in layout.items() if key not in without}
    lines = "\n".join(sorted(f"{key} {list(shape)}" for key, shape in layout.items()))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == EXPECTED[name]["layout"], (
        "names and shapes of timm"
    )
    return {key: weight_of(key, shape) for key, shape in layout.items()}


def initialized(name, path, **options):
    torch.manual_seed(0)
    backbone = build_backbone(f"timm/{name}", **options).eval()
    initialize_backbone(backbone, path, None)
    return backbone


@pytest.mark.parametrize("name", [DINO, pytest.param(CLIP, marks=pytest.mark.slow)])
def test_embeddings_are_those_of_timm(tmp_path, name):
    path = tmp_path / "model.safetensors"
    save_file(published_weights(name), path)
    backbone = initialized(name, path)
    with torch.no_grad():
        embedding = backbone.trunk(images()) if name == DINO else backbone(images())
    expected = torch.tensor(EXPECTED[name]["embedding"])
    torch.testing.assert_close(embedding[:, :16], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(embedding.norm(dim=1), torch.tensor(EXPECTED[name]["norm"]), rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def dino_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("dino") / "model.safetensors"
    save_file(published_weights(DINO), path)
    return path


def test_the_embedding_layer_of_an_encoder_is_new(dino_file):
    backbone = initialized(DINO, dino_file, embedding_size=64)
    torch.manual_seed(0)
    fresh = build_backbone(f"timm/{DINO}", embedding_size=64)
    assert torch.equal(backbone.network.head.weight, fresh.network.head.weight)
    assert not torch.equal(backbone.network.blocks[0].norm1.weight, fresh.network.blocks[0].norm1.weight)


def test_meta_s_file_with_a_mask_token_gives_the_same_weights(tmp_path, dino_file):
    torch.save(
        published_weights(DINO) | {"mask_token": torch.ones(1, 384)}, tmp_path / "dinov2_vits14_pretrain.pth"
    )
    expected, found = (
        initialized(DINO, path) for path in (dino_file, tmp_path / "dinov2_vits14_pretrain.pth")
    )
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


def test_another_stated_normalization_is_refused(tmp_path):
    save_file(published_weights(DINO), tmp_path / "model.safetensors")
    half = {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(half))
    with pytest.raises(ModelError, match=r"config\.json.*0\.485"):
        initialized(DINO, tmp_path / "model.safetensors")


@pytest.mark.parametrize("missing", ["pos_embed", "patch_embed.proj.weight", "blocks.3.norm1.weight"])
def test_a_file_without_a_weight_is_refused(tmp_path, missing):
    weights = published_weights(DINO)
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="model.safetensors"):
        initialized(DINO, tmp_path / "model.safetensors")


def test_an_encoder_is_no_face_model(dino_file):
    with pytest.raises(ModelError, match="model.init_from"):
        open_model(dino_file, torch.device("cpu"))
    with pytest.raises(ModelError, match="DINOv3.*model.init_from"):
        identify_backbone({"blocks.0.gamma_1": torch.ones(384)}, "dinov3.safetensors")


@pytest.mark.slow
def test_a_run_adapts_an_encoder_and_resumes_bit_for_bit(tmp_path, dino_file, dataset):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{train: {dataset}/data, image_size: 28, workers: 0}}\n"
        f"model: {{backbone: timm/{DINO}, embedding_size: 16, init_from: {dino_file}, "
        "lora: {rank: 2, projections: [q, v]}}\n"
        "optim: {name: adamw, lr: 0.001}\n"
        "train: {global_batch_size: 24, max_steps: 3, precision: fp32, device: cpu}\n"
        "checkpoint: {every_steps: 2}\neval: {targets: []}\nlog: {tensorboard: false, report: false}\n"
    )
    assert training.train(load_config(config), tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    assert training.resume(load_config(config), tmp_path / "resumed", 2) == 0
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    first = initialized(DINO, dino_file, embedding_size=16, image_size=28).state_dict()
    changed = {name for name, value in whole.items() if not torch.equal(value, first[name])}
    assert changed == {
        *(f"network.blocks.{block}.attn.qkv.weight" for block in range(12)),
        "network.head.weight",
        "network.head.bias",
    }
