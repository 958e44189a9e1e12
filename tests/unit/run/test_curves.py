"""Curves of a run: labelled, with the name of the run, and without overlaps."""

import pytest

from facetrain.run.report.curves import PANELS, draw_curves

NAMES = ("lfw", "cfp_fp", "agedb_30", "a_set_with_a_rather_long_name")


def records():
    for step in range(0, 2001, 100):
        yield {"step": step, "loss": 20 - step / 200, "lr": 0.1, "images_per_s": 900.0}
        if step % 500 == 0:
            yield {"step": step} | {f"{name}/accuracy": 0.5 + step / 4100 for name in NAMES}
    yield {"step": 2100, "loss": "nan", "lr": 0.1, "images_per_s": 900.0}


@pytest.mark.parametrize("panels", [PANELS[:2], PANELS])
def test_no_text_covers_a_curve_or_another_text(panels):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_curves(records(), "tiny_$x", panels)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    legends = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend()]
    labels = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
    boxes += legends + labels + [figure.axes[-1].xaxis.label.get_window_extent()]
    boxes.append(figure._suptitle.get_window_extent())
    assert len(legends) == 1
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "cut off at the side"
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_the_figure_names_the_run_its_axes_and_its_sets():
    figure = draw_curves(records(), "tiny_$x", PANELS)
    assert figure._suptitle.get_text() == "tiny_$x"
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss", "accuracy (%)", "learning rate", "images per second"]
    assert figure.axes[-1].get_xlabel() == "step"
    texts = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert texts == sorted(NAMES)
