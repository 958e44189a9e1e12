import os

import pytest

from facetrain import cpu_cores


@pytest.fixture
def affinity():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_pinned_process_uses_the_cores_it_is_pinned_to(affinity):
    os.sched_setaffinity(0, {min(affinity)})
    assert cpu_cores.usable_cores() == 1


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", None), ("damaged", None)]
)
def test_container_quota_limits_the_cores(tmp_path, monkeypatch, affinity, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu_cores, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    assert cpu_cores.usable_cores() == min(cores or len(affinity), len(affinity))


def test_ranks_share_the_cores_that_they_are_bound_to(monkeypatch):
    monkeypatch.setattr(cpu_cores, "_cgroup_cores", lambda: None)
    nodes = [set(range(48)), set(range(48, 96))]
    own, *others = [nodes[rank // 4] for rank in range(8)]
    assert cpu_cores.share_of_cores(own, others) == 12, "half the cores, for four of eight ranks"
    everywhere = set(range(96))
    assert cpu_cores.share_of_cores(everywhere, [everywhere] * 7) == 12
    bound = [{0}, {1}, {2}, {3}]
    assert cpu_cores.share_of_cores(bound[0], bound[1:]) == 1
    assert cpu_cores.cores_of(bound) == 4, "a core each, as Slurm binds them by --cpus-per-task=1"
    assert cpu_cores.cores_of([{0, 1}] * 4) == 2
    monkeypatch.setattr(cpu_cores, "_cgroup_cores", lambda: 32)
    assert cpu_cores.cores_of([own, *others]) == 32
    assert cpu_cores.share_of_cores(own, others) == 4, "the quota is for all ranks of the container"
