import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from facetrain.cli.app import app
from facetrain.cli.plan import _counted, _lines, _memory_savers, _sizes
from facetrain.config.loading import build_config
from facetrain.errors import DataError
from facetrain.plan.forecast import Forecast, fewest_gpus, forecast, largest_batch
from tests.support.command import ROOT, facetrain, refusal
from tests.support.datasets import write_records
from tests.unit.plan.helpers import SMALL_MODEL, small_config

CONFIG = ROOT / "configs" / "wf42m_pfc02_r100.yaml"
FEW_BLOCKS = ("--set", "model.backbone=r18")  # 8 blocks are counted sooner than the 49 of r100
SMALLEST = {"backbone": "iresnet", "layers": [1] * 4, "widths": [16, 16, 32, 32], "embedding_size": 32}
TINY = f"model: {json.dumps(SMALLEST)}\n"
AS_TINY = ("--set", f"model={json.dumps(SMALLEST)}")


def plan(*arguments):
    """Return the exit code, the output and the messages of `facetrain plan` in this process.

    It keeps the costs of a network, and imports torch once.
    """
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as messages:
        code = app(["plan", *map(str, arguments)], standalone_mode=False)
    return code or 0, output.getvalue(), messages.getvalue()


@pytest.mark.slow
def test_the_json_of_a_plan_has_memory_and_limits():
    done = facetrain("plan", "--config", CONFIG, "--gpus", 8, "--memory", 80, *FEW_BLOCKS, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] and report["fewest_gpus"] == 1
    assert report["total_bytes"] == sum(report["parts_bytes"].values())
    assert report["largest_batch"] > report["batch"] == 128


@pytest.mark.slow
def test_for_a_run_that_does_not_fit_the_keys_that_save_memory_are_printed():
    small = (*AS_TINY, "--set", "train.batch_size=8", "--set", "eval.targets=[]")
    code, printed, messages = plan("--config", CONFIG, "--memory", 1.7, "--identities", 20_000_000, *small)
    assert code == 1 and not messages, messages
    assert "does not fit" in printed and "head.momentum_dtype" in printed


@pytest.mark.parametrize(("placement", "place"), [("host", "in the host's memory"), ("disk", "on the disk")])
def test_the_place_of_centers_that_are_not_on_the_gpu_is_printed(monkeypatch, placement, place):
    for search in ("largest_batch", "fewest_gpus"):
        monkeypatch.setattr(f"facetrain.plan.forecast.{search}", lambda *_: 1)
    config = small_config(head={"placement": placement, "sample_rate": 0.1})
    lines = _lines(_counted(config, 100_000, 1, 80 << 30))
    assert any(line.endswith(f" GiB per GPU {place}.") for line in lines)


def test_no_part_of_a_small_run_takes_nothing(monkeypatch):
    for search in ("largest_batch", "fewest_gpus"):
        monkeypatch.setattr(f"facetrain.plan.forecast.{search}", lambda *_: 1)
    lines = _lines(_counted(small_config(), 100, 1, 80 << 30))
    assert not [line for line in lines if " 0.00 GiB" in line], lines
    measured = {"device": "cpu", "identities": 100, "images_per_s": 1e4, "peak_bytes": 3 << 20}
    lines = _lines(measured | {"images": 100, "seconds": 0.01})
    assert lines[0].endswith("at most 0.00293 GiB") and "images: 0:00:01," in lines[1], lines


@pytest.mark.parametrize(
    ("identities", "batch", "saves"),
    [pytest.param(1000, 4096, True, marks=pytest.mark.slow), (2_200_000, 8, False)],
)
def test_half_of_the_batch_in_twice_the_micro_batches_is_advised_only_where_it_saves_memory(
    identities, batch, saves, tmp_path
):
    sets = "data: {train: none, image_size: 32}\neval: {targets: []}\n"
    (tmp_path / "run.yaml").write_text(f"{sets}{TINY}train: {{batch_size: {batch}}}\n")
    code, printed, _ = plan("--config", tmp_path / "run.yaml", "--memory", 1, "--identities", identities)
    assert code == 1 and ("optim.accumulate" in printed) == saves


HALF_BATCH = "half of train.batch_size with twice optim.accumulate"


@pytest.mark.parametrize(
    ("sections", "saves"),
    [
        # It refuses int8. With so short rows, the copies of an update need more than other tables save.
        ({"optim": {"name": "adamw"}}, [HALF_BATCH]),
        ({"optim": {"name": "adamw"}, "train": {"global_batch_size": 4}}, ["twice optim.accumulate"]),
        (
            {"head": {"momentum_dtype": "bfloat16", "weight_dtype": "bfloat16"}},
            [HALF_BATCH, "head.momentum_dtype: int8", "head.placement: host"],
        ),
        ({"head": {"placement": "host"}}, []),
    ],
)
def test_only_what_makes_the_forecast_of_this_run_smaller_is_advised(sections, saves):
    config = small_config(model=SMALL_MODEL | {"checkpoint_activations": True}, **sections)
    needed = forecast(config, 100_001, 1)
    assert _memory_savers(config, 100_001, 1, needed) == [*saves, "twice as many GPUs"]


def test_a_saver_that_the_network_cannot_have_is_left_out():
    pytest.importorskip("timm", reason="timm is not installed")
    # With batch norms, it has no model.checkpoint_activations.
    config = small_config(model={"backbone": "timm/resnet10t"})
    savers = _memory_savers(config, 100, 1, forecast(config, 100, 1))
    assert "head.placement: host" in savers and "model.checkpoint_activations: true" not in savers


@pytest.mark.parametrize(
    ("global_batch", "micro_batches", "fewest"),
    [(96, 1, 48), (128, 1, 64), (None, 1, 64), (32, 1, None), (64, 1, None), (5040, 1, 35), (5040, 16, 35)],
)
def test_the_fewest_gpus_divide_the_global_batch(global_batch, micro_batches, fewest, monkeypatch):
    tried = []

    def needed(config, classes, gpus):
        tried.append(gpus)
        return SimpleNamespace(fits=lambda memory: gpus > 32)

    monkeypatch.setattr("facetrain.plan.forecast.forecast", needed)
    values = {"train": {"global_batch_size": global_batch}, "optim": {"accumulate": micro_batches}}
    config = build_config({"data": {"train": "x"}, **values}, "test")
    assert fewest_gpus(config, 10_000, 1) == fewest
    assert len(tried) <= 7, "a forecast takes seconds"
    assert fewest_gpus(config, 32, 1) is None, "a GPU has a class or more"


@pytest.mark.parametrize(("global_batch", "fitting", "fewest"), [(None, {4, 8}, 4), (128, {1}, 1)])
def test_the_fewest_gpus_are_found_where_more_of_them_need_more(global_batch, fitting, fewest, monkeypatch):
    def needed(config, classes, gpus):
        return SimpleNamespace(fits=lambda memory: gpus in fitting)

    monkeypatch.setattr("facetrain.plan.forecast.forecast", needed)
    config = build_config({"data": {"train": "x"}, "train": {"global_batch_size": global_batch}}, "test")
    assert fewest_gpus(config, 10_000, 1) == fewest


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_that_is_a_little_larger_does_not():
    # With few images a chunk has many classes, and few chunks are counted.
    sections = {
        "data": {"train": "none"},
        "model": SMALLEST,
        "train": {"batch_size": 8},
        "eval": {"targets": []},
    }
    config, memory = build_config(sections, "test"), 1 << 30
    batch = largest_batch(config, 1000, 2, memory)
    assert forecast(config, 1000, 2, batch=batch).fits(memory)
    assert not forecast(config, 1000, 2, batch=round(1.05 * batch)).fits(memory)
    assert largest_batch(config, 10**8, 2, memory) == 0
    fewest = fewest_gpus(config, 10**8, memory)
    assert forecast(config, 10**8, fewest).fits(memory)
    assert not forecast(config, 10**8, fewest // 2).fits(memory)


@pytest.mark.parametrize("verification", [0, 20_000])
@pytest.mark.parametrize("images", [1, 2, 3, 40, 190, 250, 3000, 1 << 20])
def test_the_largest_batch_is_found_also_where_verification_leaves_little(images, verification, monkeypatch):
    def needed(config, num_classes, gpus, batch):
        return Forecast(batch, {"all": max(verification, 1000 + 100 * batch)}, elsewhere=0, checkpoint_copy=0)

    monkeypatch.setattr("facetrain.plan.forecast.forecast", needed)
    # So small that verification needs nearly the whole memory, if it needs more than these images.
    usable = max(verification + 20, 1000 + 100 * images)
    most = min((usable - 1000) // 100, 1 << 16)
    found = largest_batch(None, 10, 1, round(usable / 0.9) + 1)
    assert found == 0 if most < 2 else most - max(1, most // 64) < found <= most
    assert largest_batch(None, 10, 1, verification) == 0


def test_without_a_memory_the_steps_of_this_machine_are_measured(tmp_path):
    write_records(tmp_path / "data", [n // 4 for n in range(40)], size=32)
    text = f"data: {{train: {tmp_path}/data, image_size: 32}}\ntrain: {{batch_size: 8, epochs: 3}}\n{TINY}"
    (tmp_path / "own.yaml").write_text(text)
    code, printed, _ = plan("--config", tmp_path / "own.yaml", "--set", "train.device=cpu", "--json")
    report = json.loads(printed)
    assert code == 0 and (report["device"], report["identities"], report["images"]) == ("cpu", 10, 3 * 40)
    assert report["seconds"] == pytest.approx(3 * 40 / report["images_per_s"])
    assert 0.1 * 2**30 < report["peak_bytes"] < 8 * 2**30


def test_the_images_of_a_mixture_count_with_their_weights_where_the_data_is_there(tmp_path):
    write_records(tmp_path / "data", [n // 4 for n in range(40)], size=32)
    mixture = tmp_path / "mixture.yaml"
    given = {"num_classes": 10, "num_images": 40}
    for there, images in ((False, 40), (True, 160)):
        if there:
            mixture.write_text("datasets: [{path: data, weight: 4}]\n")
        config = build_config({"data": {"train": str(mixture), **given}}, "test")
        assert _sizes(config, counts_images=True) == (10, images)
    config = build_config({"data": {"train": "s3://bucket/set", **given}}, "test")
    assert _sizes(config, counts_images=True) == (10, 40), "this machine may have no access to it"


def test_a_mixture_of_datasets_of_another_machine_is_planned_with_the_numbers_of_the_config(tmp_path, capsys):
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("datasets: [{path: /elsewhere/faces}]\n")
    given = {"train": str(mixture), "num_classes": 10}
    config = build_config({"data": {**given, "num_images": 40}}, "test")
    assert _sizes(config, counts_images=True) == (10, 40)
    assert "/elsewhere/faces: no such folder or file; counting with data.num" in capsys.readouterr().err
    with pytest.raises(DataError, match="/elsewhere/faces: no such folder or file"):
        _sizes(build_config({"data": given}, "test"), counts_images=True)


NOT_DIVIDED = ("--gpus", 3, "--set", "train.batch_size=null", "--set", "train.global_batch_size=1024")
NO_PARAMETER = "model.lr_factors: no parameter's name starts with 'neck'; names start with one of: "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*NOT_DIVIDED, "--memory", 80), "cannot be divided among 3 ranks"),
        (("--memory", 80, *AS_TINY, "--set", "model.lr_factors={neck: 0.1}"), NO_PARAMETER),
        (("--gpus", 8), "also give --memory"),
        (
            ("--set", "data.num_classes=null", "--set", "data.train=/none"),
            "/none is not on this machine; give the number with --identities",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(options, message):
    error = refusal("plan", "--config", CONFIG, *options)
    assert error.exit_code == 2 and message in str(error) and "\n" not in str(error)


@pytest.mark.slow
def test_the_plan_of_a_run_in_stages_takes_the_memory_of_the_largest(tmp_path):
    text = "data: {train: none, image_size: 32, num_classes: 1000, num_images: 12800}\n" + TINY
    text += "train: {batch_size: 64, epochs: 4, stages: [{until_epoch: 3, batch_size: 128}]}\n"
    text += "eval: {targets: []}\n"
    (tmp_path / "run.yaml").write_text(text)

    def planned(*options):
        return json.loads(plan("--config", tmp_path / "run.yaml", "--memory", 80, "--json", *options)[1])

    staged, large = planned(), planned("--set", "train={batch_size: 128, epochs: 3, stages: []}")
    assert staged["batch"] == 128 and staged["parts_bytes"] == large["parts_bytes"]
