"""Compiled and replayed code on a GPU against eager training."""

import pytest
import torch

from facetrain.config.loading import load_config
from tests.support import training as run
from tests.support.runs import losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own deprecated imports
]


@pytest.mark.parametrize("mode", ["on", "reduce-overhead"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_run_has_the_losses_of_an_eager_run(precision, mode, describe, tmp_path):
    config, found = describe(steps=6, precision=precision), {}
    for name in ("off", mode):
        changes = ["eval.targets=[]", "train.device=cuda", f"train.compile={name}"]
        assert run.train(load_config(config, changes), tmp_path / name) == 0
        found[name] = losses(tmp_path / name)
    assert found[mode] == pytest.approx(found["off"], rel=5e-2)
