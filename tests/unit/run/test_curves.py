"""Curves of runs: labelled, and without overlaps."""

import numpy as np
import pytest

from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report.curves import PANELS, draw_curve, draw_range_test
from facetrain.run.report.history import History
from facetrain.run.report.published_curve import PublishedCurve

NAMES = ("lfw", "cfp_fp", "agedb_30", "a_set_with_a_rather_long_name")


def records():
    for step in range(0, 2001, 100):
        yield {"step": step, "loss": 20 - step / 200, "lr": 0.1, "images_per_s": 900.0}
        if step % 500 == 0:
            yield {"step": step} | {f"{name}/accuracy": 0.5 + step / 4100 for name in NAMES}
    yield {"step": 2100, "loss": "nan", "lr": 0.1, "images_per_s": 900.0}


def history():
    found = History()
    for record in records():
        found.add(record)
    return found


@pytest.mark.parametrize("panel", PANELS)
def test_no_text_covers_a_curve_or_another_text(panel):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_curve({"tiny_$x": history()}, panel)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    parts = [axes, axes.xaxis.label, axes.yaxis.label, *filter(None, [axes.get_legend()])]
    boxes = [part.get_window_extent() for part in parts]
    assert (axes.get_legend() is not None) == (panel == "accuracy")
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "cut off at the side"
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_the_figure_names_its_axes_and_its_sets():
    drawn = [draw_curve({"tiny_$x": history()}, panel).axes[0] for panel in PANELS]
    labels = [axes.get_ylabel() for axes in drawn]
    assert labels == ["loss", "accuracy (%)", "learning rate", "images per second"]
    assert {axes.get_xlabel() for axes in drawn} == {"step"}
    texts = [text.get_text() for text in drawn[1].get_legend().get_texts()]
    assert texts == sorted(NAMES)


def test_several_runs_have_a_legend_whose_names_are_no_formulas_and_print_no_control_character():
    runs = {"$first$": history(), "begun": History(), "_sec\x1bond": history()}
    (axes,) = draw_curve(runs, "loss").axes
    assert len({line.get_color() for line in axes.lines}) == 2, "the one that has just begun has no curve"
    texts = axes.get_legend().get_texts()
    assert [text.get_text() for text in texts] == ["$first$", " _sec\\x1bond"]
    assert not any(text.get_parse_math() for text in texts)


def test_accuracies_are_in_percent_with_the_published_ones_dashed_in_the_same_color():
    published = PublishedCurve("x", np.array([100.0, 200.0]), {"lfw": np.array([0.25, 0.5])})
    (axes,) = draw_curve({"tiny": history()}, "accuracy", published=published).axes
    lines = {line.get_label(): line for line in axes.lines if line.get_linestyle() == "-"}
    (dashed,) = (line for line in axes.lines if line.get_linestyle() == "--")
    assert list(dashed.get_ydata()) == [25, 50] and lines["lfw"].get_ydata()[0] == 50
    assert dashed.get_color() == lines["lfw"].get_color() != lines["cfp_fp"].get_color()
    (axes,) = draw_curve({"begun": History()}, "accuracy").axes
    assert axes.get_legend() is None


def test_a_run_has_one_color_in_all_figures_and_a_set_one_line_style():
    verified_only = History()
    verified_only.add({"step": 1, "lfw/accuracy": 0.5})
    runs = {"a": verified_only, "b": history(), "c": history()}
    (axes,) = draw_curve(runs, "loss").axes
    color = {line.get_label(): line.get_color() for line in axes.lines}
    (axes,) = draw_curve(runs, "accuracy").axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == [*runs, *sorted(NAMES)]
    handle = dict(zip(texts, axes.get_legend().get_lines(), strict=True))
    assert color == {name: handle[name].get_color() for name in "bc"}
    drawn = [(line.get_color(), line.get_linestyle()) for line in axes.lines if len(line.get_xdata())]
    expected = [
        (handle[run].get_color(), handle[name].get_linestyle())
        for run, history in runs.items()
        for name in sorted(history.sets)
    ]
    assert drawn == expected and len(set(drawn)) == 9


@pytest.mark.parametrize("panel", ["loss", "accuracy"])
def test_the_legend_of_many_runs_takes_no_height_from_the_curves(panel):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_curve({f"run {number}": history() for number in range(20)}, panel, width=7.5)
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    assert axes.get_window_extent().height > legend.height
    assert figure.bbox.y0 <= legend.y0 and legend.y1 <= figure.bbox.y1
    assert len({line.get_color() for line in axes.get_legend().get_lines()[:20]}) == 20


def test_the_learning_rate_test_is_drawn_as_far_as_it_came_with_a_line_at_the_chosen_rate():
    (axes,) = draw_range_test(RangeTest(rates=[0.01, 0.1, 1.0], losses=[3.0, 2.0], lr=0.05)).axes
    curve, chosen = axes.lines
    assert list(curve.get_xdata()) == [0.01, 0.1] and list(curve.get_ydata()) == [3.0, 2.0]
    assert list(chosen.get_xdata()) == [0.05, 0.05]
