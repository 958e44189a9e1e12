"""Summary of a finished run."""

from facetrain.run.results import summarize
from facetrain.telemetry.jsonl import JsonLines


def test_numbers_that_are_not_finite_are_in_the_summary(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(10, {"loss": float("nan")})
    lines.write(20, {"lfw/accuracy": 0.5, "lfw/auc": float("nan"), "lfw/pairs": 600.0})
    lines.write(20, {"loss": float("inf")})
    lines.close()
    text = summarize(tmp_path, [], "", ended_by="train.epochs", skipped=[], has_learned=False, seconds=3.0)
    assert "  loss      nan at step 10 → inf at step 20\n" in text
    assert "  lfw       accuracy 50.00% at step 20 → 50.00% (AUC nan), 600 pairs\n" in text
    assert "  did not learn in its first steps: see the warning in " in text
