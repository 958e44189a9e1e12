"""The promises of docs/checkpoints.md, each with the test that holds it. The last five rows are tested here.

| promise | test |
|---|---|
| saved at intervals and at the end, continued on any number of processes | runs/test_training |
| saved when asked to stop, the same results as without the stop | runs/test_single_process, runs/test_lost_ranks |
| `--checkpoint STEP`; newer ones are kept as `left_step_…` | unit/run/test_run_identity, unit/checkpoint/test_mirror |
| `train --resume`; a finished run is left as it is | runs/test_train_again |
| a resume that is refused changes nothing | runs/test_training, runs/test_mirror |
| edits of config.yaml, other data, other versions of packages | unit/run/test_run_identity, runs/test_choices |
| the file of `model.init_from` is not needed anymore | unit/run/test_run_identity |
| one process at a time | unit/run/test_lock, runs/test_two_at_once |
| checkpoints of another run, and renamed ones | unit/run/test_run_identity |
| the mirror: complete or absent, lost uploads, lost disks | unit/checkpoint/test_mirror, runs/test_mirror |
| complete or absent on the disk, whatever fails and whenever | runs/test_power_cut, unit/checkpoint/test_checkpoint |
| a full or read-only disk: the run goes on, the last save fails it | runs/test_full_disk, ranks/test_checkpoint |
| a disk that cannot hold a checkpoint is refused first | runs/test_full_disk, unit/run/test_start_checks |
| the newest ones and the best one are kept | unit/checkpoint/test_checkpoint |
| loading runs no code, damage is found by checksums | unit/checkpoint/test_damaged_checkpoints |
| damage: no older one in silence, the next command is named | unit/run/test_run_identity |
| a single process that fails commits the checkpoint that it is saving | here |
| the model file of a finished run is read, with a warning of damage beside it | here |
| the programs that read a checkpoint run | here |
| the list of files | here |
| the sizes of checkpoints | here |
"""

import re
import shutil
from pathlib import Path

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.commit import complete_steps
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import load_config
from facetrain.distributed import collectives
from facetrain.errors import RunError
from facetrain.models.embedding_model import open_model
from facetrain.run.folder.lock_file import Holder
from facetrain.run.request import as_override
from tests.support import training
from tests.support.ranks import run_ranks
from tests.support.snapshots import snapshot

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """A finished run with its model file."""
    folder = tmp_path_factory.mktemp("promises")
    config = training.write_tiny_config(
        folder, dataset, train={"max_steps": 2}, checkpoint={"every_steps": 2}
    )
    assert training.train(load_config(config), folder / "quickstart") == 0
    return folder / "quickstart"


@pytest.mark.parametrize(
    "damage",
    [
        lambda checkpoint: (checkpoint / "manifest.json").write_text("{"),
        lambda checkpoint: next(checkpoint.glob("rows_*")).unlink(),
        lambda checkpoint: (checkpoint / "replicated.safetensors").write_bytes(b"short"),
    ],
)
def test_the_model_of_a_finished_run_opens_with_a_warning_of_a_damaged_checkpoint(
    finished, tmp_path, damage, capfd
):
    run = shutil.copytree(finished, tmp_path / "run")
    open_model(run, torch.device("cpu"))
    assert "warning" not in capfd.readouterr().err
    damage(run / "checkpoints" / "step_00000002")
    open_model(run, torch.device("cpu"))
    assert "step_00000002" in capfd.readouterr().err


def save_on_two_ranks(folder):
    writer = CheckpointWriter(folder, keep=1)
    writer.save(snapshot(2000, rank=collectives.rank(), world_size=2))
    return writer.finish().failure


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of the checkpoints of a run on two ranks, at step 2,000."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    assert run_ranks(2, save_on_two_ranks, folder) == ["", ""]
    return folder


@pytest.mark.slow
def test_the_programs_of_the_page_read_a_checkpoint(saved, finished, monkeypatch):
    own, library = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(finished.parent)
    names = dict[str, object]()
    # The page reads the first 1,000 classes; this run has fewer.
    exec(own.replace("runs/", "").replace("1000", "3"), names)
    assert names["centers"].shape == (3, 8) and "conv1.weight" in names["backbone"]
    monkeypatch.chdir(saved)
    exec(library, names)
    assert len(names["first"]) == 6, "of eleven classes, rank 0 has six"


@pytest.mark.slow
def test_a_checkpoint_has_the_files_of_the_list(saved):
    block = PAGE.split("## Files\n")[1].split("With a [head")[0]
    listed = re.findall(r"^ +(\S+)", block, re.MULTILINE)
    found = {path.name + "/" * path.is_dir() for path in saved.rglob("*")}
    assert found == set(listed) - {"checkpoints/"}
    assert (saved / "latest").read_text().strip() == "step_00002000"


ENDS = """
from pathlib import Path


def end(image, key, *, folder, lock=""):
    if any(Path(folder).glob("checkpoints/.step_*.tmp-*")):
        if lock:
            Path(folder, "run.lock").write_text(lock)
        raise MemoryError("no more")
    return image
"""


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_single_process_that_fails_keeps_the_checkpoint_that_it_saves_unless_another_one_has_the_run(
    finished, tmp_path, monkeypatch, taken_over
):
    (tmp_path / f"ends_{taken_over}.py").write_text(ENDS)
    monkeypatch.syspath_prepend(tmp_path)
    other = Holder.of_this_process(()).dump().decode()
    options = {"folder": str(tmp_path / "run")} | ({"lock": other} if taken_over else {})
    own = {"type": f"ends_{taken_over}:end", "options": options}
    changes = [as_override("data.augment.own", [own]), "train.max_steps=4"]
    with pytest.raises(RunError, match="too little memory"):
        training.train(load_config(finished.parent / "tiny.yaml", changes), tmp_path / "run")
    assert complete_steps(tmp_path / "run" / "checkpoints") == ([] if taken_over else [2])


def test_the_sizes_of_the_table_are_those_of_weights_and_momentum():
    table = PAGE.split("## Disk space")[1].split("Plan space")[0]
    lines = re.findall(
        r"^\| .*, (r\d+) \| ([\d,]+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB", table, re.MULTILINE
    )
    assert len(lines) == 3
    for name, identities, *given in lines:
        with torch.device("meta"):
            network = build_backbone(name=name, embedding_size=512, image_size=112)
        backbone = 8 * sum(weight.numel() for weight in network.parameters()) / 1e9
        centers = 8 * 512 * int(identities.replace(",", "")) / 1e9
        assert [float(size) for size in given] == pytest.approx(
            [backbone, centers, backbone + centers], abs=0.0051
        )
