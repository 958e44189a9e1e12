"""Options that have no effect together with the others of a command line are refused, and not ignored."""

import pytest

from facetrain.errors import UsageError
from tests.support.command import refusal


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval --scores a.csv --device cpu", "--device has no effect on a.csv, which is not a MODEL; remove it"),
        ("eval --scores a.csv --no-flip", "--no-flip has no effect on a.csv, which is not a MODEL; remove it"),
        ("eval --scores a.csv --flip", "--flip has no effect on a.csv, which is not a MODEL; remove it"),
        ("eval --scores a.csv --batch-size 256", "--batch-size has no effect on a.csv, which is not"),
        ("eval --scores a.csv --gallery-model m", "--gallery-model has no effect on a.csv, which is not a MODEL"),
        ("eval --scores a.csv --data-dir c", "--data-dir has no effect on a.csv, which is"),
        ("search a.npz b.parquet --model m", "--model has no effect on files of embeddings"),
        ("export m --format onnx --output a.onnx --data-dir c", "--data-dir has no effect without --target"),
        ("data clean faces --apply a.json --device cpu", "--device has no effect with --apply; remove it"),
        ("data clean m faces --yes", "--yes has no effect without --output; remove it"),
        ("data pack faces --output a --images b", "--images has no effect on faces, which is not a list file"),
        ("data pairs list.txt --images a --output b.bin --count 600", "--count has no effect on list.txt, which"),
        ("data pairs faces --output b.bin --image-size 96", "--image-size has no effect on faces: only a pair list"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(command, message):
    error = refusal(*command.split())
    assert isinstance(error, UsageError) and str(error).startswith(message)


@pytest.mark.parametrize(
    "command",
    [
        "eval --scores a.csv --seed 1",
        "search photos b.npz --model m --device cpu",
        "data clean faces --apply a.json --workers 1 --output out",
        "data pack list.txt --output a --images b",
        "data pairs faces --output b.bin --count 20 --seed 1",
    ],
)
def test_an_option_with_an_effect_is_taken(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "has no effect" not in str(refusal(*command.split())), (
        "it is refused because the files are missing"
    )


ELASTIC = {"TORCHELASTIC_RUN_ID": "1"}
OTHER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
CONFIG = "--config quickstart"


@pytest.mark.parametrize(
    ("variables", "command", "message"),
    [
        (ELASTIC, f"train {CONFIG} --nproc-per-node 8", "--nproc-per-node has no effect under torchrun, which starts"),
        (ELASTIC, f"train {CONFIG} --nproc-per-node auto", "--nproc-per-node has no effect under torchrun"),
        (ELASTIC, f"train {CONFIG} --nnodes 1:2", "--nnodes has no effect under torchrun"),
        (ELASTIC, f"train {CONFIG} --rdzv-endpoint host:1", "--rdzv-endpoint has no effect under torchrun"),
        (ELASTIC, f"train {CONFIG} --max-restarts 3", "--max-restarts has no effect under torchrun"),
        (ELASTIC, "bench train --nproc-per-node 2", "--nproc-per-node has no effect under torchrun"),
        (ELASTIC, "resume . --max-restarts 3", "--max-restarts has no effect"),
        (OTHER, f"train {CONFIG} --nnodes 2", "--nnodes has no effect with RANK, WORLD_SIZE and MASTER_ADDR in the"),
    ],
)  # fmt: skip
def test_a_launch_option_is_refused_if_another_launcher_has_started_the_process(
    command, message, variables, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("data: {train: faces}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = refusal(*command.split())
    assert isinstance(error, UsageError) and str(error).startswith(message)
