"""Resolution of a run on the leader: plain code, without a collective, from the claim to the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.run_id import new_run_id, read_run_id, run_id_of
from facetrain.config.changes import ConfigChange, lookup
from facetrain.config.loading import is_set, plain_config, with_values
from facetrain.config.paths import with_absolute_paths, with_downloads, with_paths_of_sets
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.distributed.ranks import Ranks
from facetrain.errors import ConfigError, ModelError
from facetrain.models.model_file import newest_model_file, read_step
from facetrain.run.asked_config import AskedConfig, open_mirror
from facetrain.run.folder.accepted import Accepted
from facetrain.run.folder.compatibility import (
    INITIAL_KEYS,
    check_compatibility,
    check_initial,
    check_meaning,
    describe_initial,
    find_config_changes,
    saved_config,
)
from facetrain.run.folder.data_digests import check_inputs, digest_inputs, digest_weights, model_paths
from facetrain.run.folder.environment import recorded_environment, stored_environment
from facetrain.run.folder.hosts import Hosts
from facetrain.run.folder.starting_point import find_starting_point
from facetrain.run.lr_range_test import require_steps_of_test
from facetrain.run.parts.open_data import RunData, open_data
from facetrain.run.parts.step_schedule import StepSchedule, schedule_steps
from facetrain.run.request import CHOSEN_KEYS, TrainRequest
from facetrain.run.run_claim import Claim
from facetrain.run.run_plan import RunPlan
from facetrain.run.suited_settings import Suited, gather_facts, keys_to_choose, suited_settings
from facetrain.training.early_stop import EarlyStop
from facetrain.verify.pair_protocol import rising_metrics
from facetrain.verify.sets.pair_set import PairSet


def resolve(
    request: TrainRequest,
    claim: Claim,
    asked: AskedConfig,
    ranks: Ranks,
    hosts: Hosts,
    *,
    restarted: bool,
    pin: Callable[[str], str],
) -> tuple[RunPlan, RunData]:
    """Decide what the run is; return the plan, and what it reads. For the leader only. Nothing is written.

    `restarted` says whether this job has been started again, and a host has checkpoints of it. `pin` downloads an
    address, or a name of the catalog, and returns the address with its version.

    Raises:
        UsageError: the config, the data or a verification set cannot be used, or does not fit the checkpoint.
        CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    config, folder = asked.config, Path(claim.folder)
    mirror, start = open_mirror(config, folder), None
    if request.command == "resume" or restarted or request.resume_existing:
        # After a restart, the run has newer checkpoints than the one that the command asks for.
        step = None if claim.goes_on else request.checkpoint
        is_new = request.command == "train"
        start = find_starting_point(folder, mirror, hosts, step=step, may_be_new=is_new)
    checkpoint = start.checkpoint if start else None
    if checkpoint:
        ranks.has_trained = True  # of a run that is only in its mirror, the claim has seen nothing
        config = _with_recorded_choices(config, checkpoint, request, asked.set_keys)
    config = with_paths_of_sets(with_downloads(config, pin, has_weights=checkpoint is not None))
    here = with_absolute_paths(config)
    with ranks.outages(ModelError):
        model_paths(here, is_new=checkpoint is None)
    data = open_data(here)
    _require_measured(config, data.sets)
    suited = [] if checkpoint else _choose_settings(config, request, asked.set_keys, data, ranks)
    config = with_values(config, {each.key: each.value for each in suited}, "the chosen settings")
    here = with_absolute_paths(config)
    schedule = schedule_steps(config, epoch_size(data.source), ranks.size)
    if not checkpoint:
        _require_known_expectations(config, schedule)
        if "lr" in request.choose:
            require_steps_of_test(schedule.stages[0].stop_step)
    plan = RunPlan(
        request=request,
        config=config,
        folder=str(folder),
        run_id=_run_id(folder, checkpoint),
        is_fetched=bool(start and start.is_fetched),
        left_steps=start.left_steps if start else (),
        restarted=restarted,
        inputs=digest_inputs(here, data.source, data.sets),
        # Of several hosts only: one host has one file.
        weights=digest_weights(here) if ranks.spans_hosts and not checkpoint else {},
        set_keys=asked.set_keys,
        chosen=(*asked.remarks, *map(str, suited), *request.chosen),
    )
    if mirror:
        mirror.check_run(plan.run_id)
    if checkpoint:
        plan = _continued(plan, checkpoint, here, schedule, data.source)
    return plan, data


def _continued(
    plan: RunPlan, checkpoint: Checkpoint, config: Config, schedule: StepSchedule, source: FaceDataset
) -> RunPlan:
    """Return the plan of a run that continues from a checkpoint, which fits it.

    The config keeps the recorded values of what decides the first weights of a run.

    Raises:
        ConfigError: the run has read other data, or was trained with other settings, which neither the command sets nor
            an earlier one has set that continued from this checkpoint.
    """
    changes, manifest = find_config_changes(checkpoint, config), checkpoint.manifest.digest
    environments = [recorded_environment(Path(plan.folder))]
    if plan.is_fetched and (mirror := open_mirror(config, Path(plan.folder))):
        environments.append(stored_environment(mirror))
    accepted = Accepted.since(manifest, *environments)
    check_compatibility(checkpoint, config, total_steps=schedule.total_steps)
    if plan.request.command == "resume":
        check_initial(changes, plan.set_keys)
    kept = [change for change in changes if change.key in INITIAL_KEYS]
    changes = [change for change in changes if change not in kept]
    check_meaning(checkpoint, accepted.new_changes(changes), plan.set_keys)
    check_inputs(checkpoint, accepted.new_inputs(plan.inputs), source.num_classes, plan.set_keys)
    stopped = EarlyStop.of(checkpoint.meta).reason(config.train.stop_early)
    has_ended = checkpoint.step >= schedule.total_steps or bool(stopped)
    is_verified = checkpoint.meta.get("unverified") is not True
    # A model of a later step is the result of a course that this resume leaves.
    model = None if plan.is_fetched else newest_model_file(Path(plan.folder))
    is_over = has_ended and is_verified and model is not None and read_step(model) == checkpoint.step
    if is_over and plan.request.is_part:
        # The command still computes on the device.
        given = [change for change in changes if is_set(plan.set_keys, change.key)]
        _require_unchanged([change for change in given if change.key != "train.device"], checkpoint)
    return plan.model_copy(
        update={
            "step": checkpoint.step,
            "manifest": manifest,
            "config": with_values(
                plan.config, {each.key: each.before for each in kept}, str(checkpoint.folder)
            ),
            "changes": tuple(changes),
            "chosen": (*plan.chosen, *describe_initial(kept)),
            "is_over": is_over,
        }
    )


def _require_unchanged(changes: list[ConfigChange], checkpoint: Checkpoint) -> None:
    """Check that the command sets nothing of a run that is over: its page would show it as what was trained with.

    Raises:
        ConfigError: it does.
    """
    if changes:
        raise ConfigError(
            f"{', '.join(map(str, changes))}: has no effect, because the run was already finished, at step "
            f"{checkpoint.step:,}; remove the --set, or train anew in another folder"
        )


def _require_known_expectations(config: Config, schedule: StepSchedule) -> None:
    """Check that a new run does not keep fixed expectations that are random centers, as those of new people are.

    Raises:
        ConfigError: it would.
    """
    are_known = config.inherits_centers and config.head.init_from == "keep"
    if schedule.stages[0].head.expectations == "fixed" and not are_known:
        raise ConfigError(
            "head.expectations: fixed from the first step on keeps random centers as expectations; begin with moving "
            "or off (train.stages), or with the centers of a model that knows all people (head.init_from: keep)"
        )


def _require_measured(config: Config, sets: list[PairSet]) -> None:
    """Check that the verification measures the metrics that the config names, and that larger is better.

    Raises:
        ConfigError: it does not, or a better model does not have a larger value.
    """
    measured = [f"{pairs.name}/{metric}" for pairs in sets for metric in rising_metrics(pairs.same)]
    stop = config.train.stop_early
    for key, metric in (
        ("checkpoint.best_metric", config.checkpoint.best_metric),
        ("train.stop_early.metric", stop.metric if stop else None),
    ):
        if metric is not None and metric not in measured:
            raise ConfigError(
                f"{key}: {metric} is no metric that the verification measures and of which larger is better; there "
                f"are {', '.join(measured) or 'none, see eval.targets'}"
            )


def _with_recorded_choices(
    config: Config, checkpoint: Checkpoint, request: TrainRequest, set_keys: frozenset[str]
) -> Config:
    """Return the config with the values that the run chose when it began."""
    keys = {key for choice in request.choose for key in CHOSEN_KEYS[choice]}
    recorded = saved_config(checkpoint)
    saved = plain_config(recorded) if recorded else {}
    if request.choose and not is_set(set_keys, "optim.lr"):
        keys.add("optim.lr")
        # As `choose.rate_values`: the rate of Muon follows, even if the command sets the one that it begins with.
        if config.optim.muon and lookup(saved, "optim.muon"):
            keys.add("optim.muon.lr")
    keys.update(_keys_to_choose(config, request, set_keys))
    return with_values(config, {key: lookup(saved, key) for key in keys}, str(checkpoint.folder))


def _choose_settings(
    config: Config, request: TrainRequest, set_keys: frozenset[str], data: RunData, ranks: Ranks
) -> list[Suited]:
    """Return the settings of a new run that are chosen for its data and this machine."""
    keys = _keys_to_choose(config, request, set_keys)
    if not keys:
        return []
    if config.train.deterministic:
        fix_cublas_workspace()  # the facts about a GPU start CUDA
    facts = gather_facts(config, data.source, ranks.size)
    return [each for each in suited_settings(facts) if each.key in keys]


def _keys_to_choose(config: Config, request: TrainRequest, set_keys: frozenset[str]) -> list[str]:
    return keys_to_choose(config, set_keys if request.has_data_alone else None)


def _run_id(folder: Path, checkpoint: Checkpoint | None) -> str:
    # A copied folder of checkpoints has no id: the run goes on under the id of its checkpoint.
    known = checkpoint and (read_run_id(folder) or run_id_of(checkpoint.manifest))
    return known or new_run_id()
