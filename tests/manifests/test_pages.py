"""The pages for operators: links, commands, flags and settings in them are valid."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tiercel.cli.config import config_app
from tiercel.cli.flags import with_settings
from tiercel.cli.kv import kv_app
from tiercel.cli.main import main
from tiercel.cli.tenants import tenants_app
from tiercel.settings.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("quickstart", "configuration", "operations", "upgrade")


@cache
def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """Return the words of every `tiercel` command, in blocks and in the text."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE))
    lines = [line for line in blocks.replace("\\\n", " ").splitlines() if line.startswith("tiercel ")]
    lines += re.findall(r"`(tiercel [a-z][^`]*)`", text(page))
    return [shlex.split(re.split(r"[|>]", line)[0])[1:] for line in lines]


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", text(page)):
        name, _, anchor = link.partition("#")
        path = (ROOT / "docs" / name).resolve() if name else ROOT / "docs" / f"{page}.md"
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_repository_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"(?<![\w/.])((?:deploy|tests|tiercel|docs)/[\w./-]+)", text(page)))
    assert not [name for name in named if not (ROOT / name.rstrip(".")).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_every_verb_exists(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(page)
    for verb in sorted({words[0] for words in commands(page)} - {"--version"}):
        assert main([verb, "--help"]) == 0, verb
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES)
def test_every_sub_verb_exists_with_its_flags(page: str) -> None:
    groups = {"config": config_app("all"), "tenants": tenants_app(), "kv": kv_app()}
    for words in commands(page):
        if words[0] not in groups:
            continue
        group = get_command(groups[words[0]])
        assert isinstance(group, TyperGroup)
        command = group.commands[words[1]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_is_named_exists(page: str) -> None:
    keys = {name.replace("_", "-") for name in SETTINGS}
    for words in commands(page):
        pairs = [word.partition("=")[0] for word in words[2:] if "=" in word and not word.startswith("-")]
        assert words[:2] != ["config", "set"] or set(pairs) - {"KEY"} <= keys, words
    flags = {option for parameter in _serve_parameters() for option in parameter}
    shown = {word.partition("=")[0] for words in commands(page) if words[0] == "serve" for word in words}
    assert {word for word in shown if word.startswith("--")} <= flags


def _serve_parameters() -> list[tuple[str, ...]]:
    def run(given: dict[str, object]) -> int:
        return len(given)

    app = config_app("all")
    app.command("serve")(with_settings(run, "all"))
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return [tuple(parameter.opts) for parameter in group.commands["serve"].params]


def test_the_alerts_that_are_named_have_their_section() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(Tiercel[A-Z]\w+)`", text(page))}
    assert named
    assert {name.lower() for name in named} <= anchors(ROOT / "docs" / "runbook.md")


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page for page in PAGES if f"docs/{page}.md" not in readme]


def test_a_service_is_installed_from_the_lock_as_the_image_is() -> None:
    """tests/docker/test_dockerfile.py holds the same order in the image."""
    installs = [line.partition(" install ")[2] for line in text("operations").splitlines() if "bin/pip install" in line]
    assert installs == [
        "--require-hashes --no-deps -r requirements.lock",
        "--constraint constraints.txt torch",
        "--no-deps .",
    ]
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")):
        if path.name != "CHANGELOG.md":
            assert not re.search(r"pip install[^`\n]*(tiercel\[|'\.\[)", path.read_text(encoding="utf-8")), path
