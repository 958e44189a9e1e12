"""One rank of `facetrain bench train`: `python -m facetrain.cli.bench_rank ARGUMENTS`, those of the command."""

from __future__ import annotations

from facetrain.__main__ import run_program


def main() -> None:
    """Run the command as a rank; end the process with its exit code."""

    def run() -> None:
        from facetrain.cli.app import run_command

        run_command()

    run_program(run)


if __name__ == "__main__":
    main()
