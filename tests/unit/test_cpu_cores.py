import os

import pytest

from facetrain import control_groups, cpu_cores


@pytest.fixture
def affinity():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_pinned_process_uses_the_cores_it_is_pinned_to(affinity):
    os.sched_setaffinity(0, {min(affinity)})
    assert cpu_cores.usable_cores() == 1


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/path/of/the/host", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "damaged"}, None),
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "300000 100000"}, 3),
        (
            "1:memory:/\n4:cpu,cpuacct:/job\n0::/",
            {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_a_container_or_job_limits_the_cores(own, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_cores.cores_of([set(range(8))]) == (cores or 8)


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
