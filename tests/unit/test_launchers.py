"""Launch scripts, Kubernetes manifests and container files, checked without a cluster."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from facetrain.config.loading import load_config
from facetrain.config.presets import presets
from facetrain.errors import UsageError
from tests.support.command import ROOT
from tests.support.installer import pip

SCRIPTS = sorted((ROOT / "recipes" / "launch").glob("*.s*"))
MANIFESTS = sorted((ROOT / "recipes" / "launch").glob("*.yaml"))
COMPOSE = sorted((ROOT / "docker").glob("compose*.yaml"))
TRAINED = "configs/wf42m_pfc02_r100_16gpus.yaml"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_shell_and_stops_at_its_first_error(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert "set -eu" in path.read_text()


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def find(node, key):
    """Yield every value of `key` at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from find(item, key)


def test_the_trained_config_is_published_on_two_hosts_of_eight_gpus():
    assert {each.name: each.gpus for each in presets()}[Path(TRAINED).stem] == 2 * 8
    for name in ("many_nodes.sh", "slurm.sbatch"):
        text = (ROOT / "recipes/launch" / name).read_text()
        assert f"CONFIG:-{TRAINED}}}" in text and "GPUS:-8}" in text


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_kubernetes_manifest_trains_resumes_and_mounts_shared_memory(path):
    found = documents(path)
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(document) for document in found)
    (arguments,) = [value for value in find(found, "args") if value]
    assert arguments[0] == "train" and "--resume" in arguments
    assert arguments[arguments.index("--config") + 1] == TRAINED and (ROOT / TRAINED).exists()
    assert arguments[arguments.index("--run-dir") + 1].startswith("/runs/")
    assert {"nvidia.com/gpu": 8} in list(find(found, "limits"))
    mounts = [mount["mountPath"] for mounts in find(found, "volumeMounts") for mount in mounts]
    assert sorted(mounts) == ["/cache", "/data", "/dev/shm", "/runs"]
    (user,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert list(find(found, "fsGroup")) == [int(user)], "the user of the image must write to the volume"


SRUN = """#!/bin/bash
echo "$@" >> {folder}/srun
command -v facetrain > {folder}/facetrain
trap 'exit 138' USR1
kill -USR1 $PPID
while :; do sleep 0.1; done
"""


def test_the_slurm_job_gives_its_cpus_to_srun_passes_the_signal_on_and_is_requeued(tmp_path):
    programs = {"srun": SRUN, "scontrol": '#!/bin/sh\necho "$@" >> {folder}/scontrol\necho node0\n'}
    for name, text in programs.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text.format(folder=tmp_path))
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/facetrain").write_text("#!/bin/sh\n")
    (tmp_path / "venv/bin/facetrain").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["bash", ROOT / "recipes" / "launch" / "slurm.sbatch", "--set", "optim.lr=0.2"],
        env=job
        | {
            "VENV": f"{tmp_path}/venv",
            "SLURM_CPUS_PER_TASK": "64",
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        },
        timeout=60,
    )
    assert done.returncode == 138
    assert (tmp_path / "scontrol").read_text().splitlines()[1:] == ["requeue 7"]
    assert (tmp_path / "facetrain").read_text().strip() == f"{tmp_path}/venv/bin/facetrain"
    words = (tmp_path / "srun").read_text().split()
    assert words[words.index("--cpus-per-task") + 1] == "64"
    assert "--run-dir runs/wf42m_pfc02_r100_16gpus --resume --set optim.lr=0.2 --nnodes 2" in " ".join(words)
    assert "--rdzv-endpoint node0:20007" in " ".join(words)


def test_the_rendezvous_of_the_indexed_job_is_at_its_first_pod():
    service, job, _ = documents(ROOT / "recipes" / "launch" / "indexed_job.yaml")
    spec, template = job["spec"], job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    nodes = template["spec"]["containers"][0]["env"][0]
    assert nodes["name"] == "NODES" and int(nodes["value"]) == spec["completions"] == spec["parallelism"]
    arguments = template["spec"]["containers"][0]["args"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29400" in arguments


@pytest.mark.parametrize("name", ["indexed_job.yaml", "kubeflow_trainer.yaml"])
def test_only_a_wrong_config_ends_a_job_and_failures_are_counted_for_each_pod(name):
    found = documents(ROOT / "recipes" / "launch" / name)
    # A limit for all pods together would be reached sooner with more nodes.
    assert not list(find(found, "backoffLimit"))
    assert list(find(found, "backoffLimitPerIndex")) == [1000] and list(find(found, "maxFailedIndexes")) == [
        0
    ]
    # What Kubernetes demands of a Job with such a limit and a policy.
    assert list(find(found, "completionMode")) == ["Indexed"] and list(find(found, "restartPolicy")) == [
        "Never"
    ]
    ((evicted, *others),) = find(found, "rules")
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    containers = [container["name"] for (container,) in find(found, "containers")]
    for rule in others:
        assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [UsageError.exit_code]
        assert [rule["onExitCodes"]["containerName"]] == containers
    assert len(others) == (name == "indexed_job.yaml"), "torchrun ends with 1 after every error"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_only_the_pods_of_a_job_may_connect_to_each_other(path):
    *_, policy = documents(path)
    kinds = ("Job", "PyTorchJob", "TrainJob")
    (job,) = [each["metadata"]["name"] for each in documents(path) if each["kind"] in kinds]
    assert policy["kind"] == "NetworkPolicy" and policy["spec"]["policyTypes"] == ["Ingress"]
    assert list(policy["spec"]["podSelector"]["matchLabels"].values()) == [job]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_two_containers_are_two_nodes_of_one_job(path):
    (found,) = documents(path)
    services = {name: service for name, service in found["services"].items() if "hostname" in service}
    assert [service["hostname"] for service in services.values()] == ["node0", "node1"]
    for service in services.values():
        command = service["command"]
        assert {"--nnodes=2", "--rdzv-endpoint=node0:29400", "train", "--resume"} <= set(command)
        assert service["networks"] == ["ranks"] and "shm_size" in service
        assert (ROOT / "docker" / service["build"]["dockerfile"].split("/")[1]).exists()


def test_each_container_has_as_many_gpus_as_processes():
    (found,) = documents(ROOT / "docker" / "compose.yaml")
    gpus = [gpus for service in found["services"].values() for gpus in find(service, "device_ids")]
    for service, its_gpus in zip(found["services"].values(), gpus, strict=True):
        assert f"--nproc-per-node={len(its_gpus)}" in service["command"]
    # The learning rate of the default config is for 8 GPUs.
    values = yaml.safe_load((ROOT / "configs/ms1mv3_r50.yaml").read_text())
    micro_batches = 8 * values["optim"]["accumulate"] // sum(map(len, gpus))
    assert f"--set=optim.accumulate=${{ACCUMULATE:-{micro_batches}}}" in service["command"]


def test_a_file_for_docker_compose_does_not_take_the_containers_of_another_one():
    names = {yaml.safe_load(path.read_text())["name"] for path in COMPOSE}
    assert len(names) == len(COMPOSE) and ROOT.joinpath("docker").name not in names


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_docker_compose_accepts_the_file(path):
    if shutil.which("docker-compose"):
        command = ["docker-compose"]
    elif subprocess.run(["sh", "-c", "docker compose version"], capture_output=True).returncode == 0:
        command = ["docker", "compose"]
    else:
        pytest.skip("docker compose is not installed")
    done = subprocess.run([*command, "-f", path, "config", "--quiet"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def image_instructions():
    """The instructions of the Dockerfile, each as a list of words."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and line[0].isupper()]


def test_the_image_is_pinned_runs_as_an_ordinary_user_and_has_a_health_check():
    instructions = [words[0] for words in image_instructions()]
    base = image_instructions()[0][1]
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base), "a release of Debian, too"
    assert instructions[0] == "FROM" and "HEALTHCHECK" in instructions
    assert ["RUN", *["pip", "install", "--require-hashes", "-r", "requirements.lock"]] in image_instructions()
    assert instructions.index("USER") > max(i for i, word in enumerate(instructions) if word == "RUN")
    assert ["USER", "1000"] in image_instructions(), "by its number, which runAsNonRoot can check"


def test_the_data_and_the_run_of_a_config_are_in_volumes_of_the_image():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (volumes,), (linked,) = (re.findall(each, text) for each in (r"VOLUME (\[.*\])", r"ln -s (.*) \. "))
    preset = load_config(ROOT / "configs" / "quickstart.yaml")
    used = {f"/{path.partition('/')[0]}" for path in (preset.data.train, preset.run.dir)}
    assert used <= set(linked.split()) <= set(json.loads(volumes))


def test_the_image_gets_what_runs_and_no_tools_of_developers():
    names = set(re.findall(r"^([\w.-]+)==", (ROOT / "docker/requirements.lock").read_text(), re.MULTILINE))
    assert {"torch", "onnxruntime", "s3fs"} <= names
    assert not names & {"pytest", "mypy", "moto", "ruff", "mkdocs", "mkdocs-material", "ipykernel"}


@pytest.mark.slow
def test_the_image_installs_from_the_files_that_it_copies(tmp_path):
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for copied in (words[1:] for words in image_instructions() if words[0] == "COPY"):
        *sources, target = copied
        assert let_through.issuperset(sources), "the build context lacks what is copied"
        for source in sources:
            place = tmp_path / "app" / target / ("" if (ROOT / source).is_dir() else Path(source).name)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)
    (install,) = [
        words for words in image_instructions() if words[1:5] == ["pip", "install", "--no-deps", "."]
    ]
    command = [*pip(), *install[2 : install.index("&&")], "--target", tmp_path / "installed"]
    done = subprocess.run(command, cwd=tmp_path / "app", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed/facetrain/config/presets/quickstart.yaml").is_file()
    assert list((tmp_path / "installed/facetrain/data/published_cards").glob("*.card.yaml"))
    assert (tmp_path / "app/requirements.lock").is_file()
