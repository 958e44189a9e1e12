"""HTML report of an evaluation."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from facetrain.verify.metrics.discard import DiscardCurve
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.figures import result_figures
from facetrain.verify.output.formatting import format_evaluation
from facetrain.verify.output.report import verdict_of, write_report
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.sets.pair_set import PairSet
from tests.support.faces import face

FIGURES = {"roc", "det", "scores", "discard"}


def verified(pairs, *, spread=0.3, draws=20):
    """Return the result of a model whose embeddings of one person differ by `spread`."""
    embedding_ND = np.random.default_rng(0).normal(size=(80, 8))
    embedding_ND[1::2][pairs.same] = embedding_ND[0::2][pairs.same] + spread * embedding_ND[1::2][pairs.same]
    return verification_result(embedding_ND, embedding_ND, pairs, draws=Draws(draws))


@pytest.fixture(scope="module")
def found():
    same = np.arange(40) % 2 == 0
    images = [face(n + (0 if k == 0 or same[n] else 50), k) for n in range(40) for k in range(2)]
    pairs = PairSet("lfw", images, same)
    result = verified(pairs)
    return ModelResults("r50 <script>alert(1)</script>", {"lfw": result}, {"lfw": pairs}, True)


@pytest.mark.slow
def test_the_page_is_self_contained_and_its_folder_has_the_figures_and_the_json(found, tmp_path):
    details = {"date": "2026-11-21", "command": "facetrain eval m --target <lfw>"}
    page, again = (
        write_report(tmp_path / name, found, model="runs/a&b", details=details).read_text() for name in "ab"
    )
    assert page == again
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "<script" not in page and "&lt;script&gt;" in page and "runs/a&amp;b" in page
    assert page.count("<svg") == 4
    assert page.count("data:image/jpeg;base64,") == 2 * 2 * 12, "twelve pairs of either kind"
    assert "95 % interval" in page and "needs 1,000 impostor pairs" in page
    folder = tmp_path / "a"
    names = {path.name for path in folder.iterdir()}
    assert names == {"report.html", "report.json", *(f"lfw_{name}.png" for name in FIGURES)}
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["sets"]["lfw"]["accuracy"] == found.results["lfw"].metrics["accuracy"]
    assert "2026-11-21" in page and "--target &lt;lfw&gt;" in page and "fp32" in page
    cells = re.findall(r"<tr><td>([^<]*)</td>", page[page.index("<h2>") :])
    # Thresholds are cosines.
    assert cells[0] == "accuracy" and "threshold" not in cells


def labels_of(figure):
    return figure.axes[0].get_legend_handles_labels()[1]


def test_roc_and_det_show_the_other_model_and_no_legend_covers_the_data(found):
    result = found.results["lfw"]
    figures = result_figures(result, result, ("new.onnx", "old.onnx"))
    for name in ("roc", "det"):
        assert labels_of(figures[name])[:2] == ["new.onnx", "old.onnx"]
    for figure in figures.values():
        FigureCanvasAgg(figure).draw()  # the canvas of a new figure computes no layout
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert not box.overlaps(figure.axes[0].get_window_extent())
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_the_curves_of_several_galleries_are_named(found):
    one = found.results["lfw"]
    result = replace(one, protocol="identification", curves={"G1": one.curve, "G2": one.curve})
    labels = ["new.onnx, G1", "new.onnx, G2", "old.onnx, G1", "old.onnx, G2"]
    for name in ("roc", "det"):
        assert labels_of(result_figures(result)[name])[:2] == ["G1", "G2"]
        assert labels_of(result_figures(result, result, ("new.onnx", "old.onnx"))[name])[:4] == labels
    assert result.as_json()["gallery_curves"]["G2"] == one.as_json()["curve"]


def test_error_versus_discard_shows_each_model_beside_its_own_random_discarding(found):
    result = found.results["lfw"]
    share, rate = np.linspace(0, 0.99, 100), np.r_[np.full(50, 0.02), np.full(50, 1.0)]
    curves = [DiscardCurve("length", share, scale * rate, share, 30) for scale in (1, 0.5)]
    one, other = (replace(result, discards=[curve]) for curve in curves)
    (axes,) = result_figures(one, other, ("new", "old"))["discard"].axes
    level = {line.get_label(): set(line.get_ydata()) for line in axes.lines}
    assert level == {"length": {0.02}, "length, old": {0.01}, "random": {0.02}, "random, old": {0.01}}
    assert 0.02 < axes.get_ylim()[1] < 0.03 and max(axes.lines[0].get_xdata()) == 0.5


@pytest.mark.slow
def test_unusual_names_are_shown_as_they_are_and_end_no_report(found, tmp_path):
    result = found.results["lfw"]
    for names in (("_new", "_old"), ("a$_$b", "x")):
        figure = result_figures(result, result, names)["roc"]
        FigureCanvasAgg(figure).draw()
        assert [label.strip() for label in labels_of(figure)] == list(names)
    with_roc = replace(result, histogram=None, discards=[])
    for name in ("lfw\udcff", "x" * 245):
        named = replace(found, results={name: with_roc}, sets={name: found.sets["lfw"]})
        page = write_report(tmp_path / str(len(name)), named, model="m")
        assert page.exists() and len(list(page.parent.glob("*_roc.png"))) == 1


@pytest.mark.parametrize(
    ("model", "other", "names"),
    [
        ("runs/new", "runs/old", ["new", "old"]),
        ("new/model.onnx", "old/model.onnx", ["new/model.onnx", "old/model.onnx"]),
        ("runs/old", "runs/old", ["old", "old (other model)"]),
    ],
)
def test_the_two_models_of_a_comparison_have_different_names(found, tmp_path, model, other, names):
    result = replace(found.results["lfw"], curves={}, histogram=None, discards=[])
    compared = replace(found, results={"lfw": result}).compared_with(other, {"lfw": result})
    page = write_report(tmp_path, compared, model=model, other=other).read_text()
    assert re.findall("<th>([^<]*)", page[page.index("Compared with") :])[1:3] == names


def test_axes_are_named_after_the_protocol(found):
    searched = replace(found.results["lfw"], protocol="identification")
    for result, xlabel, ylabel in (
        (found.results["lfw"], "false accept rate", "false reject rate"),
        (searched, "false positive identification rate", "false negative identification rate"),
    ):
        axes = result_figures(result)["det"].axes[0]
        assert (axes.get_xlabel(), axes.get_ylabel()) == (xlabel, ylabel)
        assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.3, 50.0])
def test_figures_are_drawn_for_good_and_bad_models(spread):
    pairs = PairSet("lfw", [], np.arange(40) % 2 == 0, subject=np.arange(80))
    figures = result_figures(verified(pairs, spread=spread, draws=0))
    assert set(figures) == FIGURES
    for figure in figures.values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())
        assert pixels.shape == (432, 600, 4) and len(np.unique(pixels.view(np.uint32))) > 20


@pytest.mark.parametrize(
    ("spreads", "kind", "words"),
    [
        ((0.3, 50.0), "good", "better than"),
        ((50.0, 0.3), "bad", "worse than"),
        ((0.3, 0.3), "none", "no sig"),
    ],
)
def test_the_headline_of_a_comparison_is_good_or_bad_only_beyond_chance(spreads, kind, words):
    pairs = PairSet("lfw", [], np.arange(40) % 2 == 0, subject=np.arange(80))
    first, second = (verified(pairs, spread=spread, draws=100) for spread in spreads)
    compared = ModelResults("r50", {"lfw": first}, {}, True).compared_with("r18", {"lfw": second})
    found, _, text = verdict_of(compared, "lfw", "r18")
    assert found == kind and text.startswith(words)


@pytest.mark.parametrize(
    ("genuine", "headline", "remark"),
    [
        (range(0, 40, 2), "accuracy on lfw", ""),
        (range(0, 40, 8), "area under the ROC (AUC) on lfw", "refusing all pairs gives 87.50%"),
        (range(1, 40), "area under the ROC (AUC) on lfw", "accepting all pairs gives 97.50%"),
        (range(40), "lfw: too small for any metric", ""),
    ],
)
def test_the_headline_is_no_accuracy_that_one_answer_reaches_and_no_length(genuine, headline, remark):
    pairs = PairSet("lfw", [], np.isin(np.arange(40), genuine), subject=np.arange(80))
    result = verified(pairs)
    evaluation = ModelResults("r50", {"lfw": result}, {}, is_leader=True)
    assert verdict_of(evaluation, "lfw", "")[2].startswith(headline)
    assert result.remark("accuracy") == remark and result.metrics["xnorm"]
    assert not remark or any(line.endswith(f"  {remark}") for line in format_evaluation(evaluation))
