"""Summary of a finished run."""

import pytest

from facetrain.config.loading import build_config
from facetrain.run.summary import Ending, summarize
from facetrain.telemetry.jsonl import JsonLines

CONFIG = build_config({"data": {"train": "x"}}, "test")


def test_numbers_that_are_not_finite_are_in_the_summary(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(10, {"loss": float("nan")})
    lines.write(20, {"lfw/accuracy": 0.5, "lfw/auc": float("nan"), "lfw/pairs": 600.0})
    lines.write(20, {"loss": float("inf")})
    lines.close()
    text = summarize(tmp_path, CONFIG, Ending(has_learned=False))
    assert "  loss      nan at step 10 → inf at step 20\n" in text
    assert "  lfw       accuracy 50.00% at step 20 → 50.00% (AUC nan), 600 pairs\n" in text
    assert "  did not learn in its first steps: see the warning in " in text


@pytest.mark.parametrize("is_part", [True, False])
def test_a_run_that_is_a_part_of_another_command_suggests_no_next_one(tmp_path, is_part):
    text = summarize(tmp_path, CONFIG, Ending(is_part=is_part))
    assert ("facetrain resume" in text) == ("next:" in text) == (not is_part)


@pytest.mark.parametrize(("margin_weight", "line"), [(0, "9.000 at step 10"), (1, "5.000 at step 10")])
def test_the_summary_has_the_loss_that_is_trained(tmp_path, margin_weight, line):
    distill = {"teacher": "x", "loss": "cosine", "margin_weight": margin_weight}
    config = build_config({"data": {"train": "x"}, "distill": distill}, "test")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(10, {"loss": 5.0, "distill_loss": 9.0})
    lines.close()
    text = summarize(tmp_path, config, Ending())
    assert f"  loss      {line}\n" in text


@pytest.mark.parametrize(
    ("losses", "grows"),
    [
        ([40.0, 8.0, 71.0], True),
        ([40.0, "nan"], True),
        ([40.0, 69.0], False),
        ([0.1, 0.9], False),
        ([5.0], False),
    ],
)
def test_a_run_whose_loss_has_grown_did_not_learn(tmp_path, losses, grows):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in enumerate(losses):
        lines.write(step, {"loss": float(loss)})
    lines.close()
    text = summarize(tmp_path, CONFIG, Ending())
    assert ("\n  did not learn: the loss has grown or is not finite; lower " in text) == grows
