"""The recipes: options and fields that exist, and what both sides have to share."""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.documents import ROOT, commands, text

RECIPES = ROOT / "docs" / "recipes"
BATCH = RECIPES / "slurm" / "train-and-serve.sbatch"
MANIFESTS = sorted((RECIPES / "kubernetes").glob("*.yaml"))


def as_kubernetes_reads_it(one: dict[str, Any]) -> Any:
    """Returns the fields of an object that its type in Kubernetes' API has. A field of another type raises."""
    group, _, version = one["apiVersion"].rpartition("/")
    types = importlib.import_module(f"lightkube.models.{group or 'core'}_{version}")
    return msgspec.to_builtins(msgspec.convert(one, getattr(types, one["kind"])))


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in objects(path) if one["kind"] in ("Job", "Deployment")]


def containers(path: Path) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for pod in pods(path) for c in (*pod.get("initContainers", ()), *pod["containers"])}


def lasting(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers that run all the time: the pod's own, and sidecars."""
    return [c for c in pod.get("initContainers", ()) if c.get("restartPolicy") == "Always"] + pod["containers"]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_field_of_a_manifest_exists(path: Path) -> None:
    for one in objects(path):
        assert as_kubernetes_reads_it(one) == one


def test_a_field_that_does_not_exist_is_found() -> None:
    good = objects(RECIPES / "kubernetes" / "one-pod.yaml")[0]
    misspelt = copy.deepcopy(good)
    misspelt["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    assert as_kubernetes_reads_it(misspelt) == good
    good["spec"]["backoffLimit"] = "0"
    with pytest.raises(msgspec.ValidationError, match="backoffLimit"):
        as_kubernetes_reads_it(good)


@pytest.mark.parametrize("path", MANIFESTS[1:], ids=lambda path: path.name)
def test_names_within_a_manifest_refer_to_something(path: Path) -> None:
    secrets = {one["metadata"]["name"]: one["stringData"] for one in objects(MANIFESTS[0])}
    for pod in pods(path):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", ())}
                assert keys <= secrets[volume["secret"]["secretName"]].keys()
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            for value in environment(container).values():
                if isinstance(value, dict):
                    assert value["secretKeyRef"]["key"] in secrets[value["secretKeyRef"]["name"]]
            used = re.findall(r"\$\((\w+)\)", " ".join(container["args"]))
            assert set(used) <= {*environment(container), "JOB_COMPLETION_INDEX"}


def test_the_page_makes_the_secrets_that_the_manifests_want() -> None:
    secrets = {one["metadata"]["name"]: one["stringData"].keys() for one in objects(MANIFESTS[0])}
    made = [line for line in commands("docs/recipes/kubernetes.md") if line.startswith("kubectl create secret ")]
    assert [line.split()[4] for line in made] == list(secrets)
    assert set(re.findall(r"--from-literal=(\w+)=", made[0])) == secrets["reshard-keys"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_key_is_in_a_manifest(path: Path) -> None:
    for one in objects(path):
        assert not any(one.get("stringData", {}).values())
    for container in containers(path).values():
        assert all(isinstance(v, dict) for n, v in environment(container).items() if n.endswith("_KEY"))
        assert all("$(" in argument for argument in container["args"] if "api-key=" in argument)


@pytest.mark.parametrize("path", MANIFESTS[1:], ids=lambda path: path.name)
def test_both_sides_have_room_and_the_same_settings(path: Path) -> None:
    for pod in pods(path):
        memory = {v["name"]: v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v}
        for container in lasting(pod):
            shm = next(mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
            assert memory[shm]["medium"] == "Memory"
            limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
            assert int(memory[shm]["sizeLimit"].removesuffix("Gi")) < limit
    engine, trainer = (environment(containers(path)[name]) for name in ("engine", "trainer"))
    names = {name for name in {*engine, *trainer} if name.split("_")[0] in ("NCCL", "GLOO", "UCX")}
    assert "NCCL_CUMEM_ENABLE" in names
    assert {name: engine.get(name) for name in names} == {name: trainer.get(name) for name in names}


def test_the_pod_shares_what_reading_memory_needs() -> None:
    (pod,) = pods(RECIPES / "kubernetes" / "one-pod.yaml")
    assert pod["shareProcessNamespace"]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert all("securityContext" not in container for container in (*pod["initContainers"], *pod["containers"]))
    assert "--host=127.0.0.1" in pod["initContainers"][0]["args"]


def test_the_two_workloads_speak_https() -> None:
    path = RECIPES / "kubernetes" / "two-workloads.yaml"
    engine, trainer = (containers(path)[name] for name in ("engine", "trainer"))
    assert environment(trainer)["SGLANG_RESHARD_URL"].startswith("https://engine-updates:")
    assert environment(containers(path)["engine-answers"]).items() <= environment(trainer).items()
    assert engine["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert {"--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"} <= set(engine["args"])
    assert "tls.key" not in str(pods(path)[1])  # the trainer needs the certificate alone


def engine_options(words: str) -> set[str]:
    return {option.replace("-", "_") for option in re.findall(r"--([a-z][\w-]+)", words)}


def test_options_of_servers_are_sglangs() -> None:
    known = set(re.findall(r"`(\w+)`", text("docs/server-args.md")))
    of_slurm = re.search(r"sglang serve (.*?) &\n", BATCH.read_text(), re.S)
    assert of_slurm is not None
    given = engine_options(of_slurm[1])
    for path in MANIFESTS[1:]:
        given |= engine_options(" ".join(containers(path)["engine"]["args"]))
    assert len(given) > 7
    assert given <= known


def test_options_of_torchrun_are_torchs() -> None:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    of_slurm = re.search(r"^  torchrun (.*?)\"\$TRAIN\"", BATCH.read_text(), re.S | re.M)
    assert of_slurm is not None
    words = [of_slurm[1], *(" ".join(containers(path)["trainer"]["args"]) for path in MANIFESTS[1:])]
    given = {option for one in words for option in re.findall(r"--[a-z][\w-]+", one)}
    assert len(given) > 4
    assert given <= known


def run_batch(folder: Path, stand_ins: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with stand-ins for Slurm's commands."""
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    common = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "MODEL": "m", "TRAIN": "train.py"}
    environment = common | variables | {"SLURM_JOB_NODELIST": "list", "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", str(BATCH)], env=environment, capture_output=True, text=True, timeout=60)


def test_the_batch_script_refuses_too_few_nodes(tmp_path: Path) -> None:
    ended = run_batch(tmp_path, {"scontrol": "echo node1"})
    assert ended.returncode == 2
    assert "leaves no node for one of the two sides" in ended.stderr


def test_the_batch_script_starts_servers_then_the_trainer(tmp_path: Path) -> None:
    """The stand-ins write down how they are called."""
    calls = tmp_path / "calls"
    stand_ins = {
        "scontrol": "printf 'a1\\na2\\nb1\\nb2\\n'",
        "srun": f"""printf '%s\\n' "srun $* | url=${{SERVER_URLS:-}}" >> {calls}
                    case "$*" in *serve*) exec sleep 30;; esac""",
        "curl": f"""printf '%s\\n' "curl $*" >> {calls}""",
        "openssl": """case "$1" in rand) echo 00ff; exit;; esac
                      for last; do :; done; touch "$last" "${last%.crt}.key" """,
    }
    ended = run_batch(tmp_path, stand_ins, SERVERS="2")
    assert ended.returncode == 0, ended.stderr
    told = calls.read_text().splitlines()
    servers = [line for line in told if "sglang serve" in line]
    assert sorted(re.findall(r"--nodelist=(\S+)", " ".join(servers))) == ["a1", "a2"]
    assert sum(line.startswith("curl") for line in told) >= 2
    doctor, trainer = (line for line in told if line.startswith("srun") and "sglang serve" not in line)
    assert "--nodelist=b1 sglang-reshard doctor --url https://a1:30000" in doctor
    assert "--nodelist=b1,b2 torchrun --nnodes=2" in trainer
    assert trainer.endswith("url=https://a1:30000 https://a2:30000")
    assert not list(tmp_path.glob(".reshard-*")), "the keys are removed at the end"
