import subprocess
import sys

import pytest

from facetrain.bench.failed_process import failure_reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise TypeError('empty(): invalid size\\nmore of it\\n' + chr(34))",
            "TypeError: empty(): invalid size",
        ),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
        ("import sys; sys.exit('no exception\\nlast line')", "last line"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_the_reason_is_the_line_that_names_the_fault(code, reason):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failure_reason(done).startswith(reason)
