"""Curves of runs: labelled, and without overlaps."""

import pytest

from facetrain.run.report.curves import PANELS, draw_curve
from facetrain.run.report.history import History

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
    figure = draw_curve({"$first$": history(), "_sec\x1bond": history()}, "loss")
    texts = figure.axes[0].get_legend().get_texts()
    assert [text.get_text() for text in texts] == ["$first$", " _sec\\x1bond"]
    assert not any(text.get_parse_math() for text in texts)
