"""Export to OpenVINO, in an environment that `make interop` installs, run by the code of docs/deploy/openvino.md."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import describe_backbone, save_model
from tests.support.command import environment
from tests.support.mxnet_files import randomize

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = _ROOT / "build" / "interop-openvino"
_EXPORT = ["-m", "facetrain", "export", "m.safetensors", "--format", "openvino", "--output", "m.xml"]
_IRESNET = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": 32}
_VIT = {"embedding_size": 16, "image_size": 32}


def run(*command, cwd):
    """Run Python in the environment that has OpenVINO."""
    if not (_ENVIRONMENT / "ready").exists():
        pytest.skip("OpenVINO is not installed; run `make interop`")
    return subprocess.run(
        [_ENVIRONMENT / "bin" / "python", "-W", "ignore", *map(str, command)],
        cwd=cwd, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


def write_model(path, name="iresnet", options=_IRESNET):
    save_model(
        path, randomize(build_backbone(name, **options)).state_dict(), describe_backbone(name, **options)
    )
    return open_model(path, torch.device("cpu"))


def documented_code():
    """Return the preparation of the image, of docs/models.md, and the code that runs the file."""
    models = (_ROOT / "docs" / "models.md").read_text().split("### Run an exported file")[1]
    pages = models, (_ROOT / "docs" / "deploy" / "openvino.md").read_text()
    return "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] for page in pages)


def test_openvino_gives_the_embeddings_of_the_network_with_the_code_of_the_docs(tmp_path):
    model = write_model(tmp_path / "m.safetensors")
    done = run(*_EXPORT, "--json", "--model-card", "card.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-4 and found["cosine"]["images"] == 20
    assert found["bytes"] == sum((tmp_path / name).stat().st_size for name in ("m.xml", "m.bin"))
    assert {path.name for path in tmp_path.iterdir()} == {"m.safetensors", "card.md", "m.xml", "m.bin"}
    card = (tmp_path / "card.md").read_text()
    assert "(pixels − 127.5) / 127.5" in card and "RGB" in card
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    (tmp_path / "example.py").write_text(
        "import numpy as np\npixels = np.load('pixels.npy')\n"
        f"{documented_code()}\nnp.save('embedding.npy', np.asarray(embedding))\n"
    )
    done = run("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model.network(model.prepare(torch.from_numpy(pixels)[None])).numpy().ravel()
    embedding = np.load(tmp_path / "embedding.npy").ravel()
    np.testing.assert_allclose(embedding, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["vit_t", pytest.param("vit_s_kprpe", marks=pytest.mark.long)])
def test_a_vision_transformer_from_pixels_gives_unit_embeddings_and_states_its_input(tmp_path, backbone):
    write_model(tmp_path / "m.safetensors", backbone, _VIT)
    done = run(*_EXPORT, "--from-pixels", "--unit", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-4
    script = (
        "import openvino; model = openvino.Core().read_model('m.xml'); "
        "print(model.get_rt_info(['facetrain', 'preprocessing']).value)"
    )
    done = run("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stated = json.loads(done.stdout)
    assert stated["channels"] == "RGB" and stated["input"] == "uint8 NHWC" and stated["mean"] == 0
