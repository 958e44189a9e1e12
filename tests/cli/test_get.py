"""`facetrain get`, and the Hugging Face Hub on the loopback interface."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.support.command import ROOT, output_of, refusal, start
from tests.support.hub_server import running_hub
from tests.support.web_server import serving


@pytest.fixture
def hub():
    with running_hub() as server:
        yield server


@pytest.fixture
def run(hub, tmp_path):
    """Run the command with the hub and an empty cache; return exit code, output and error."""

    def call(*arguments, **variables):
        given = {
            "HF_ENDPOINT": hub.address,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        process = start(*arguments, **(given | variables))
        output, error = process.communicate()
        return process.returncode, output, error

    return call


def test_without_a_name_it_lists_the_catalog_with_sizes_terms_and_states():
    text = output_of("get")
    assert max(map(len, text.splitlines())) <= 120
    assert "  yunet                   OpenCV's face detector" in text and "(detector, 0.2 MB)" in text
    assert (
        "- webface42m" in text
        and "not answered since July 2025" in text
        and "facetrain get hsface10k" in text
    )
    entries = json.loads(output_of("get", "--json"))
    assert entries[0]["name"] == "yunet" and len(entries[0]["sha256"]) == 64
    assert "give the name" in str(refusal("get", "--output", "copy"))


def test_a_model_of_the_hub_is_its_model_file_at_a_commit(hub, run, tmp_path):
    weights = bytes(range(200))
    hub.repositories["models/org/face"] = {
        "README.md": b"text",
        "model.safetensors": weights,
        "model.onnx": b"x",
        "a.py": b"evil()",
    }
    hub.cards["models/org/face"] = {"license": "mit"}
    code, output, error = run("get", "hf://org/face", "--json", "--output", tmp_path / "new/mine.safetensors")
    assert code == 0, error
    assert "terms: mit, see the page of org/face" in error
    commit = hub.commit("models/org/face")
    assert json.loads(output) == {
        "path": str(tmp_path / "new/mine.safetensors"),
        "address": f"hf://org/face@{commit}",
    }
    assert (tmp_path / "new/mine.safetensors").read_bytes() == weights
    hub.requests.clear()
    code, output, error = run("get", f"hf://org/face@{commit}")
    assert (code, error) == (0, "") and output.endswith("/model.safetensors\n")
    assert hub.requests == [], "a commit never changes"
    assert run("get", "hf://org/face", HF_HUB_OFFLINE="1") == (0, output, ""), (
        "the newest commit that is here"
    )
    code, _, error = run("get", "hf://org/face/README.md", HF_HUB_OFFLINE="1")
    assert code == 2 and "downloads are switched off" in error


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_a_folder_and_so_is_a_folder_of_a_model(hub, run, tmp_path):
    hub.repositories["datasets/org/set"] = {"train.rec": b"r" * 500, "one/lfw.bin": b"l"}
    assert run("get", "hf://datasets/org/set", "--output", tmp_path / "set")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").rglob("*") if path.is_file()} == {
        "train.rec": b"r" * 500,
        "lfw.bin": b"l",
    }
    code, output, _ = run("get", "hf://datasets/org/set/one")
    assert code == 0 and output.strip().endswith("/one")
    hub.repositories["models/org/face"] = {"one/a.onnx": b"a", "one/b.txt": b"b"}
    code, output, _ = run("get", "hf://org/face/one@refs/pr/1")
    assert code == 0 and {path.name for path in Path(output.strip()).iterdir()} == {"a.onnx", "b.txt"}


@pytest.mark.slow
def test_a_file_that_is_not_what_the_hub_says_is_refused(hub, run):
    hub.repositories["models/org/face"] = {"a.onnx": b"x" * 300, "b.onnx": b"y"}
    right = hub.entry
    hub.entry = lambda path, content: right(path, b"z" * len(content))
    for file in ("a.onnx", "b.onnx"):  # in Git LFS, and in Git
        code, _, error = run("get", f"hf://org/face/{file}")
        assert code == 2 and "checksum is not the expected one" in error
    code, _, error = run("get", "hf://org/face")
    assert code == 2 and "which file is the model? Give hf://org/face" in error


def test_the_description_of_a_model_comes_with_its_weights(hub, run):
    hub.repositories["models/org/cvl"] = {
        "model.safetensors": b"w" * 300,
        "config.json": b"{}",
        "wrapper.py": b"x",
    }
    code, output, error = run("get", "hf://org/cvl")
    assert code == 0, error
    assert {path.name for path in Path(output.strip()).iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://org/none", "hf://org/none: no such repository, or no access to it"),
        ("hf://org/face@none", "not found"),
        ("hf://face", "use the form hf://org/repo"),
        ("lfv", "lfv: not in the catalog"),
        ("calfw", "see http://www.whdeng.cn/CALFW/"),
        ("ftp://host/file", "unknown kind of address"),
    ],
)
def test_a_name_that_cannot_be_had_is_one_line(hub, run, name, message):
    hub.repositories["models/org/face"] = {"a.onnx": b"x"}
    code, output, error = run("get", name)
    assert (code, output) == (2, "") and message in error and error.count("\n") == 1


def test_without_huggingface_hub_an_address_of_the_hub_says_what_to_install(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['huggingface_hub'] = None")
    for address in ("hf://org/face", f"hf://org/face@{40 * 'a'}"):
        code, _, error = run("get", address, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert code == 2 and "huggingface_hub; install it with `pip install 'facetrain[remote]'`" in error


class Refusing(BaseHTTPRequestHandler):
    """A Google store that knows no caller."""

    def do_GET(self):
        content = b'{"error": {"code": 401, "message": "Anonymous caller"}}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("debug", [{}, {"GCSFS_DEBUG": "INFO"}])
def test_a_failure_of_a_google_store_is_one_line_unless_its_log_is_wanted(run, tmp_path, debug):
    # Without credentials and without a look for those of a machine at Google.
    alone = {"CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}
    with serving(Refusing) as address:
        code, _, error = run("get", "gs://bucket/a", STORAGE_EMULATOR_HOST=address, **alone, **debug)
    assert code == 2 and "gs://bucket/a: access denied" in error.splitlines()[-1]
    assert ("Traceback" in error) if debug else (error.count("\n") == 1), error


def test_the_token_is_sent_and_never_shown(hub, run, tmp_path):
    hub.repositories["models/org/face"] = {"a.onnx": b"x" * 300, "older/a.onnx": b"y"}
    code, output, error = run("get", "hf://org/face", "--debug", HF_TOKEN="hf_planted")
    assert code == 0 and "Bearer hf_planted" in hub.tokens
    _, more, errors = run("get", "hf://org/none", "--debug", HF_TOKEN="hf_planted")
    assert "planted" not in output + error + more + errors
    stored = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert stored and not any(b"planted" in content for content in stored)


@pytest.mark.slow
def test_a_model_is_pushed_with_its_card_and_terms_and_read_by_its_name(hub, run, model, tmp_path):
    output = tmp_path / "o.safetensors"
    arguments = ["export", model, "--format", "safetensors", "--output", output, "--push", "hf://org/new"]
    # huggingface_hub uploads by another protocol, Xet, otherwise, and asks no other server whether it has that.
    given = {"HF_TOKEN": "hf_planted", "HF_HUB_DISABLE_XET": "1"}
    for visibility in (["--private"], []):  # of a new repository, and again to the same one
        code, text, error = run(*arguments, "--license", "cc-by-nc-4.0", *visibility, **given)
        assert code == 0, error
        assert f"pushed with its model card: hf://org/new@{hub.commit('models/org/new')}" in text
        assert "planted" not in text + error and "Bearer hf_planted" in hub.tokens
    assert hub.private == {"models/org/new"}
    files = hub.repositories["models/org/new"]
    assert files.keys() == {"o.safetensors", "README.md"} and files["o.safetensors"] == output.read_bytes()
    front, _, card = files["README.md"].decode().partition("---\n\n")
    assert "license: cc-by-nc-4.0" in front and "- license: cc-by-nc-4.0" in card and "## Limits" in card
    code, text, error = run(
        "export", "hf://org/new", "--format", "safetensors", "--output", tmp_path / "o.safetensors", **given
    )
    assert code == 0 and (tmp_path / "o.safetensors").is_file(), error


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (["--push", "hf://org/new"], {"HF_TOKEN": "t"}, "give the terms of the model with --license"),
        (["--push", "hf://org/new", "--license", "mit"], {}, "has no token; set HF_TOKEN"),
        (["--push", "hf://org", "--license", "mit"], {"HF_TOKEN": "t"}, "hf://ORG/NAME"),
        (["--push", "s3://org/new", "--license", "mit"], {"HF_TOKEN": "t"}, "hf://ORG/NAME"),
        (
            ["--push", "hf://org/new", "--license", "my own"],
            {"HF_TOKEN": "t"},
            "--license my own: the Hugging",
        ),
    ],
)
def test_a_push_that_cannot_succeed_is_refused_before_the_export(
    hub, run, model, tmp_path, options, variables, message
):
    output = tmp_path / "o.safetensors"
    home = {"HF_HOME": str(tmp_path)}  # no token of the user
    code, _, error = run(
        "export", model, "--format", "safetensors", "--output", output, *options, **variables, **home
    )
    assert code == 2 and message in error and error.count("\n") == 1
    assert not output.exists() and hub.repositories == {}
