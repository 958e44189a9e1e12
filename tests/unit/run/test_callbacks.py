"""Callbacks of the training loop, each with the objects that a run gives it."""

import logging
import signal
import time

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.head_section import HeadConfig, MarginConfig
from facetrain.config.training_section import OptimConfig
from facetrain.data.augment import Augment
from facetrain.data.loader import Batch, Loader, LoaderSettings
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import build_sampler
from facetrain.distributed.stop_request import Stopped, StopRequest
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, ConfigError, SkippedError
from facetrain.head.margin_head import MarginHead
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import build_optimizer, parameter_groups
from facetrain.optim.stepper import Stepper
from facetrain.run.build_head import head_settings, margin_from_config, optimizer_settings
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.logging import Logging
from facetrain.telemetry.log import logger
from facetrain.telemetry.recorder import Recorder
from facetrain.training.loop import Agreement, Callbacks, Intervals, fit
from facetrain.training.loss_spikes import SpikeDetector
from facetrain.training.precision import InPrecision
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep
from facetrain.verify.pair_set import PairSet
from facetrain.verify.verification import verification_result
from facetrain.verify.verifier import Verifier
from tests.support.command import ROOT
from tests.support.datasets import encoded_image, write_records

CPU = torch.device("cpu")
BATCH, CLASSES, SIZE = 6, 4, 16


class Board:
    """Sink that keeps what is written and shown; showing images fails if it is broken."""

    def __init__(self, *, broken=False):
        self.written, self.shown, self._broken = [], [], broken

    def write(self, step, values):
        self.written.append((step, values))

    def show(self, step, images):
        if self._broken:
            raise RuntimeError("no space left for images")
        self.shown.append((step, set(images)))

    def close(self):
        pass


@pytest.fixture
def state():
    torch.manual_seed(0)
    options = {"layers": (1, 1, 1, 1), "widths": (4, 4, 4, 4), "embedding_size": 8, "image_size": SIZE}
    backbone = build_backbone("iresnet", **options)
    network = InPrecision(backbone, "fp32", CPU, memory_format=torch.contiguous_format)
    rules = {"momentum": 0.9, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    head = MarginHead(
        head_settings(HeadConfig()),
        optimizer_settings(OptimConfig()),
        margin_from_config(MarginConfig()),
        embedding_size=8,
        num_classes=CLASSES,
    )
    optimizer = build_optimizer(parameter_groups(backbone, {}), "sgd", **rules)
    scale = LossScale(CPU, enabled=False)
    stepper = Stepper(backbone, [optimizer], head, scale, schedule=lambda step: 0.01, clip_grad_norm=5.0)
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=CPU)
    return TrainState(world, network, head, stepper, SpikeDetector(5.0, CPU))


@pytest.fixture
def step(state):
    return TrainStep(state.network, Augment(0), max_skipped_steps=3)


@pytest.fixture
def loader(tmp_path):
    """Loader of four steps."""
    write_records(tmp_path / "data", [n // 6 for n in range(BATCH * CLASSES)], size=SIZE)
    source = open_dataset(tmp_path / "data")
    order = build_sampler(source, seed=0, global_batch_size=BATCH, mode="full")
    settings = LoaderSettings(local_batch_size=BATCH, workers=0, image_size=SIZE)
    loader = Loader(source, order, settings, rank=0, world_size=1, stop_step=4)
    yield loader
    loader.close()


@pytest.fixture
def pairs():
    images = [encoded_image(number, SIZE) for number in range(40)]
    return PairSet("lfw", images, np.arange(20) % 2 == 0)


def verifier_of(pairs, check_stop=None):
    return Verifier([pairs], image_size=SIZE, batch_size=8, device=CPU, workers=0, check_stop=check_stop)


def checkpointing_of(folder, board, lines, every_minutes=None):
    writer = CheckpointWriter(folder, keep=3, asynchronous=True, best_metric=None)
    recorder = Recorder(board=board)
    return Checkpointing(writer, recorder, {"model": {}}, lines.append, every_minutes=every_minutes)


def raise_stopped():
    raise Stopped


def test_a_verification_is_recorded_at_once_and_drawn_later(state, pairs):
    board = Board()
    evaluation = Evaluation(verifier_of(pairs), Recorder(board=board))
    state.step = 3
    evaluation.verify(state)
    assert board.written == [(3, state.metrics)] and not board.shown, (
        "the first step must not wait for figures"
    )
    evaluation.draw(state)
    evaluation.draw(state)
    assert board.shown == [(3, {"lfw/roc", "lfw/det", "lfw/scores", "lfw/discard", "lfw/folds"})]
    assert 0 <= state.metrics["lfw/accuracy"] <= 1
    assert "lfw/tar@1e-06" not in state.metrics, "20 pairs cannot measure this rate"


def test_two_verifications_before_a_drawing_are_both_drawn(state, pairs):
    board = Board()
    evaluation = Evaluation(verifier_of(pairs), Recorder(board=board))
    for state.step in (0, 1):
        evaluation.verify(state)
    evaluation.draw(state)
    assert [step for step, _ in board.shown] == [0, 1]


def test_a_drawing_that_fails_is_logged_and_does_not_end_the_run(state, pairs, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)  # an earlier run in this process may have switched it off
    evaluation = Evaluation(verifier_of(pairs), Recorder(board=Board(broken=True)))
    evaluation.verify(state)
    evaluation.draw(state)
    assert "figures of step 0 were not drawn" in caplog.text


def test_the_recorded_metrics_are_those_of_the_protocol(state, pairs):
    class Fixed:
        def __call__(self, model):
            embedding = np.random.default_rng(0).normal(size=(40, 8))
            self.result, _ = verification_result(embedding, embedding, pairs, replicates=0)
            return [("lfw", self.result)]

    verifier, board = Fixed(), Board()
    Evaluation(verifier, Recorder(board=board)).verify(state)
    assert state.metrics["lfw/accuracy"] == verifier.result.metrics["accuracy"]
    assert board.written == [(0, state.metrics)]


def test_an_interrupted_verification_is_marked_and_records_nothing(state, pairs):
    board = Board()
    evaluation = Evaluation(verifier_of(pairs, check_stop=raise_stopped), Recorder(board=board))
    evaluation.verify(state)
    assert state.unverified and not board.written and state.metrics == {}
    Evaluation(verifier_of(pairs), Recorder(board=board)).verify(state)
    assert not state.unverified and board.written


@pytest.mark.parametrize(
    ("metric", "measured"),
    [("cfp_fp/accuracy", "lfw/auc, .*lfw/accuracy"), ("lfw/tar@1e-06", "lfw/accuracy, ")],
)
def test_the_first_verification_must_measure_the_metric_of_the_best_checkpoint(
    state, pairs, metric, measured
):
    evaluation = Evaluation(verifier_of(pairs), Recorder(), best_metric=metric)
    with pytest.raises(ConfigError, match=f"^checkpoint.best_metric: {metric} is not measured; .*{measured}"):
        evaluation.verify(state)
    state.step = 1
    evaluation.verify(state)  # after a resume, days of training are worth more
    Evaluation(verifier_of(pairs), Recorder(), best_metric="lfw/accuracy").verify(state)


def test_a_metric_of_the_best_checkpoint_needs_a_verification_set(state):
    verifier = Verifier([], image_size=SIZE, batch_size=8, device=CPU, workers=0)
    with pytest.raises(ConfigError, match="measures no set: eval.targets is empty"):
        Evaluation(verifier, Recorder(), best_metric="lfw/accuracy").verify(state)


def test_a_checkpoint_is_committed_by_a_later_poll(state, tmp_path):
    lines, board = [], Board()
    checkpointing = checkpointing_of(tmp_path, board, lines)
    checkpointing.poll(state)  # allocates the memory for copies
    state.step = 1
    checkpointing.save(state)
    deadline = time.monotonic() + 30
    while checkpointing.last_saved is None and time.monotonic() < deadline:
        checkpointing.poll(state)
    assert checkpointing.last_saved == 1 and not lines and not board.written
    checkpointing.require_saved(state)
    assert Checkpoint.open(tmp_path).step == 1


class ChoiceAfterTwoSteps:
    """Trial that chooses compiled code after its second step."""

    steps = 0

    def begin_step(self):
        self.steps += 1

    def end_step(self):
        return "compiled" if self.steps == 2 else None


def test_the_chosen_execution_mode_is_part_of_the_checkpoint(state, loader, tmp_path):
    trial = ChoiceAfterTwoSteps()
    step = TrainStep(state.network, Augment(0), max_skipped_steps=3, trial=trial)
    for batches in loader:
        step(state, batches)
        state.step += 1
    assert trial.steps == 2, "the trial ends with its choice"
    checkpointing = checkpointing_of(tmp_path / "checkpoints", Board(), [])
    checkpointing.save(state)
    checkpointing.finish()
    state.execution_mode = None
    state.restore(Checkpoint.open(tmp_path / "checkpoints"))
    assert state.execution_mode == "compiled"


def test_a_checkpoint_that_cannot_be_written_is_reported_and_refused_as_the_last_one(state, tmp_path):
    (tmp_path / "file").touch()
    lines, board = [], Board()
    checkpointing = checkpointing_of(tmp_path / "file", board, lines)
    state.step = 2
    checkpointing.save(state)
    checkpointing.finish()
    assert board.written == [(2, {"save_failed": 1.0})]
    assert len(lines) == 1 and lines[0].startswith("warning: checkpoint of step 2 was not saved: rank 0: ")
    with pytest.raises(CheckpointError, match="the last checkpoint was not saved [(]rank 0: "):
        checkpointing.require_saved(state)


def test_a_checkpoint_is_overdue_after_the_given_minutes_until_one_begins(state, tmp_path):
    checkpointing = checkpointing_of(tmp_path, Board(), [], every_minutes=1e-6)
    time.sleep(0.001)
    assert checkpointing.is_overdue()
    patient = checkpointing_of(tmp_path, Board(), [])
    assert not patient.is_overdue()


def test_a_signal_is_agreed_on_and_shown_with_the_step(state):
    lines = []
    with StopRequest() as request:
        stopping = Stopping(request, lines.append)
        stopping.begin(save=True)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.agree(state) == Agreement(stop=False, save=True), (
            "what was known before the step counts"
        )
        assert stopping.signal == 0 and not lines
        stopping.begin(save=False)
        state.step, state.unverified = 7, True
        assert stopping.agree(state) == Agreement(stop=True, save=False)
    assert stopping.signal == signal.SIGTERM
    assert "SIGTERM received: saving step 7" in lines[0] and "`facetrain resume` will verify it" in lines[0]


def test_a_signal_that_interrupts_the_verification_after_a_step_stops_the_run_there(state):
    with StopRequest() as request:
        stopping = Stopping(request, [].append)
        stopping.begin(save=False)
        signal.raise_signal(signal.SIGTERM)
        state.unverified = True
        assert stopping.agree(state).stop


def logging_of(step, loader, board, spikes, lines, max_skipped=None):
    recorders = Recorder(board=board), Recorder(board=spikes)
    limits = {"images_after": lambda step: 8 * (4 - step), "max_skipped_images": max_skipped}
    return Logging(*recorders, step, loader, lines.append, **limits)


def test_a_report_holds_the_metrics_of_the_steps_and_of_the_machine(state, step, loader):
    board = Board()
    log = logging_of(step, loader, board, Board(), [])
    for batches in loader:
        step(state, batches)
        state.step += 1
    log.report(state, batches)
    ((number, values),) = board.written
    assert number == 4 and values["left_s"] == 0 and values["skipped_images"] == 0
    assert {"loss", "lr", "grad_norm", "images_per_s", "epoch", "wait_s", "peak_memory_gib"} <= values.keys()
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [name for name in values if f"\n| `{name}` |" not in page] == [], "metrics that no page describes"


def test_a_run_with_too_many_skipped_images_ends_after_its_report(state, step, loader):
    board = Board()
    log = logging_of(step, loader, board, Board(), [], max_skipped=1)
    batches = next(iter(loader))
    step(state, batches)
    loader.skipped += ["key 5 is damaged"]
    log.report(state, batches)
    loader.skipped += ["key 6 is damaged"]
    with pytest.raises(SkippedError, match="2 images could not be read.*rank 0: key 6 is damaged"):
        log.report(state, batches)
    assert [values["skipped_images"] for _, values in board.written] == [1, 2]


def test_a_loss_spike_is_printed_logged_and_recorded(state, step, loader, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    sample = torch.tensor([1, 2])
    batch = Batch(0, 0, torch.zeros(2, 1, 1, 3), sample, sample)
    for number in range(40):
        loss = torch.tensor(90.0 if number == 39 else 10.0)
        state.spike_detector.observe(number, loss, torch.tensor(1.0), (batch,))
    spikes, lines = Board(), []
    with caplog.at_level(logging.WARNING, "facetrain"):
        logging_of(step, loader, Board(), spikes, lines).report_spikes(state)
    assert [number for number, _ in spikes.written] == [39]
    assert "loss spike at step 39: 90" in lines[0] and "loss spike at step 39" in caplog.text


class Recording:
    """Callbacks of the loop that record their calls. The signal comes after step `stop_at`."""

    def __init__(self, state, stop_at=None, interrupted=False, overdue_at=None):
        self.calls, self._state, self._stop_at = [], state, stop_at
        self._interrupted, self._overdue_at, self._save = interrupted, overdue_at, False

    def report(self, state, batches):
        self.calls.append(f"report {state.step}")

    def report_spikes(self, state):
        self.calls.append(f"spikes {state.step}")

    def verify(self, state):
        self.calls.append(f"verify {state.step}")
        state.unverified = self._interrupted

    def draw(self, state):
        pass

    def is_overdue(self):
        return self._state.step == self._overdue_at

    def save(self, state):
        self.calls.append(f"save {state.step}")

    def poll(self, state):
        self.calls.append(f"poll {state.step}")

    def begin(self, *, save):
        self._save = save

    def agree(self, state):
        save, self._save = self._save, False
        return Agreement(stop=state.step == self._stop_at or self._interrupted, save=save)


def calls_of(state, loader, step, *, resumed=False, **options):
    recording = Recording(state, **options)
    callbacks = Callbacks(recording, recording, recording, recording)
    fit(state, loader, step, callbacks, Intervals(log=2, verify=3, save=2, total_steps=4), resumed=resumed)
    return recording.calls


def test_the_loop_calls_each_callback_at_its_interval_and_all_after_the_last_step(state, loader, step):
    assert calls_of(state, loader, step) == [
        "verify 0",
        "poll 1",
        "report 2", "spikes 2", "save 2",
        "verify 3", "poll 3",
        "report 4", "verify 4", "spikes 4", "save 4",
    ]  # fmt: skip


def test_the_loop_saves_and_ends_after_the_step_of_a_signal(state, loader, step):
    assert calls_of(state, loader, step, stop_at=1) == ["verify 0", "spikes 1", "save 1"]


def test_the_loop_saves_after_the_step_before_which_the_clock_of_a_rank_asks_for_it(state, loader, step):
    assert calls_of(state, loader, step, overdue_at=2)[4:8] == ["save 2", "verify 3", "spikes 3", "save 3"]


def test_a_resumed_run_verifies_first_only_if_a_signal_interrupted_the_verification(state, loader, step):
    assert calls_of(state, loader, step, resumed=True)[0] == "poll 1"


def test_a_repeated_verification_of_a_resumed_run_is_saved(state, loader, step):
    state.unverified = True
    assert calls_of(state, loader, step, resumed=True)[:3] == ["verify 0", "save 0", "poll 1"]


def test_a_signal_during_the_first_verification_saves_and_takes_no_step(state, loader, step):
    assert calls_of(state, loader, step, interrupted=True) == ["verify 0", "save 0"]
    assert state.step == 0
