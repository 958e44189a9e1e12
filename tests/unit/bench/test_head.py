import pytest

from facetrain.bench.head import measure_head_steps
from facetrain.bench.workloads import HeadWorkload
from facetrain.errors import RunError, UsageError


def test_a_disk_where_no_folder_can_be_made_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="file/disk: Not a directory; name a folder"):
        measure_head_steps(["head_sampled_1pct_disk"], HeadWorkload(1000, disk=tmp_path / "file" / "disk"))


def test_a_variant_that_fails_is_named_with_the_reason():
    with pytest.raises(
        RunError, match=r"variant head_fp32 with 10 identities failed: .*Error: .*; if memory"
    ):
        measure_head_steps(["head_fp32"], HeadWorkload(10, batch_size=4, embedding_size=8, device="tpu"))
