"""Fine-tuning with people added and removed: each keeps the class center of its name."""

import pytest
import torch

import facetrain
from facetrain.checkpoint.load import Checkpoint
from tests.support.datasets import encoded_image


def write_people(folder, names):
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            (folder / name / f"{number}.png").write_bytes(encoded_image(number, 32))
    return folder


def values(data, folder, **more):
    return {
        "run": {"dir": str(folder)},
        "data": {"train": str(data), "image_size": 32, "workers": 0},
        "model": {"backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [4, 4, 4, 4], "embedding_size": 8},
        "optim": {"lr": 1e-9, "weight_decay": 0},
        "train": {"batch_size": 2, "max_steps": 1, "precision": "fp32", "device": "cpu"},
        "eval": {"targets": []},
        "log": {"report": False},
    } | more


@pytest.mark.slow
def test_a_new_person_who_sorts_first_does_not_move_the_centers_of_the_others(tmp_path, capfd):
    # Names that equal the numbers of the identities, as long as 10 does not sort before 2.
    first = write_people(tmp_path / "first", ["0", "1", "2"])
    second = write_people(tmp_path / "second", ["1", "10", "2"])
    old = facetrain.train(values(first, tmp_path), tmp_path / "old").folder
    start = values(second, tmp_path, head={"init_from": "extend"})
    start["model"] |= {"init_from": str(old)}
    new = facetrain.train(start, tmp_path / "new").folder
    before, after = (Checkpoint.open(folder).rows("weight", 0, 3) for folder in (old, new))
    torch.testing.assert_close(after[[0, 2]], before[[1, 2]])
    line = "class centers by name: of 2 of 3 identities; 1 new, 1 removed"
    assert line in capfd.readouterr().err
    names = Checkpoint.open(new).replicated("identities.")["names"].numpy().tobytes()
    assert names == b"1\n10\n2\n"
