"""The manifests in deploy/kubernetes/fleet: consistency among them, with the image and with fronts and engines."""

import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiercel.server.tenancy.tenant_file import load_tenant_file
from tiercel.settings.config import resolve
from tiercel.settings.engine_address import DEFAULT_PORT, read_address, read_engines
from tiercel.settings.settings import Settings
from tiercel.values.units import parse_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes" / "fleet"
NAME = "app.kubernetes.io/name"
PART = "app.kubernetes.io/component"
PARTS = {"front": ("Deployment", "tiercel-front"), "engine": ("StatefulSet", "tiercel-engine")}

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


def pod(part: str) -> Tree:
    return manifests()[PARTS[part]]["spec"]["template"]["spec"]


def container(part: str) -> Tree:
    (only,) = pod(part)["containers"]
    return only


def settings_text(part: str) -> str:
    return manifests()["ConfigMap", f"tiercel-{part}"]["data"]["tiercel.toml"]


def labels(part: str) -> dict[str, str]:
    return {NAME: "tiercel", PART: part}


def resolved(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Read the settings as the pod does, with the mounted files in `folder`."""
    for name in ("config.json", "secret", "ca.pem", f"{part}.pem", f"{part}.key"):
        (folder / name).write_text("{}")
    (folder / "tenants.yaml").write_text(manifests()["Secret", "tiercel-tenants"]["stringData"]["tenants.yaml"])
    text = settings_text(part).replace("/run/fleet", str(folder)).replace("/etc/tiercel-tenants", str(folder))
    file = folder / "tiercel.toml"
    file.write_text(text)
    monkeypatch.setattr("os.environ", {"HOME": str(folder)})
    host = {"host": "0.0.0.0"} if part == "front" else {}
    return resolve({"config": str(file), "model": str(folder), **host}).settings


def test_every_file_is_listed_and_every_object_belongs_to_a_part() -> None:
    written = {path.name for path in FOLDER.glob("*.yaml")}
    assert written == {"kustomization.yaml", "prometheus-adapter-values.yaml", *kustomization()["resources"]}
    assert {(tree["apiVersion"], kind) for (kind, _), tree in manifests().items()} == {
        ("v1", "ConfigMap"),
        ("v1", "Secret"),
        ("v1", "Service"),
        ("apps/v1", "Deployment"),
        ("apps/v1", "StatefulSet"),
        ("autoscaling/v2", "HorizontalPodAutoscaler"),
        ("policy/v1", "PodDisruptionBudget"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
    }
    assert all(tree["metadata"]["labels"] in (labels("front"), labels("engine")) for tree in manifests().values())


@pytest.mark.parametrize("part", PARTS)
def test_everything_selects_the_pods_of_its_part(part: str) -> None:
    own = labels(part)
    spec = manifests()[PARTS[part]]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == own
    assert manifests()["PodDisruptionBudget", f"tiercel-{part}"]["spec"]["selector"]["matchLabels"] == own
    assert manifests()["NetworkPolicy", f"tiercel-{part}"]["spec"]["podSelector"]["matchLabels"] == own
    service = manifests()["Service", {"front": "tiercel", "engine": "tiercel-engines"}[part]]["spec"]
    assert service["selector"] == own
    assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in container(part)["ports"]}


def test_only_fronts_reach_engines() -> None:
    (rule,) = manifests()["NetworkPolicy", "tiercel-engine"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels("front")}}]
    assert manifests()["NetworkPolicy", "tiercel-engine"]["spec"]["egress"] == []
    (to_engines, _) = manifests()["NetworkPolicy", "tiercel-front"]["spec"]["egress"]
    assert to_engines["to"] == [{"podSelector": {"matchLabels": labels("engine")}}]
    assert to_engines["ports"] == [{"port": DEFAULT_PORT}]


def test_fronts_look_up_the_service_at_which_engines_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = manifests()["Service", "tiercel-engines"]["spec"]
    command = container("engine")["command"]
    with monkeypatch.context() as patch:
        settings = resolved("front", tmp_path, patch)
    assert settings.server.engines is not None
    (address,) = read_engines(settings.server.engines).addresses
    assert address.is_name
    assert ("Service", address.host) in manifests()
    assert service["clusterIP"] == "None"
    assert command[:3] == ["tiercel", "engine", "--listen"]
    ports = {address.port, service["ports"][0]["port"], container("engine")["ports"][0]["containerPort"]}
    assert ports == {read_address(command[3], "--listen").port}
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert f"docker/fleet/certificates.sh {address.host}" in page  # the name in the certificate


@pytest.mark.parametrize("part", PARTS)
def test_the_settings_name_files_that_are_mounted(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = {volume["name"]: volume for volume in pod(part)["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(part)["volumeMounts"]}
    claims = manifests()[PARTS[part]]["spec"].get("volumeClaimTemplates", [])
    assert set(mounts) == {*volumes, *(claim["metadata"]["name"] for claim in claims)}
    fleet = {f"{mounts['fleet']}/{item['path']}" for item in volumes["fleet"]["secret"]["items"]}
    assert set(re.findall(r'"(/run/fleet/[^"]+)"', settings_text(part))) == fleet
    assert volumes["fleet"]["secret"]["defaultMode"] == 0o440  # a secret that everybody may read is refused
    assert volumes["config"]["configMap"]["name"] == f"tiercel-{part}"
    with monkeypatch.context() as patch:
        settings = resolved(part, tmp_path, patch)
    grace_s = pod(part)["terminationGracePeriodSeconds"]
    assert grace_s >= settings.server.shutdown_timeout_s + 20
    if part == "engine":
        limits, (claim,) = container(part)["resources"]["limits"], claims
        assert str(settings.engine.threads) == limits["cpu"]
        assert limits == container(part)["resources"]["requests"]
        assert settings.engine.kv_disk_bytes < parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B")
        paths = [*tomllib.loads(settings_text(part))["kv-disk-path"], container(part)["env"][0]["value"]]
        assert all(path.startswith(mounts["state"] + "/") for path in paths)
    else:
        assert f'"{mounts["tenants"]}/tenants.yaml"' in settings_text(part)
        assert load_tenant_file(tmp_path / "tenants.yaml").tenants


@pytest.mark.parametrize("part", PARTS)
def test_the_pods_have_few_rights(part: str) -> None:
    context, own = pod(part)["securityContext"], container(part)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(part)["automountServiceAccountToken"] is False
    assert pod(part)["enableServiceLinks"] is False


def test_the_autoscaler_scales_the_engines_on_predicted_work() -> None:
    spec = manifests()["HorizontalPodAutoscaler", "tiercel-engine"]["spec"]
    target = spec["scaleTargetRef"]
    assert manifests()[target["kind"], target["name"]]["apiVersion"] == target["apiVersion"]
    assert "replicas" not in manifests()[target["kind"], target["name"]]["spec"]  # else each apply resets the number
    assert spec["minReplicas"] >= 2
    (metric,) = spec["metrics"]
    values = yaml.safe_load((FOLDER / "prometheus-adapter-values.yaml").read_text(encoding="utf-8"))
    (rule,) = values["rules"]["external"]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    assert f"`{rule['seriesQuery']}`" in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert rule["metricsQuery"].startswith(f"sum({rule['seriesQuery']}{{")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kustomize_puts_them_together() -> None:
    ran = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    assert len(list(yaml.safe_load_all(ran.stdout))) == len(manifests())
