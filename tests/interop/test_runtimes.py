"""Export to programs that run a network elsewhere, in environments that `make interop` installs.

TFLite and ExecuTorch need about 1 GB, and minutes per file: only `make interop LARGE=1` installs them.
The code of docs/models.md runs each file.
"""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.models.model_file import describe_backbone, open_model, save_model
from tests.support.command import environment
from tests.support.mxnet_files import randomize

_ROOT = Path(__file__).resolve().parents[2]
_FILES = {
    "openvino": ["m.xml", "m.bin"],
    "ncnn": ["m.ncnn.param", "m.ncnn.bin"],
    "tflite": ["m.tflite"],
    "executorch": ["m.pte"],
}
_FOLDERS = {"openvino": "interop-runtimes", "ncnn": "interop-runtimes"}
"""Environments in build/ that are not named after their runtime."""
_IRESNET = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": 32}
_VIT = {"embedding_size": 16, "image_size": 32}


def run_in(runtime, *command, cwd):
    """Run Python in the environment that has a runtime."""
    folder = _ROOT / "build" / _FOLDERS.get(runtime, f"interop-{runtime}")
    if not (folder / "ready").exists():
        large = "" if runtime in _FOLDERS else " LARGE=1"
        pytest.skip(f"{runtime} is not installed; run `make interop{large}`")
    return subprocess.run(
        [folder / "bin" / "python", "-W", "ignore", *map(str, command)],
        cwd=cwd, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


def write_model(path, name="iresnet", options=_IRESNET):
    save_model(
        path, randomize(build_backbone(name, **options)).state_dict(), describe_backbone(name, **options)
    )
    return open_model(path, torch.device("cpu"))


def documented_code(runtime):
    """Return the preparation of the image and the code of a runtime, of docs/models.md."""
    page = (_ROOT / "docs" / "models.md").read_text().split("### Run an exported file")[1]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in blocks if block.startswith(f"# {runtime}\n"))
    return blocks[0] + code


@pytest.mark.parametrize("runtime", _FILES)
def test_a_runtime_gives_the_embeddings_of_the_network_with_the_code_of_the_docs(tmp_path, runtime):
    model = write_model(tmp_path / "m.safetensors")
    done = run_in(
        runtime, "-m", "facetrain", "export", "m.safetensors", "--format", runtime, "--output",
        _FILES[runtime][0], "--json", "--model-card", "card.md", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < (5e-3 if runtime == "ncnn" else 1e-4) and found["cosine"]["images"] == 20
    assert found["bytes"] == sum((tmp_path / name).stat().st_size for name in _FILES[runtime])
    assert {path.name for path in tmp_path.iterdir()} == {"m.safetensors", "card.md", *_FILES[runtime]}
    card = (tmp_path / "card.md").read_text()
    assert "- normalization: (x − 127.5) / 127.5" in card and "RGB" in card and "ms for 1 image" in card
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    (tmp_path / "example.py").write_text(
        "import numpy as np\npixels = np.load('pixels.npy')\n"
        f"{documented_code(runtime)}\nnp.save('embedding.npy', np.asarray(embedding))\n"
    )
    done = run_in(runtime, "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model.network(model.prepare(torch.from_numpy(pixels)[None])).numpy().ravel()
    embedding = np.load(tmp_path / "embedding.npy").ravel()
    np.testing.assert_allclose(embedding, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("runtime", "backbone"),
    [("openvino", "vit_t"), ("openvino", "vit_s_kprpe"), ("tflite", "vit_t"), ("executorch", "vit_t")],
)
def test_a_vision_transformer_from_pixels_with_unit_embeddings(tmp_path, runtime, backbone):
    write_model(tmp_path / "m.safetensors", backbone, _VIT)
    done = run_in(
        runtime, "-m", "facetrain", "export", "m.safetensors", "--format", runtime, "--output",
        _FILES[runtime][0], "--from-pixels", "--unit", "--batch", 2, "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-4 and found["batch"] == 2


def test_a_network_that_ncnn_cannot_run_is_refused(tmp_path):
    write_model(tmp_path / "m.safetensors", "vit_t", _VIT)
    done = run_in(
        "ncnn", "-m", "facetrain", "export", "m.safetensors", "--format", "ncnn", "--output", "m.ncnn.param",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0 and "ncnn cannot run its operations" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_metadata_of_openvino_state_the_input(tmp_path):
    write_model(tmp_path / "m.safetensors")
    run_in(
        "openvino", "-m", "facetrain", "export", "m.safetensors", "--format", "openvino", "--output", "m.xml",
        "--from-pixels", cwd=tmp_path,
    )  # fmt: skip
    script = (
        "import openvino; model = openvino.Core().read_model('m.xml'); "
        "print(model.get_rt_info(['facetrain', 'preprocessing']).value)"
    )
    done = run_in("openvino", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert written["channels"] == "RGB" and written["input"] == "uint8 NHWC" and written["mean"] == 127.5
