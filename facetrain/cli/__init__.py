"""The command line: every command parses, calls one function, and prints one result."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `facetrain` command; end the process with the exit code that the errors define."""
    # --debug may stand anywhere on the line, also behind the command's own options.
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    from facetrain.cli.app import app
    from facetrain.errors import FacetrainError

    try:
        app(arguments)
    except FacetrainError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
