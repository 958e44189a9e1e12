import pytest
import torch

from facetrain.bench.formats import measure_formats


def test_each_format_is_read_into_batches_and_compared_with_the_decoder():
    report = measure_formats(None, images=4, rounds=1, device=torch.device("cpu"))
    formats = {name: row for name, row in report.items() if name not in ("cv2.imdecode", "zlib")}
    assert {"recordio", "image folder", "zip, stored", "tfrecord", "webdataset", "tar.gz"} <= formats.keys()
    decoder, zlib = report["cv2.imdecode"]["microseconds"], report["zlib"]["microseconds"]
    for row in formats.values():
        assert row["share_of_decoder"] == pytest.approx(decoder / row["microseconds"])
    deflated = formats["zip, deflated"]
    share = (decoder + zlib) / deflated["microseconds"]
    assert deflated["share_of_zlib_and_decoder"] == pytest.approx(share)
