"""Claims of the README, the Makefile and the other files beside the code."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

from tiercel import __version__
from tiercel.cli.chat import chat
from tiercel.cli.collect_env import collect_env
from tiercel.cli.flags import with_settings
from tiercel.cli.serve import serve
from tiercel.settings.settings import SETTINGS
from tiercel.settings.vllm_flags import CONFIGS, HARMLESS, REFUSED

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def _commands(page: str) -> list[list[str]]:
    text = "\n".join(_blocks(page, "sh")).replace("\\\n", " ")
    lines = re.sub(r"'[^'\n]*\n[^']*'", "''", text).splitlines()  # bodies of requests are quoted over lines
    commands = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in commands if words]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def _flags_by_verb() -> dict[str, set[str]]:
    """Return the flags of every verb as known to typer."""
    app = typer.Typer()
    app.command("serve")(with_settings(serve, "all"))
    app.command("chat")(chat)
    app.command("collect-env")(collect_env)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    flags = {
        verb: {option for parameter in command.params for option in parameter.opts}
        for verb, command in group.commands.items()
    }
    switches = {f"--no-{option.key}" for option in SETTINGS.values() if option.is_switch}
    flags["serve"] |= switches | {"--help"}
    return flags | {"check": flags["serve"]}


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_on_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {target for words in _commands(page) if words[0] == "make" for target in words[1:]}
    named |= set(re.findall(r"`make ([a-z-]+)", text))
    assert named <= _targets()


@pytest.mark.parametrize("page", PAGES)
def test_every_tiercel_command_on_a_page_exists_with_its_flags(page: str) -> None:
    flags_by_verb = _flags_by_verb()
    for words in _commands(page):
        if not words[0].endswith("tiercel"):
            continue
        verb, *rest = words[1:]
        assert verb in flags_by_verb
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= flags_by_verb[verb]


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_in_the_text_of_a_page_exists(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", prose))
    known = set().union(*_flags_by_verb().values(), (f"--{name}" for name in (*REFUSED, *HARMLESS, *CONFIGS)))
    assert named <= known


def test_every_variable_in_the_readme_is_a_setting() -> None:
    named = set(re.findall(r"\bTIERCEL_([A-Z_]+)", README))
    assert named <= {name.upper() for name in SETTINGS}


def test_the_settings_file_in_the_readme_holds_settings() -> None:
    (content,) = _blocks("README.md", "toml")
    assert {key.replace("-", "_") for key in tomllib.loads(content)} <= set(SETTINGS)


def test_the_python_in_the_readme_compiles() -> None:
    for block in _blocks("README.md", "python"):
        compile(block, "README.md", "exec")


def test_the_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert not [link for link in links if not (ROOT / link).exists()]


def test_ci_accepts_no_missing_program() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    makes = [line.removeprefix("exec ") for line in lines if re.match(r"(exec )?make ", line)]
    assert makes == [
        "make test TOOLS=required",
        "make test-slow TOOLS=required",
        "make faults-quick",
        "make soak",
        "make test-clients CLIENTS='openai langchain' TOOLS=required",
        "make test-cluster",
        "make test-ui BROWSER=required",
        "make test-deploy ENGINE=required",
    ]


def test_every_target_is_documented_and_independent_of_the_folder() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "help"], cwd="/", capture_output=True, text=True, check=True
    )
    assert {line.split()[1] for line in shown.stdout.splitlines()} == _targets()


def test_the_changelog_has_a_place_for_the_next_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changelog, flags=re.MULTILINE)
    sections = set(re.findall(r"^### (.+)$", changelog, flags=re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_constraints_pin_every_dependency_and_satisfy_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    written = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in written if not line.startswith("#"))
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins.values())
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = [*project["dependencies"], *extras]
    names = {re.split(r"[\[><=;~! ]", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= {name.lower().replace("_", "-") for name in pins}


def _name(line: str) -> str:
    """The name of a requirement, as pip compares it."""
    return re.split(r"[\[><=;~! ]", line)[0].lower().replace("_", "-").replace(".", "-")


def test_the_lock_has_hashes_for_the_versions_of_the_constraints() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    entries = [line for line in lock if line and not line.startswith("#")]
    written = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {_name(line): line.split("==")[1] for line in written if not line.startswith("#")}
    assert {_name(line): line.split()[0].split("==")[1] for line in entries}.items() <= pins.items()
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}(\s|$)", line) for line in entries)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in ("fast", "bench", "otel") for line in project["optional-dependencies"][extra]]
    wanted = {_name(line) for line in (*project["dependencies"], *extras, "filelock", "fsspec", "networkx", "sympy")}
    assert wanted - {_name(line) for line in entries} == {"torch"}


def test_the_version_is_a_semantic_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def _tracked() -> list[Path]:
    """Return every tracked or new file of the repository; in an unpacked archive, every existing file."""
    git = shutil.which("git") or "false"
    listed = subprocess.run(
        [git, "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")]


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    homes = re.compile(rb"(?<![\w.~-])/(?:home|root|Users)/[\w.-]+")
    own = str(ROOT).encode()
    found: list[str] = []
    for path in _tracked():
        content = path.read_bytes()
        if path == Path(__file__) or b"\0" in content[:4096]:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group().decode()}" for match in homes.finditer(content)]
        found += [f"{path.relative_to(ROOT)}: {own.decode()}"] * (len(ROOT.parts) > 2 and own in content)
    assert not found
