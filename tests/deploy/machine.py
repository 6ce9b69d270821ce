"""Requirements on the machine: namespaces, Debian packages, the plug-ins of the Docker client."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

APT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "tini": "tini",
    "ip": "iproute2",
    "busybox": "busybox-static",
    "debootstrap": "debootstrap",
}
"""What the tests run, and the package that has it."""
PLUGINS = ("docker-compose", "docker-buildx")
PLUGIN_SUITE = "trixie"  # the first Debian with Compose 2; its programs are static enough to run on older ones
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PRIVATE = ("--net", "--mount", "--propagation=private", "--cgroup", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
"""Arguments of `unshare`: nothing that the engine does reaches the machine's own networks, mounts and processes."""


class NoEngineError(Exception):
    """No Docker engine can run here; the text has the reason."""


class CommandError(Exception):
    """A command failed; the text has its last lines."""


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, patience_s: float = 600.0
) -> str:
    """Run a command and return its output. Errors: CommandError."""
    words = [str(word) for word in command]
    try:
        ran = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=patience_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise CommandError(f"{words[0]}: {exc}") from exc
    if ran.returncode:
        said = " | ".join((ran.stderr or ran.stdout).strip().splitlines()[-3:])
        raise CommandError(f"`{' '.join(words[:6])}` ended with {ran.returncode}: {said}")
    return ran.stdout


def require_namespaces() -> None:
    """Check quickly that the kernel has the features that an engine needs. Errors: NoEngineError, CommandError."""
    if os.geteuid():
        raise NoEngineError("an engine of our own needs root")
    if shutil.which("unshare") is None:
        raise NoEngineError("there is no `unshare` (package util-linux)")
    overlay = (
        "mount -t tmpfs tmpfs /run && mkdir /run/a /run/b /run/c /run/d"
        " && mount -t overlay overlay -o lowerdir=/run/a,upperdir=/run/b,workdir=/run/c /run/d"
    )
    run(["unshare", *PRIVATE, "sh", "-c", overlay], patience_s=20)
    if not os.access("/sys/fs/cgroup", os.W_OK) or not any(Path("/sys/fs/cgroup").iterdir()):
        raise NoEngineError("control groups cannot be written: /sys/fs/cgroup")


def install_programs() -> None:
    """Install missing programs with apt. Errors: NoEngineError, CommandError."""
    packages = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if not KEYRING.exists():
        packages.append("debian-archive-keyring")
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise NoEngineError(f"missing, and there is no apt to install them: {', '.join(packages)}")
    run(["apt-get", "update", "-qq"], environment=APT)
    run(["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *packages], environment=APT)
    if shutil.which("docker") is None:  # from Debian 13 on docker.io comes without the client
        run(["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "docker-cli"], environment=APT)


def debian_mirror() -> str | None:
    """Return the Debian mirror of this machine's apt, or None if it is not Debian."""
    listed = run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)", "Created-By: Packages"])
    for line in listed.splitlines():
        origin, name, uri = line.split(" ", 2)
        if origin == "Debian" and "-" not in name:
            return uri
    return None


def fetch_plugins(folder: Path) -> None:
    """Put Compose and Buildx into `folder`/cli-plugins unless the client or the folder has them.

    Nothing is installed: the packages of a newer Debian are unpacked beside the machine's own.

    Errors: NoEngineError, CommandError.
    """
    missing = [name for name in PLUGINS if not _has_plugin(folder, name)]
    if not missing:
        return
    mirror = debian_mirror()
    if mirror is None:
        raise NoEngineError(f"the Docker client has no plug-in {', '.join(missing)}")
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "debs", "unpacked"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {PLUGIN_SUITE} main\n", encoding="utf-8")
    options = [
        f"Dir::Etc::sourcelist={apt}/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State::lists={apt}/lists",
        f"Dir::Cache={apt}/cache",
        "APT::Sandbox::User=root",
        "Acquire::Languages=none",
    ]
    command = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run([*command, "update"])
    run(["sh", "-c", 'cd "$0" && shift 0 && exec "$@"', apt / "debs", *command, "download", *missing])
    plugins = folder / "cli-plugins"
    plugins.mkdir(exist_ok=True)
    for package in (apt / "debs").glob("*.deb"):
        run(["dpkg", "-x", package, apt / "unpacked"])
    for name in missing:
        shutil.copy2(apt / "unpacked/usr/libexec/docker/cli-plugins" / name, plugins / name)
    shutil.rmtree(apt)


def _has_plugin(folder: Path, name: str) -> bool:
    environment = {**os.environ, "DOCKER_CONFIG": str(folder)}
    try:
        run(["docker", name.removeprefix("docker-"), "version"], environment=environment, patience_s=30)
    except CommandError:
        return False
    return True
