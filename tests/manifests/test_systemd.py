"""The files in deploy/systemd, read as systemd reads them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.server.http.activation import HTTP_NAME
from tiercel.settings.settings import SETTINGS, ServerSettings

UNMEASURED_STALL_S = 30.0  # of the engine, which is not imported here

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "systemd"
UNIT = FOLDER / "tiercel.service"
EXEC_START = "/opt/tiercel/bin/tiercel serve --config /etc/tiercel/tiercel.toml"
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0}


def read(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return values by section and name; a name may occur several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    fields: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            fields = sections.setdefault(line.strip("[]"), {})
            continue
        name, is_pair, value = line.partition("=")
        assert is_pair, line
        fields.setdefault(name, []).append(value)
    return sections


def service(name: str) -> str:
    (value,) = read(UNIT)["Service"][name]
    return value


def seconds(name: str) -> float:
    found = re.fullmatch(r"(\d+)(s|min)?", service(name))
    assert found, name
    return float(found[1]) * _UNITS[found[2] or ""]


def test_the_service_notifies_and_has_a_watchdog() -> None:
    assert (service("Type"), service("NotifyAccess")) == ("notify", "main")
    assert service("ExecStart") == EXEC_START
    assert service("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert read(UNIT)["Install"]["WantedBy"] == ["multi-user.target"]


def test_timeouts_fit_those_of_the_daemon() -> None:
    settings = ServerSettings(model="m", served_model_names=("m",))
    assert seconds("TimeoutStopSec") >= settings.shutdown_timeout_s + 20  # last bytes, the SSD tier, the engine
    assert seconds("WatchdogSec") > UNMEASURED_STALL_S  # a hung engine is restarted first
    assert seconds("TimeoutStartSec") >= 600


def test_the_service_restarts_after_a_failure_but_not_after_a_wrong_setting() -> None:
    assert (service("Restart"), service("RestartPreventExitStatus")) == ("on-failure", "2")
    assert (service("KillMode"), service("OOMPolicy")) == ("mixed", "continue")
    assert int(read(UNIT)["Unit"]["StartLimitBurst"][0]) > 1


def test_the_service_has_few_rights() -> None:
    wanted = {
        **dict.fromkeys(("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "LockPersonality"), "yes"),
        **dict.fromkeys(("ProtectClock", "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs"), "yes"),
        **dict.fromkeys(("ProtectKernelModules", "ProtectKernelTunables", "RestrictNamespaces"), "yes"),
        **dict.fromkeys(("RestrictRealtime", "RestrictSUIDSGID"), "yes"),
        "ProtectSystem": "strict",
        "CapabilityBoundingSet": "",
        "UMask": "0077",
        "StateDirectoryMode": "0700",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "SystemCallFilter": "@system-service",
    }
    assert {name: service(name) for name in wanted} == wanted
    assert (service("User"), service("Group")) == ("tiercel", "tiercel")
    assert "MemoryDenyWriteExecute" not in read(UNIT)["Service"]  # oneDNN writes code


def test_the_socket_is_the_one_that_the_daemon_looks_for() -> None:
    (listen,) = read(FOLDER / "tiercel.socket")["Socket"]["ListenStream"]
    settings = ServerSettings(model="m", served_model_names=("m",))
    assert listen == f"{settings.host}:{settings.port}"
    assert read(FOLDER / "tiercel.socket")["Socket"]["FileDescriptorName"] == [HTTP_NAME]
    assert read(FOLDER / "tiercel.socket")["Install"]["WantedBy"] == ["sockets.target"]


def test_the_variables_that_it_names_are_settings() -> None:
    named = set(re.findall(r"TIERCEL_([A-Z_]+)", UNIT.read_text(encoding="utf-8")))
    assert named == {"API_KEY", "ADMIN_KEY"} <= {name.upper() for name in SETTINGS}


def test_the_user_is_made_by_sysusers() -> None:
    lines = [line for line in (FOLDER / "tiercel.sysusers").read_text().splitlines() if not line.startswith("#")]
    assert [line.split()[:2] for line in lines] == [["u", service("User")]]


def test_a_gpu_needs_devices_and_nothing_else() -> None:
    names = ("nvidia", "nvidiactl", "nvidia-frontend", "nvidia-uvm", "nvidia-caps")  # as of /proc/devices
    assert read(FOLDER / "gpu.conf")["Service"] == {
        "PrivateDevices": ["no"],
        "DevicePolicy": ["closed"],
        "DeviceAllow": [f"char-{name} rw" for name in names],
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """The programs of the unit are not installed here; others replace them."""
    text = UNIT.read_text(encoding="utf-8").replace(EXEC_START, f"{sys.executable} -c pass")
    for path in (tmp_path / UNIT.name, tmp_path / f"{UNIT.name}.d" / "gpu.conf"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if path.name == UNIT.name else (FOLDER / "gpu.conf").read_text(encoding="utf-8"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name], capture_output=True, text=True, check=False
    )
    own = [line for line in ran.stderr.splitlines() if UNIT.stem in line or "gpu.conf" in line]
    assert (ran.returncode, own) == (0, [])
