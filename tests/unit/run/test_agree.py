"""Agreement of two hosts on a run, here threads that share a store."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from torch.distributed import HashStore

from facetrain.config.loading import build_config
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous
from facetrain.errors import DataError, FacetrainError, RunError, UsageError
from facetrain.remote.download import pinned
from facetrain.run.agree import _bring_disk_to, agree
from facetrain.run.compare_hosts import open_same_data
from facetrain.run.folder.data_digests import digest_inputs
from facetrain.run.folder.hosts import Hosts
from facetrain.run.folder.lease import Lease
from facetrain.run.parts.open_data import open_data
from facetrain.run.request import TrainRequest
from facetrain.run.run_plan import RunPlan

CONFIG = "run: {dir: RUNS}\ndata: {train: no_such_folder}\neval: {targets: []}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Folder of a run whose data is missing, which ends every agreement on it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for path in (folder / "config.yaml", tmp_path / "config.yaml"):
        path.write_text(CONFIG.replace("RUNS", str(tmp_path / "runs")))
    return folder


def outcomes(*requests):
    """Let one rank on each host agree on its request; return the errors with which they end."""
    store, places = HashStore(), [f"host{number}" for number in range(len(requests))]

    def be_a_rank(number, request):
        known = Rendezvous(store, number, "id", places, "127.0.0.1", 1, 1)
        ranks = Ranks(number, 0, len(places), 1, "agent", rendezvous=known)
        with Lease() as lease, pytest.raises(FacetrainError) as ended:
            agree(ranks, request, lease, pinned)
        return ended.value

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(be_a_rank, range(len(requests)), requests))


def resume(**options):
    return TrainRequest(command="resume", **{"run_dir": "run", **options})


def train(**options):
    return TrainRequest(**{"config": "config.yaml", "run_dir": "new", **options})


def test_a_request_for_what_no_rank_knows_is_refused():
    with pytest.raises(ValidationError, match="alow_code"):
        train(alow_code=True)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (resume(overrides=("seed=1",)), resume(overrides=("seed=2",)), "seed is 2, not 1"),
        (resume(), resume(overrides=("seed=2",)), "seed is 2, not absent"),
        (resume(), resume(checkpoint=4), "--checkpoint is 4, not absent"),
        (resume(), train(resume_existing=True), 'command is "train", not "resume"'),
        (resume(), resume(run_dir="other"), "the run folder is "),
        (train(), train(run_dir="other"), "the run folder is "),
        (train(choose=("lr",)), train(), "--lr find is false, not true"),
        (train(), train(overrides=("optim.lr=0.5",)), "config.yaml: optim.lr is 0.5, not "),
    ],
)  # fmt: skip
def test_hosts_that_are_asked_for_different_things_end_with_the_option_that_differs(
    run, first, second, words
):
    for error in outcomes(first, second):
        assert type(error) is UsageError, "no host starts again"
        assert words in str(error) and "rank 1 on host1: " in str(error), error
        assert str(error).endswith("as for rank 0 on host0; give the same config and options on all hosts")


def test_hosts_that_are_asked_for_the_same_infinity_do_not_differ(run):
    # `data` is missing: the first error after the comparison of the commands.
    values = {
        "data": {"train": "no_such_folder"},
        "model": {"backbone": "own:network", "options": {"clip": float("inf")}},
        "eval": {"targets": []},
    }
    errors = outcomes(*[train(config=values, allow_code=True)] * 2)
    assert "no_such_folder" in str(errors[0])


def test_hosts_with_other_versions_of_a_package_end_with_its_name(run, monkeypatch):
    monkeypatch.setattr("facetrain.run.run_claim.software_of_host", lambda: {"numpy": "2.2", "torch": "2.13"})
    monkeypatch.setattr(
        "facetrain.run.compare_hosts.software_of_host", lambda: {"numpy": "2.2", "torch": "2.12"}
    )
    for error in outcomes(train(), train()):
        assert type(error) is UsageError and "host1: torch is 2.12, and rank 0 on host0 has 2.13" in str(
            error
        )


@pytest.mark.parametrize("command", [resume, train], ids=lambda command: command.__name__)
def test_a_host_that_cannot_write_its_own_folder_ends_all_with_one_line(run, monkeypatch, command):
    faults = iter(["", "Read-only file system"])  # of the leader, and of the other host
    monkeypatch.setattr("facetrain.run.folder.claim.creation_fault", lambda path: next(faults))
    monkeypatch.setattr("facetrain.run.agree.owns_folder", lambda *_, **__: True)
    monkeypatch.setattr("facetrain.run.asked_config._is_behind", lambda *_: False)  # there is no such store
    errors = outcomes(*[command(overrides=("checkpoint.mirror=s3://bucket/runs",))] * 2)
    assert all("host1" in str(error) and "Read-only file system; " in str(error) for error in errors)


def test_a_host_with_a_folder_of_its_own_is_refused_without_a_mirror_before_it_creates_one(run, monkeypatch):
    monkeypatch.setattr("facetrain.run.agree.owns_folder", lambda *_, **__: True)
    for error in outcomes(resume(), resume()):
        assert type(error) is UsageError and "does not share the run folder" in str(error)


def test_a_host_that_joins_with_another_command_does_not_end_a_run_that_has_trained(run):
    (run / "environment.json").write_text('{"launchers": ["agent"]}')
    first, second = outcomes(resume(), resume(checkpoint=4))
    assert type(first) is RunError and type(second) is UsageError, "an agent restarts after the former"


@pytest.mark.parametrize(
    ("launchers", "code"), [([], 2), (["agent"], 1)], ids=["new run", "run that has trained"]
)
def test_data_that_a_run_could_read_before_end_it_as_a_failure_because_they_may_come_back(
    run, launchers, code
):
    Path("new").mkdir()
    Path("new/environment.json").write_text(json.dumps({"launchers": launchers}))
    for error in outcomes(train(), train()):
        assert type(error) is DataError and "no_such_folder" in str(error)
        assert error.exit_code == code


@pytest.mark.parametrize(
    ("make", "found"),
    [(resume, "contains no checkpoint"), (train, "no_such_folder")],
    ids=["resume", "train"],
)
def test_hosts_may_name_the_run_folder_in_other_ways(run, make, found):
    absolute = str(Path(make().run_dir).absolute())
    for error in outcomes(make(), make(run_dir=absolute)):
        assert found in str(error), "they agree on the command, and then find no data"


def test_a_rank_that_opens_an_image_folder_after_it_has_changed_ends_the_run(tmp_path):
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
    config = build_config({"data": {"train": str(tmp_path)}, "eval": {"targets": []}}, "x")
    data = open_data(config)
    plan = SimpleNamespace(inputs=digest_inputs(config, data.source, data.sets), weights={})
    second = Ranks(1, 1, 2, 2)
    assert open_same_data(second, plan, config).source.num_classes == 2
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    with pytest.raises(UsageError, match="was changed while the run opened it"):
        open_same_data(second, plan, config)


MIRRORED = {"data": {"train": "x"}, "checkpoint": {"mirror": "s3://bucket/runs"}}


def test_a_host_whose_disk_has_another_run_of_the_name_leaves_it_alone(tmp_path):
    config = build_config(MIRRORED, "x")
    plan = RunPlan(
        request=TrainRequest(), config=config, folder=str(tmp_path), run_id="a" * 16, step=2, inputs={}
    )
    (tmp_path / "run_id.txt").write_text("b" * 16)
    unfinished = tmp_path / "checkpoints" / ".step_00000004.0123"
    unfinished.mkdir(parents=True)
    with pytest.raises(UsageError, match=f"another run .id {'b' * 16}. than on the host of rank 0"):
        _bring_disk_to(plan, config, Ranks(1, 0, 2, 1, "agent"), Hosts())
    assert unfinished.is_dir()


def bring_empty_run_to(folder, *, restarted):
    """Bring the disk of a host to a run without a checkpoint, as its mirror has it."""
    config = build_config(MIRRORED, "x")
    plan = RunPlan(
        request=TrainRequest(), config=config, folder=str(folder), run_id="a", restarted=restarted, inputs={}
    )
    _bring_disk_to(plan, config, Ranks(0, 0, 1, 1, "agent"), Hosts())


def test_a_job_without_a_whole_checkpoint_says_that_it_begins_again_and_where_the_parts_are(tmp_path, capsys):
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    bring_empty_run_to(tmp_path, restarted=True)
    assert (tmp_path / "checkpoints" / "left_step_00000002").is_dir()
    message = capsys.readouterr().err
    assert "warning: s3://bucket/runs: has no checkpoint of this run" in message
    assert f"{tmp_path}/checkpoints as left_step_00000002" in message


def test_a_new_run_replaces_nothing_of_another_run_on_the_disk_of_a_host(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="has the results of a finished run"):
        bring_empty_run_to(tmp_path, restarted=False)
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    with pytest.raises(UsageError, match="already holds a run, at step 2"):
        bring_empty_run_to(tmp_path, restarted=False)
