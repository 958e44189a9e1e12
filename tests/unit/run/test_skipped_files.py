from types import SimpleNamespace

from facetrain.data.formats.image_folder import open_folder
from facetrain.run.opening import report_skipped_files
from tests.support.datasets import encoded_image


def test_a_run_on_a_folder_reports_and_lists_the_files_that_are_no_images(tmp_path):
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    (tmp_path / "photos" / "ann" / "1.png").write_bytes(encoded_image(0))
    (tmp_path / "photos" / "ann" / "film.mov").write_bytes(b"x")
    config = SimpleNamespace(data=SimpleNamespace(train="photos"))
    data = SimpleNamespace(source=open_folder(tmp_path / "photos"))
    run = SimpleNamespace(data=data, folder=tmp_path, config=config)
    messages = []
    report_skipped_files(run, messages.append)
    assert "left out 1 file of photos" in messages[0] and "ann/film.mov" in messages[0]
    assert "ann/film.mov,suffix," in (tmp_path / "skipped_files.csv").read_text()
