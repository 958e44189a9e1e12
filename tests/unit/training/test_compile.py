import copy
import socket

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.utils import counters

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IBasicBlock
from facetrain.backbone.recompute import run_block
from facetrain.errors import RunError
from facetrain.training.compile import compiler_settings_kept
from facetrain.training.precision import InPrecision

# torch's compiler imports what torch itself has deprecated, and looks at gradients where there are none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]


class TwoBlocks(Backbone):
    """Two blocks of the same shapes, and a linear layer."""

    def __init__(self, again=False, block=lambda: IBasicBlock(4, 4, 1)):
        super().__init__()
        self.embedding_size, self._again = 4, again
        self.first, self.second = block(), block()
        self.fc = torch.nn.Linear(4 * 36, 4)

    def trunk(self, image_BCHW):
        x = run_block(self.first, image_BCHW, recompute=self._again)
        return run_block(self.second, x, recompute=self._again).flatten(1)

    def regions(self):
        yield from ((block, "forward") for block in (self.first, self.second))

    def neck(self, feature):
        return self.fc(feature)


def trained(net, precision, *, compile, steps=3):
    """Train some steps; return the losses and what the network has become."""
    network = InPrecision(
        copy.deepcopy(net), precision, torch.device("cpu"), memory_format=torch.channels_last, compile=compile
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        image = torch.randn(5, 4, 6, 6, generator=generator).requires_grad_()
        loss = (network(image) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, network


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder that keeps what was compiled: the tests that only use it need not compile it again."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture(autouse=True)
def afresh(code, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(code))
    torch._dynamo.reset()
    counters.clear()
    # Otherwise torch compiles a program for each extension of the CPU's instructions, to see whether it runs. Any
    # compiler knows those of 256 bits; without them in the CPU, torch uses none.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp.simdlen": 256}):
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "mode"), [pytest.param(False, "on", marks=pytest.mark.long), (True, "reduce-overhead")]
)
def test_a_compiled_network_learns_what_the_plain_one_does_and_equal_blocks_share_their_code(again, mode):
    torch.manual_seed(0)
    net = TwoBlocks(again)
    plain, network = trained(net, "fp32", compile="off")
    compiled, other = trained(net, "fp32", compile=mode)
    assert compiled == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(
        other.backbone.state_dict(), network.backbone.state_dict(), rtol=1e-4, atol=1e-5
    )
    assert counters["stats"]["unique_graphs"] == 1
    # Verification brings batches of other sizes, in another mode, and needs no compiled code.
    network.backbone.load_state_dict(other.backbone.state_dict())
    network.eval(), other.eval()
    with torch.no_grad():
        image = torch.randn(3, 4, 6, 6)
        assert torch.equal(other(image), network(image))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_in_16_bits_a_compiled_network_stays_as_near_as_rounding_allows():
    torch.manual_seed(0)
    net = TwoBlocks()
    plain, _ = trained(net, "bf16", compile="off")
    compiled, _ = trained(net, "bf16", compile="on")
    assert compiled == pytest.approx(plain, rel=0.02) and counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_signals_to_the_process_group_of_a_run_do_not_end_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nkill -INT $$; kill -TERM $$; kill -USR1 $$; kill -HUP $$\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    _, network = trained(TwoBlocks(block=torch.nn.ReLU), "fp32", compile="on", steps=0)
    with torch._inductor.config.patch({"cpp.cxx": (str(compiler),), "cpp_cache_precompile_headers": False}):
        network(torch.zeros(5, 4, 6, 6))
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_without_a_working_compiler_the_run_ends_with_a_line_that_names_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    missing = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)})
    with missing, pytest.raises(RunError, match=rf"train\.compile: .*{socket.gethostname()}"):
        trained(TwoBlocks(), "fp32", compile="on")


def test_an_error_of_the_compiler_without_text_is_named_by_its_type(monkeypatch):
    def fails(*inputs):
        raise NotImplementedError

    monkeypatch.setattr(torch, "compile", lambda method, **options: fails)
    with pytest.raises(RunError, match=r"train\.compile: .*NotImplementedError"):
        trained(TwoBlocks(), "fp32", compile="on")


@pytest.mark.slow
def test_an_error_of_the_network_itself_is_not_the_compilers():
    network = InPrecision(
        TwoBlocks(), "fp32", torch.device("cpu"), memory_format=torch.channels_last, compile="on"
    )
    with pytest.raises(RuntimeError, match="running_mean should contain 3 elements not 4"):
        network(torch.randn(5, 3, 6, 6))


def test_the_settings_of_the_compiler_are_as_before_after_a_run():
    config = torch.compiler.config
    with config.patch(recompile_limit=5):
        with compiler_settings_kept("on"):
            trained(TwoBlocks(), "fp32", compile="on", steps=0)
            assert config.recompile_limit > 5
        assert config.recompile_limit == 5
