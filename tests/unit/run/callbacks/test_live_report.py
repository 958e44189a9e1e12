"""Page of a run, written while it trains."""

import cv2
import numpy as np
import torch

from facetrain.data.images.decode import decode_rgb
from facetrain.run.callbacks import live_report
from facetrain.run.callbacks.live_report import LiveReport, write_first_batch
from facetrain.run.folder.run_state import Start, train_recorded
from facetrain.telemetry.log import logger
from tests.support.waiting import set_time


def test_the_page_follows_a_run_within_its_share_of_the_time(tmp_path, state, monkeypatch):
    (tmp_path / "config.yaml").write_text("data: {train: x}\n")
    (tmp_path / "environment.json").write_text("{}")
    now, written = 0.0, []

    def write(folder, output, history):
        nonlocal now
        now += 2.0
        written.append(now)
        real(folder, output, history)

    real = live_report.write_run_report
    monkeypatch.setattr(live_report, "write_run_report", write)
    set_time(monkeypatch, live_report.__name__, monotonic=lambda: now)
    page = LiveReport(tmp_path)

    def train():
        nonlocal now
        for _ in range(1000):
            page.update(state)
            now += 1.0
        return 0

    train_recorded(tmp_path, Start(step=0, ranks=1, device="cpu"), 1000, train)
    assert written == [2.0, 34.0, 436.0, 838.0], "the second page is early; 2 s are 0.5 % of 400 s"
    page.write()
    assert "finished" in (tmp_path / "report.html").read_text(), "the last page has the end of the run"


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, state, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    page = LiveReport(tmp_path / "moved away")
    page.update(state)
    page.update(state)
    assert caplog.text.count("not the folder of a run") == 1 and "training continues" in caplog.text
    caplog.clear()
    for name in ("config.yaml", "environment.json", "report.html"):
        (tmp_path / "moved away" / name).mkdir(parents=True)
    page.write()  # at the end of the run
    assert "not the folder of a run" in caplog.text and "training continues" not in caplog.text


def test_the_warning_of_a_page_does_not_name_an_option_that_training_lacks(
    tmp_path, state, caplog, monkeypatch
):
    monkeypatch.setattr(logger, "propagate", True)
    (tmp_path / "config.yaml").write_text("data: {train: x}\n")
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "report.html").mkdir()
    LiveReport(tmp_path).update(state)
    assert "report.html: Is a directory" in caplog.text and "--output" not in caplog.text


def test_the_first_batch_of_a_run_is_kept_as_the_network_gets_it(tmp_path):
    colors = torch.tensor([[-1.0, 0.0, 1.0], [1.0, -1.0, 0.2]])
    images = colors[:, :, None, None].expand(2, 3, 4, 4)
    write_first_batch(tmp_path, images)
    write_first_batch(tmp_path, -images)  # a resumed run
    sheet = decode_rgb((tmp_path / "augmented.png").read_bytes(), location="augmented.png")
    np.testing.assert_array_equal(sheet[0, [0, 4]], [[0, 128, 255], [255, 0, 153]])
    write_first_batch(tmp_path, torch.zeros(100, 3, 4, 4))
    assert cv2.imread(str(tmp_path / "augmented.png")).shape == (4, 8, 3)
