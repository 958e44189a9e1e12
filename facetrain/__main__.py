"""`facetrain` and `python -m facetrain`, which torchrun starts on every rank."""

import sys


def main() -> None:
    """Run the command line. A Ctrl-C during its imports, which take a while, is no error of the program either."""
    try:
        from facetrain.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
