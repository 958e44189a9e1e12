"""Choice of a run's execution mode: by its config, its checkpoint, or a measurement of its first steps."""

from __future__ import annotations

from collections.abc import Callable

from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.run.build.parts import is_batch_norm_synced
from facetrain.run.build.step_schedule import StepSchedule
from facetrain.training.execution import Execution, ExecutionSettings
from facetrain.training.execution_trial import LEAST_STEPS, CudaTimer, ExecutionTrial, HostTimer
from facetrain.training.precision import InPrecision
from facetrain.training.state import TrainState


def build_execution(config: Config, world: World, network: InPrecision, schedule: StepSchedule) -> Execution:
    """Return the network with the execution modes that the config allows.

    Raises:
        ConfigError: the config requires a mode that cannot be used.
    """
    settings = ExecutionSettings(
        compile=config.train.compile,
        cuda_graphs=config.train.cuda_graphs,
        fused=config.train.fused,
        device=world.device,
        batch_size=max(stage.local_batch_size for stage in schedule.stages),
        accumulate=config.optim.accumulate,
        deterministic=config.train.deterministic,
        checkpoint_activations=config.model.checkpoint_activations,
        synchronized=is_batch_norm_synced(config) and collectives.world_size() > 1,
    )
    return Execution(network, settings)


def begin_trial(
    execution: Execution, state: TrainState, schedule: StepSchedule, report: Callable[[str], None]
) -> ExecutionTrial | None:
    """Return the measurement that chooses the mode; None if the mode is known already.

    Args:
        execution: network with its possible modes.
        state: state of the run, restored from its checkpoint if it is resumed.
        schedule: number of steps of the run.
        report: takes the lines about the choice.
    """
    if len(execution.modes) == 1:
        return None
    for mode in execution.modes:
        if mode == state.execution_mode:
            execution.use(mode)
            report(f"the backbone runs {mode}, as the measurement at the start of the run has chosen")
            return None
    steps = schedule.total_steps - state.step
    if steps < LEAST_STEPS:
        report(
            f"the backbone runs eager: {steps:,} steps are too few to find out what is faster "
            f"(fewer than {LEAST_STEPS:,}); set train.compile or train.cuda_graphs to on to use them"
        )
        return None
    timer = CudaTimer() if state.world.device.type == "cuda" else HostTimer()
    return ExecutionTrial(execution, timer, report)
