"""One rank of a run: `python -m facetrain.cli.rank REQUEST`, as facetrain's launcher starts it.

A rank gets the request of its host as JSON. It never reads the command line of the user: rank 0 resolves its request,
and all ranks receive the plan through their store.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from facetrain.__main__ import run_program

if TYPE_CHECKING:
    from facetrain.run.request import TrainRequest


def rank_arguments(request: TrainRequest) -> list[str]:
    """Return the arguments of Python that start a rank."""
    debug = ["--debug"] if "--debug" in request.command_line else []
    return ["-m", "facetrain.cli.rank", request.model_dump_json(), *debug]


def train_on_this_rank(request: TrainRequest) -> int:
    """Train what is asked, in this process and its peers if there are any; return the exit code."""
    from facetrain.cli.launch_options import end_on_signals
    from facetrain.cli.options import download
    from facetrain.run.train import train

    return train(request, pin=lambda name: download(name)[1], fit_batch=_fit_batch, on_met=end_on_signals)


def main() -> None:
    """Be a rank; end the process with the exit code of the run or of its error."""

    def run() -> None:
        # Here, as all imports that take a while: a Ctrl-C meanwhile has no traceback.
        from facetrain import own_parts
        from facetrain.cli.app import end_with
        from facetrain.run.request import TrainRequest

        request = TrainRequest.model_validate_json(sys.argv[1])
        if request.allow_code:  # also the code of a file that the config names, such as a teacher
            own_parts.allow_all()
        # By SystemExit, as the command: after a signal, the run has said how it ended.
        end_with(lambda: sys.exit(train_on_this_rank(request)), debug="--debug" in sys.argv)

    run_program(run)


def _fit_batch(*asked: Any) -> tuple[dict[str, float], str]:
    from facetrain.plan.fit_batch import fit_batch  # needs 100 MB, for what counts operations

    return fit_batch(*asked)


if __name__ == "__main__":
    main()
