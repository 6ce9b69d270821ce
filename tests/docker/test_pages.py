"""docker/README.md and docs/deploy.md: the variables, files and services that they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from tests.docker.reading import BASE, OVERLAYS, ROOT, compose, text
from tiercel.server.tenancy.tenant_file import load_tenant_file

PAGES = ("docker/README.md", "docs/deploy.md")
COMPOSE = "".join(text(name) for name in (BASE, *OVERLAYS))
each = pytest.mark.parametrize("page", PAGES)


def _page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _words(page: str) -> list[list[str]]:
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", _page(page), flags=re.DOTALL | re.MULTILINE))
    return [shlex.split(line, comments=True) for line in blocks.replace("\\\n", " ").splitlines()]


def test_all_variables_of_compose_are_documented() -> None:
    read = set(re.findall(r"\$\{([A-Z]\w+)", COMPOSE)) | {"TIERCEL_METRICS_KEY"}
    reported = {name for page in PAGES for name in re.findall(r"^\| `([A-Z]\w+)`", _page(page), re.MULTILINE)}
    assert reported == read | {"BASE", "COMPILER", "TORCH", "PIP_ARGS"}


@each
def test_every_path_in_its_commands_exists(page: str) -> None:
    words = {word for line in _words(page) for word in line}
    paths = {word for word in words if re.match(r"docker/(?!wheels/)|constraints\.txt", word)}
    assert "docker/compose.yaml" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@each
def test_every_link_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", _page(page))
    assert links
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]


def test_the_settings_of_the_page_name_files_that_the_page_writes(tmp_path: Path) -> None:
    page = _page("docs/deploy.md")
    files = dict(re.findall(r"^cat > /srv/tiercel/(\S+) <<'\w+'\n(.*?)^[A-Z]+$", page, re.DOTALL | re.MULTILINE))
    (name,) = re.findall(r'^tenants-config = "/etc/tiercel/(.+)"$', files["tiercel.toml"], re.MULTILINE)
    (tmp_path / name).write_text(files[name])
    assert [tenant.share.name for tenant in load_tenant_file(tmp_path / name).tenants] == ["chat", "batch"]
    (owner,) = re.findall(r"^chown -R (\S+) /srv/tiercel$", page, re.MULTILINE)
    assert owner == compose(BASE)["services"]["tiercel"]["user"]


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z-]+)", _page(page)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
