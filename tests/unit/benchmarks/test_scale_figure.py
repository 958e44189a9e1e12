"""The formulas of docs/scale.md beside what the head does."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scale_figure import LOCAL_BATCH, Rates, draw, head_operations, tables
from facetrain.head.partial_fc import PartialFC
from tests.support.command import ROOT


@pytest.mark.parametrize("sample_rate", [1.0, 0.25])
def test_the_operations_of_the_head_are_those_of_a_step_that_recomputes(sample_rate, monkeypatch):
    # Without oneDNN, whose products torch does not count.
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    classes = 4096
    head = PartialFC("arcface", 512, classes, sample_rate, recompute=True, sparse=sample_rate < 1)
    embedding = torch.randn(LOCAL_BATCH, 512, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        head(embedding, torch.zeros(LOCAL_BATCH, dtype=torch.long)).backward()
    # The only label is one class more than the sample.
    assert counter.get_total_flops() == pytest.approx(head_operations(classes, sample_rate), rel=0.01)


def test_the_page_has_the_tables_that_the_script_prints():
    assert tables(Rates()) in (ROOT / "docs" / "scale.md").read_text()


def test_the_help_draws_no_figure_of_its_name(tmp_path):
    program = [sys.executable, "-m", "benchmarks.scale_figure", "--help"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(program, cwd=tmp_path, env=variables, check=True, capture_output=True).stdout
    assert b"Usage: " in printed and not [*tmp_path.iterdir()]


def test_the_figure_is_drawn_with_its_texts(tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "scale.svg", Rates())
    drawn = (tmp_path / "scale.svg").read_text()
    assert all(text in drawn for text in ("identities", "exchange of a step, ms", "catalog of a machine"))
