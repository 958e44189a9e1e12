import os
from pathlib import Path

import pytest

from facetrain.distributed.process_setup import keep_compiled_code

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def cache_folder_not_set(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # makes monkeypatch remove what the test sets
    monkeypatch.delenv(VARIABLE)


def test_compiled_code_is_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert Path(os.environ[VARIABLE]) == tmp_path / "facetrain" / "compiled"
    assert (tmp_path / "facetrain" / "compiled").is_dir()


def test_a_folder_given_in_the_environment_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "/given")
    keep_compiled_code()
    assert os.environ[VARIABLE] == "/given"


def test_torchs_default_stays_if_the_cache_folder_cannot_be_created(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_code()
    assert VARIABLE not in os.environ
