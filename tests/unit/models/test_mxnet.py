import struct

import numpy as np
import pytest
import torch

from facetrain.backbone.registry import IRESNET_LAYERS
from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.mxnet_params import read_params
from facetrain.models.mxnet_symbol import read_symbol
from tests.support.mxnet_files import KINDS, V1, V2, V3, params_bytes, randomize, write_iresnet


@pytest.mark.parametrize("version", [None, V1, V2, V3])
def test_arrays_of_every_version_and_type_are_read(tmp_path, version):
    arrays = {f"arg:{kind}": np.arange(6).reshape(2, 3).astype(kind) for kind in KINDS}
    (tmp_path / "a.params").write_bytes(params_bytes(arrays, version))
    for name, tensor in read_params(tmp_path / "a.params").items():
        assert str(tensor.dtype) == f"torch.{name}"
        np.testing.assert_array_equal(tensor.numpy(), arrays[f"arg:{name}"])


def test_a_params_file_truncated_or_changed_at_any_byte_is_refused_or_read(tmp_path):
    data = params_bytes({"arg:a": np.ones((2, 3), "float32"), "aux:b": np.ones(2, "float32")})
    path = tmp_path / "a.params"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_params(path)
    for place in range(len(data)):
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        try:
            read_params(path)
        except ModelError as error:
            assert str(path) in str(error)


def test_an_array_of_very_many_dimensions_is_refused_before_its_size_is_computed(tmp_path):
    array = struct.pack("<Iii10000q", V2, 0, 10_000, *[2**62 - 1] * 10_000)
    (tmp_path / "a.params").write_bytes(struct.pack("<QQQ", 0x112, 0, 1) + array)
    with pytest.raises(ModelError, match="an array of 10000 dimensions"):
        read_params(tmp_path / "a.params")


@pytest.mark.parametrize(
    ("name", "settings"), [("r18", "param"), ("r34", "attr"), ("r50", "attrs"), ("r100", "attrs")]
)
def test_mxnet_iresnets_give_the_embeddings_of_the_torch_network(tmp_path, name, settings):
    """Narrow, with InsightFace's depths and PReLUs, the fixed gamma after pre_fc1, and 1/128 instead of 1/127.5."""
    torch.manual_seed(0)
    options = {"layers": IRESNET_LAYERS[name], "widths": (4, 4, 8, 8), "embedding_size": 16}
    net = randomize(build_backbone("iresnet", **options), eps=2e-5)
    symbol = write_iresnet(tmp_path, net)
    # The names that versions of MXNet have used for the attributes of a node.
    symbol.write_text(symbol.read_text().replace('"attrs"', f'"{settings}"'))
    image = torch.randint(0, 256, (2, 112, 112, 3), dtype=torch.uint8)
    for path in (symbol, tmp_path / "model-0000.params"):
        opened = open_model(path, torch.device("cpu"))
        assert opened.embedding_size == 16
        with torch.no_grad():
            found = opened.network.double()(opened.prepare(image).double())
            expected = net.double()((image.permute(0, 3, 1, 2).double() - 127.5) / 128)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_casts_of_a_training_in_float16_change_no_embedding(tmp_path):
    net = randomize(build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(4, 4, 8, 8), embedding_size=16))
    opened = open_model(write_iresnet(tmp_path, net, half=True), torch.device("cpu"))
    image = torch.randint(0, 256, (2, 112, 112, 3), dtype=torch.uint8)
    with torch.no_grad():
        expected = net((image.permute(0, 3, 1, 2) - 127.5) / 128)
        torch.testing.assert_close(
            opened.network(opened.prepare(image)), expected, atol=1e-4 * expected.abs().max().item(), rtol=0
        )


def test_a_graph_is_opened_in_float32_also_in_a_program_with_another_default_type(tmp_path):
    net = randomize(build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(4, 4, 8, 8), embedding_size=16))
    symbol = write_iresnet(tmp_path, net)
    torch.set_default_dtype(torch.float64)
    try:
        opened = open_model(symbol, torch.device("cpu"))
        image = torch.zeros(1, 112, 112, 3, dtype=torch.uint8)
        assert opened.network(opened.prepare(image)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


NODE = '{"nodes": [{"op": "%s", "name": "n", "inputs": %s}], "heads": [[0, 0, 0]]}'


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("{", "not an MXNet graph"),
        ("[]", "not an MXNet graph"),
        (NODE % ("Custom", "[]"), "the node n has the operator Custom"),
        (NODE % ("Flatten", "[[0, 0]]"), "comes before its inputs"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused(tmp_path, symbol, message):
    (tmp_path / "m-symbol.json").write_text(symbol)
    with pytest.raises(ModelError, match="m-0000.params is missing"):
        open_mxnet(tmp_path / "m-symbol.json")
    (tmp_path / "m-0000.params").write_bytes(params_bytes({}))
    with pytest.raises(ModelError, match=message):
        open_mxnet(tmp_path / "m-symbol.json")


@pytest.mark.parametrize("name", ["m[1]", "m*"])
def test_the_name_of_a_network_may_have_any_characters(tmp_path, name):
    (tmp_path / f"{name}-symbol.json").write_text('{"nodes": [], "heads": [[0, 0, 0]]}')
    (tmp_path / f"{name}-0000.params").write_bytes(params_bytes({"arg:a": np.ones(1, "float32")}))
    for ending in ("symbol.json", "0000.params"):
        assert read_symbol(tmp_path / f"{name}-{ending}")[2].keys() == {"a"}


@pytest.mark.parametrize("name", ["m.json", "m.params", "-0000.params"])
def test_a_file_with_another_name_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelError, match=f"{name}: .*-symbol.json"):
        open_model(tmp_path / name, torch.device("cpu"))
    with pytest.raises(ModelError, match="n-symbol.json: "):
        open_model(tmp_path / "n-symbol.json", torch.device("cpu"))
