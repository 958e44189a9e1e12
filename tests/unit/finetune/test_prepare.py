"""Preparation of a fine-tuning that continues an interrupted one."""

from contextlib import contextmanager

import pytest

from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.errors import UsageError
from facetrain.finetune.prepare import Request, prepare
from tests.support.models import write_model

PEOPLE, EACH = 12, 4


@contextmanager
def bar(title):
    yield lambda *_: None


class Interrupted(Exception):
    """What a user does at a line of the output."""


def interrupt(line):
    raise Interrupted(line)


@pytest.mark.parametrize(
    ("removed", "added"),
    [("3/2.jpg", None), (None, "3/9.jpg"), ("3/2.jpg", "5/0a.jpg"), ("3/2.jpg", "3/2.jpg")],
)
def test_a_fine_tuning_of_photos_that_have_changed_is_not_resumed(removed, added, tmp_path):
    photos = tmp_path / "photos"
    for person in range(PEOPLE):
        (photos / str(person)).mkdir(parents=True)
        for number in range(EACH):
            (photos / f"{person}/{number}.jpg").write_bytes(draw_jpeg(0, person, number, 32))
    write_model(tmp_path / "first.safetensors")
    request = Request(photos, tmp_path / "first.safetensors", tmp_path / "out")
    with pytest.raises(Interrupted, match="faces: 48 faces of 12 people"):
        prepare(request, None, interrupt, bar)

    resumed = Request(photos, request.model, request.output, resume=True)
    with pytest.raises(Interrupted, match="images of 10 people are held out"):
        prepare(resumed, None, interrupt, bar)
    if removed:
        (photos / removed).unlink()
    if added:
        (photos / added).write_bytes(draw_jpeg(0, 99, 0, 32))
    with pytest.raises(UsageError, match="was begun with other photos"):
        prepare(resumed, None, interrupt, bar)
