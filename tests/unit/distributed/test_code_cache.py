import os
from pathlib import Path

import pytest

from facetrain.distributed.code_cache import keep_compiled_code

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what is set here is gone afterwards
    monkeypatch.delenv(VARIABLE)


def test_compiled_code_is_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert Path(os.environ[VARIABLE]) == tmp_path / "facetrain" / "compiled"
    assert (tmp_path / "facetrain" / "compiled").is_dir()


def test_a_folder_that_is_given_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "/given")
    keep_compiled_code()
    assert os.environ[VARIABLE] == "/given"


def test_where_there_can_be_no_such_folder_torch_chooses(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_code()
    assert VARIABLE not in os.environ
