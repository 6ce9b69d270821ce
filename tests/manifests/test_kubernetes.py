"""The manifests in deploy/kubernetes: consistency among them, with the image and with the daemon."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiercel.embedded import MODEL_DIR
from tiercel.server.api.routes.operations import OperationsRoutes
from tiercel.server.composition import build_context
from tiercel.server.tenancy.tenant_file import load_tenant_file
from tiercel.settings.config import resolve
from tiercel.settings.settings import SETTINGS, ServerSettings
from tiercel.values.units import parse_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
SELECTOR = {"app.kubernetes.io/name": "tiercel"}

# Any: what a YAML file holds is known only once it is read
Tree = dict[str, Any]


@cache
def kustomization() -> Tree:
    return yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))


@cache
def manifests() -> dict[tuple[str, str], Tree]:
    """Return every object by kind and name."""
    found: dict[tuple[str, str], Tree] = {}
    for name in kustomization()["resources"]:
        for tree in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")):
            key = (tree["kind"], tree["metadata"]["name"])
            assert key not in found
            found[key] = tree
    return found


def stateful_set() -> Tree:
    return manifests()["StatefulSet", "tiercel"]["spec"]


def pod() -> Tree:
    return stateful_set()["template"]["spec"]


def container() -> Tree:
    (only,) = pod()["containers"]
    return only


def settings_text() -> str:
    return manifests()["ConfigMap", "tiercel"]["data"]["tiercel.toml"]


def test_every_file_is_listed_and_every_object_has_a_known_version() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {"kustomization.yaml", *kustomization()["resources"]}
    assert {(tree["apiVersion"], kind) for (kind, _), tree in manifests().items()} == {
        ("v1", "ConfigMap"),
        ("v1", "Secret"),
        ("v1", "Service"),
        ("apps/v1", "StatefulSet"),
        ("policy/v1", "PodDisruptionBudget"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
    }
    assert all(tree["metadata"]["labels"] == SELECTOR for tree in manifests().values())


def test_everything_selects_the_pods_of_the_stateful_set() -> None:
    assert stateful_set()["selector"]["matchLabels"] == SELECTOR
    assert stateful_set()["template"]["metadata"]["labels"] == SELECTOR
    assert manifests()["PodDisruptionBudget", "tiercel"]["spec"]["selector"]["matchLabels"] == SELECTOR
    assert manifests()["NetworkPolicy", "tiercel"]["spec"]["podSelector"]["matchLabels"] == SELECTOR
    services = [tree["spec"] for (kind, _), tree in manifests().items() if kind == "Service"]
    assert [spec["selector"] for spec in services] == [SELECTOR, SELECTOR]
    ports = {port["name"] for port in container()["ports"]}
    assert {port["targetPort"] for spec in services for port in spec["ports"]} <= ports
    headless = manifests()["Service", stateful_set()["serviceName"]]["spec"]
    assert headless["clusterIP"] == "None"


def test_the_probes_ask_routes_that_need_no_key() -> None:
    context = build_context(ServerSettings(model=str(MODEL_DIR), served_model_names=("m",)))
    routes = {route.path for route in OperationsRoutes(context).open_routes()}
    context.close()
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health/live",
    }
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= routes
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600


def test_there_is_time_for_the_drain() -> None:
    pause, drain_s = container()["lifecycle"]["preStop"]["exec"]["command"], tomllib.loads(settings_text())
    assert pause[0] == "sleep"
    assert pod()["terminationGracePeriodSeconds"] >= int(pause[1]) + drain_s["shutdown-timeout"] + 20


def test_the_pod_has_few_rights() -> None:
    context, own = pod()["securityContext"], container()["securityContext"]
    (uid,) = set(re.findall(r"--uid (\d+)", DOCKERFILE))
    assert context["runAsNonRoot"] is True
    assert {context["runAsUser"], context["runAsGroup"], context["fsGroup"]} == {int(uid)}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert "hostNetwork" not in pod()
    policy = manifests()["NetworkPolicy", "tiercel"]["spec"]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])


def test_a_new_mount_does_not_open_the_folder_of_the_ssd_tier() -> None:
    """Else the kubelet would make the folder writable for the group, and the daemon refuses such a folder."""
    assert pod()["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_every_mount_has_its_volume_and_written_folders_are_mounted() -> None:
    claims = {claim["metadata"]["name"] for claim in stateful_set()["volumeClaimTemplates"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: mount for mount in container()["volumeMounts"]}
    assert set(mounts) == claims | set(volumes)
    assert volumes["config"]["configMap"]["name"] == "tiercel"
    assert ("Secret", volumes["tenants"]["secret"]["secretName"]) in manifests()
    assert mounts["config"]["mountPath"] == re.findall(r"^WORKDIR (/etc/\S+)", DOCKERFILE, flags=re.MULTILINE)[-1]
    written = [*tomllib.loads(settings_text())["kv-disk-path"], container()["env"][0]["value"]]
    assert all(path.startswith(mounts["state"]["mountPath"] + "/") for path in written)
    assert mounts["tmp"]["mountPath"] == "/tmp"


def test_the_image_is_the_one_that_docker_builds() -> None:
    (image,) = kustomization()["images"]
    assert container()["image"] == image["name"]
    compose = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    assert f"{image['newName']}:{image['newTag']}" in compose
    assert "command" not in container()
    assert "args" not in container()


def test_the_settings_are_settings_and_fit_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("TIERCEL_", "VLLM_")):
            monkeypatch.delenv(name)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tenants.yaml").write_text(manifests()["Secret", "tiercel-tenants"]["stringData"]["tenants.yaml"])
    mounted = next(mount["mountPath"] for mount in container()["volumeMounts"] if mount["name"] == "tenants")
    text = settings_text()
    assert f'tenants-config = "{mounted}/tenants.yaml"' in text
    file = tmp_path / "tiercel.toml"
    file.write_text(text.replace(mounted, str(tmp_path)))
    settings = resolve({"config": str(file), "model": str(tmp_path), "host": "0.0.0.0"}).settings
    limits, requests = (container()["resources"][kind] for kind in ("limits", "requests"))
    assert str(settings.engine.threads) == limits["cpu"]
    assert limits == requests  # so that the pod is not among the first to be evicted
    (claim,) = stateful_set()["volumeClaimTemplates"]
    assert settings.engine.kv_disk_bytes < parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B")


def test_the_tenants_are_valid_and_have_no_known_key(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(manifests()["Secret", "tiercel-tenants"]["stringData"]["tenants.yaml"])
    config = load_tenant_file(file)
    digests = [*config.admin_digests, *(digest for tenant in config.tenants for digest in tenant.digests)]
    assert len(digests) == 3
    assert all(len(set(digest)) == 1 for digest in digests)  # digests of no real key


def test_no_variable_of_a_service_is_taken_for_a_setting() -> None:
    assert pod()["enableServiceLinks"] is False
    named = {one["name"] for one in container()["env"] if one["name"].startswith("TIERCEL_")}
    assert named <= {f"TIERCEL_{name.upper()}" for name in SETTINGS}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kustomize_puts_them_together() -> None:
    ran = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    built = list(yaml.safe_load_all(ran.stdout))
    assert len(built) == len(manifests())
    (only,) = [tree for tree in built if tree["kind"] == "StatefulSet"]
    (image,) = [one["image"] for one in only["spec"]["template"]["spec"]["containers"]]
    assert image == "tiercel:cpu"


@pytest.mark.skipif(shutil.which("kubeconform") is None, reason="there is no kubeconform here")
def test_kubeconform_finds_nothing_wrong() -> None:
    files = [str(FOLDER / name) for name in kustomization()["resources"]]
    ran = subprocess.run(["kubeconform", "-strict", "-output", "json", *files], capture_output=True, text=True)
    assert ran.returncode == 0, json.loads(ran.stdout)
