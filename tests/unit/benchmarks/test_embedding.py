import math

from benchmarks.embedding import VARIANTS, measure_embedding
from facetrain.backbone.zoo import build_backbone
from facetrain.models.model_file import describe_backbone, save_model


def test_the_variants_embed_the_same_images_to_the_same_embeddings(tmp_path):
    options = {"layers": [1, 1, 1, 1], "widths": [8, 8, 8, 8], "embedding_size": 8, "image_size": 16}
    path = tmp_path / "m.safetensors"
    save_model(
        path, build_backbone("iresnet", **options).state_dict(), describe_backbone("iresnet", **options)
    )
    found = measure_embedding(str(path), batch_size=3, rounds=2, threads=1, variants=VARIANTS[:3])["variants"]
    assert list(found) == ["plain", "facetrain", "facetrain_bf16"]
    assert found["plain"]["largest_difference"] == 0
    assert (
        found["facetrain"]["largest_difference"] < 1e-6 < found["facetrain_bf16"]["largest_difference"] < 0.05
    )
    assert all(
        math.isfinite(one["images_per_s"]) and one["times_onnxruntime"] is None for one in found.values()
    )
