"""The compose files, checked without an engine: known keys, valid references, containers without rights."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.docker.reading import BASE, DOCKER, DOCKERFILES, OVERLAYS, Tree, compose, last_stage, merged, seconds, text
from tests.docker.test_dockerfile import PROBE
from tiercel.settings.config import resolve
from tiercel.settings.engine_address import read_address, read_engines
from tiercel.settings.settings import SETTINGS
from tiercel.values.errors import ConfigError

# Keys of the compose specification that may be used here, so that a misspelt key is found.
TOP = {"name", "services", "volumes", "secrets"}
SERVICE: dict[str, type | tuple[type, ...]] = {
    "build": dict, "cap_drop": list, "command": list, "cpus": str, "depends_on": dict, "deploy": dict,
    "entrypoint": list, "environment": dict, "healthcheck": dict, "image": str, "init": bool, "logging": dict,
    "mem_limit": str, "pids_limit": int, "ports": list, "profiles": list, "read_only": bool, "restart": str,
    "secrets": list, "security_opt": list, "stop_grace_period": str, "stop_signal": str, "tmpfs": list,
    "ulimits": dict, "user": str, "volumes": list, "working_dir": str,
}  # fmt: skip
BUILD = {"context", "dockerfile", "args"}
CHECK = {"test", "interval", "timeout", "start_period", "retries", "disable"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
RESTARTS = {"no", "always", "on-failure", "unless-stopped"}
UNSAFE = {"privileged", "cap_add", "network_mode", "pid", "ipc", "userns_mode", "devices"}

ENV_NAMES = {f"TIERCEL_{name.upper()}" for name in SETTINGS}
FILES = (BASE, *OVERLAYS)
STACKS = [names for count in range(len(OVERLAYS) + 1) for names in combinations(OVERLAYS, count)]
each_file = pytest.mark.parametrize("name", FILES)
each_stack = pytest.mark.parametrize("names", STACKS, ids=lambda names: "+".join(names) or "alone")


def _services(*names: str) -> list[tuple[str, Tree]]:
    return list(merged(*names)["services"].items())


def _daemon(*names: str) -> Tree:
    service: Tree = merged(*names)["services"]["tiercel"]
    return service


def _strings(value: Any) -> list[str]:
    """Yield every text in a tree."""
    match value:
        case str():
            return [value]
        case dict():
            return [text for part in value.values() for text in _strings(part)]
        case list():
            return [text for part in value for text in _strings(part)]
        case _:
            return []


def _source(mount: str) -> str:
    """Return the source of a mount, with the default of a variable."""
    return re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")[0]


@each_file
def test_every_key_is_one_of_the_specification_and_has_its_type(name: str) -> None:
    assert compose(name).keys() <= TOP
    for service in compose(name)["services"].values():
        assert service.keys() <= SERVICE.keys()
        for key, value in service.items():
            assert isinstance(value, SERVICE[key]), f"{key}: {value!r}"
        assert service.get("build", {}).keys() <= BUILD
        assert service.get("healthcheck", {}).keys() <= CHECK
        assert service.get("restart", "no") in RESTARTS


@each_file
def test_every_variable_is_well_formed_and_has_a_default_or_a_reason(name: str) -> None:
    for value in _strings(compose(name)):
        rest = value
        while found := re.search(r"\$\{[A-Z_]+(:[-+][^${}]*|:?\?[^${}]+)\}", rest):
            rest = rest.replace(found[0], "")
        assert "$" not in rest, value


@each_stack
def test_every_name_refers_to_something_that_exists(names: tuple[str, ...]) -> None:
    tree = merged(*names)
    for service, keys in tree["services"].items():
        assert "image" in keys, service
        for other, how in keys.get("depends_on", {}).items():
            assert other in tree["services"]
            assert how["condition"] in CONDITIONS
        for mount in keys.get("volumes", []):
            source = _source(mount)
            assert (DOCKER / source).exists() if source.startswith("./") else source in tree["volumes"], mount
        assert set(keys.get("secrets", [])) <= tree.get("secrets", {}).keys()
        if "build" in keys:
            context = (DOCKER / keys["build"]["context"]).resolve()
            assert (context / keys["build"]["dockerfile"]).is_file()


@each_stack
def test_every_port_is_reachable_from_this_machine_only_and_once(names: tuple[str, ...]) -> None:
    ports = [port for _, service in _services(*names) for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":", 1)[1] for port in ports}) == len(ports)


@each_stack
def test_every_container_is_limited_and_has_no_rights(names: tuple[str, ...]) -> None:
    for name, service in _services(*names):
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert not UNSAFE & service.keys(), name


@pytest.mark.parametrize("name", ["tiercel", "loadtest"])
def test_our_containers_write_to_tmp_and_their_volume_only(name: str) -> None:
    service = compose(BASE)["services"][name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    written = [mount.split(":")[-1] for mount in service["volumes"] if not mount.endswith(":ro")]
    assert [path.startswith("/var/lib/tiercel") for path in written] == [True]


def test_models_and_settings_cannot_be_written() -> None:
    read = [mount.rsplit(":", 2)[1] for mount in _daemon()["volumes"] if mount.endswith(":ro")]
    assert read == ["/models", "/etc/tiercel"]


def test_the_ssd_tier_is_on_a_named_volume() -> None:
    folder = _daemon()["environment"]["TIERCEL_KV_DISK_PATH"]
    (volume,) = [_source(mount) for mount in _daemon()["volumes"] if folder.startswith(mount.split(":")[-1])]
    assert volume in compose(BASE)["volumes"]


def test_only_the_daemon_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`logs` and `down` work in a shell without a key; the daemon refuses to start without one."""
    monkeypatch.chdir(tmp_path)
    assert _daemon()["environment"]["TIERCEL_API_KEY"] == "${TIERCEL_API_KEY:-}"
    monkeypatch.setenv("TIERCEL_API_KEY", "")
    for name in DOCKERFILES:
        program, verb, flag, host = json.loads(last_stage(name)["ENTRYPOINT"])
        assert (program, verb, flag) == ("tiercel", "serve", "--host")
        with pytest.raises(ConfigError, match="give --api-key or --tenants-config"):
            resolve({"host": host})


def test_a_variable_for_the_host_is_not_one_that_the_daemon_reads_otherwise() -> None:
    """`tiercel` may be started in the shell that exports the variables for compose."""
    assert not [mount for mount in _daemon()["volumes"] for name in ENV_NAMES if f"${{{name}:" in mount]


@pytest.mark.parametrize("name", ["tiercel", "loadtest"])
def test_signals_reach_a_program_that_has_no_handler_yet(name: str) -> None:
    assert compose(BASE)["services"][name]["init"] is True


def test_compose_has_the_health_check_of_the_image() -> None:
    assert _daemon()["healthcheck"]["test"] == ["CMD", *PROBE]


def test_the_drain_ends_before_the_grace_period() -> None:
    least_s = SETTINGS["shutdown_timeout"].default + 20  # for last bytes, the SSD tier, the engine, and traces
    assert seconds(_daemon()["stop_grace_period"]) >= least_s
    (other,) = re.findall(r"--stop-timeout (\d+)", text("README.md"))
    assert int(other) >= least_s


@each_stack
def test_every_setting_exists(names: tuple[str, ...]) -> None:
    for name in ("tiercel", "loadtest"):
        settings = {key.removeprefix("TIERCEL_").lower() for key in merged(*names)["services"][name]["environment"]}
        assert settings <= SETTINGS.keys()


def test_the_load_test_waits_for_health_and_is_not_started_by_itself() -> None:
    service = compose(BASE)["services"]["loadtest"]
    assert service["profiles"] == ["loadtest"]
    assert service["depends_on"] == {"tiercel": {"condition": "service_healthy"}}
    assert service["image"] == _daemon()["image"]


def test_the_device_is_reserved_for_the_daemon_alone() -> None:
    service = _daemon("compose.gpu.yaml")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert len(device["device_ids"]) == 1
    assert service["build"]["dockerfile"] == "docker/Dockerfile.cuda"
    assert service["build"]["context"] == ".."
    assert service["environment"]["TIERCEL_DEVICE"] == "cuda"
    assert service["environment"]["TIERCEL_API_KEY"]
    assert service["ulimits"]["memlock"] == -1  # the copy engines need locked host memory


def test_the_engines_of_the_fleet_are_those_of_the_front_and_of_the_certificate() -> None:
    services = merged("compose.fleet.yaml")["services"]
    engines = [name for name in services if name.startswith("engine-")]
    listen = read_address(services[engines[0]]["entrypoint"][-1], "--listen")
    addresses = read_engines(services["tiercel"]["environment"]["TIERCEL_ENGINES"]).addresses
    assert [(one.host, one.port) for one in addresses] == [(name, listen.port) for name in engines]
    assert services["certificates"]["entrypoint"][2:] == engines
    assert len({_source(mount) for name in engines for mount in services[name]["volumes"]}) == 2 + len(engines)


def test_prometheus_and_grafana_find_their_files_where_they_look() -> None:
    services = merged("compose.observability.yaml")["services"]
    prometheus = text("observability/prometheus.yml")
    mounted = {mount.split(":")[1] for mount in services["prometheus"]["volumes"]}
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    rules = re.findall(r"^\s+- (/\S+)/\*\.yml$", prometheus, re.MULTILINE)
    assert rules
    assert {"/etc/prometheus/prometheus.yml", *rules} <= mounted
    (secret,) = services["prometheus"]["secrets"]
    assert f"credentials_file: /run/secrets/{secret}" in prometheus
    assert '"tiercel:8000"' in prometheus
    boards = text("observability/grafana/provisioning/dashboards/tiercel.yml")
    folder = re.findall(r"^\s+path: (\S+)$", boards, re.MULTILINE)
    assert folder
    assert set(folder) <= {mount.split(":")[1] for mount in services["grafana"]["volumes"]}
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(text(f"observability/grafana/dashboards/{home.rsplit('/', 1)[1]}"))["title"]
