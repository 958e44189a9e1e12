"""Names of others reach the terminal and the log without characters that control them."""

import logging

import pytest

from facetrain.data.dataset import identity_name, original_name
from facetrain.telemetry.log import log_to, stop_logging, warn
from facetrain.text import listed, printable

ESCAPE = "\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zoë Müller 張", "Zoë Müller 張"),
        (ESCAPE, "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\nerror: forged\r", "a\\nerror: forged\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
        ("\u2028\t", "\\u2028\\t"),
        ("क्\u200dष", "क्\u200dष"),
        ("\udcff", "\\xff"),
        ("\ud800 \udcff", "\\ud800 \\udcff"),
    ],
)
def test_control_characters_are_escaped_and_letters_are_kept(text, shown):
    assert printable(text) == shown


def test_names_of_a_file_are_listed_without_control_characters_and_only_the_first_of_many():
    assert listed(["a", "b\x1b[2J", "c" * 99]) == "a, b\\x1b[2J, " + "c" * 60 + "..."
    assert listed(map(str, range(1000))).endswith(", 18, 19 and 980 more")


def test_names_of_images_and_identities_are_printable_from_every_dataset():
    class Dataset:
        num_classes = 1

        def name(self, index):
            return ESCAPE

        identity_name = name

    assert "\x1b" not in original_name(Dataset(), 0) + identity_name(Dataset(), 0)


def test_warnings_and_the_log_are_printable(tmp_path, capsys):
    handler = log_to(tmp_path / "log.txt", 0)
    warn(f"{ESCAPE}\nrank 0 INFO saved")
    stop_logging(handler)
    logging.getLogger("facetrain").propagate = True
    written = (tmp_path / "log.txt").read_text()
    assert len(written.splitlines()) == 1 and "\x1b" not in written + capsys.readouterr().err
