"""Names of others reach the terminal and the log without characters that control them."""

import logging

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.telemetry.log import log_to, stop_logging, warn
from facetrain.text import listed, printable
from tests.support.datasets import encoded_image, write_records, write_tar

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


def test_names_of_images_and_identities_are_printable_from_every_dataset(tmp_path):
    name = f"{ESCAPE}/{ESCAPE}.png"
    (tmp_path / "photos" / name).parent.mkdir(parents=True)
    (tmp_path / "photos" / name).write_bytes(encoded_image(0))
    write_records(tmp_path / "records", [0])
    (tmp_path / "records" / "names.csv").write_text(f"key,name\n1,{name}\n")
    (tmp_path / "records" / "identities.csv").write_text(f"identity,name\n0,{ESCAPE}\n")
    write_tar(tmp_path / "shard.tar", {name: encoded_image(0)})
    for path in ("photos", "records", "shard.tar"):
        dataset = open_dataset(tmp_path / path)
        assert dataset.name(0) == printable(name) and dataset.identity_name(0) == printable(ESCAPE)


def test_warnings_and_the_log_are_printable(tmp_path, capsys):
    handler = log_to(tmp_path / "log.txt", 0)
    warn(f"{ESCAPE}\nrank 0 INFO saved")
    stop_logging(handler)
    logging.getLogger("facetrain").propagate = True
    written = (tmp_path / "log.txt").read_text()
    assert len(written.splitlines()) == 1 and "\x1b" not in written + capsys.readouterr().err
