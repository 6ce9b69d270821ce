"""Finding a model's folder without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.modelfile.checkpoint import resolve_model_folder
from tiercel.values.errors import ConfigError


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_cached(hub: Path, revision: str = "abc123", has_ref: bool = True) -> Path:
    cached = hub / "models--org--name"
    if has_ref:
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(revision)
    return make_folder(cached / "snapshots" / revision)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")

    assert resolve_model_folder(str(folder)) == folder


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path)

    assert resolve_model_folder("org/name", str(tmp_path)) == snapshot


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_environment_names_the_cache(tmp_path: Path, variable: str, below: str) -> None:
    snapshot = make_cached(tmp_path / below)
    code = "from tiercel.modelfile.checkpoint import resolve_model_folder; print(resolve_model_folder('org/name'))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "HUGGINGFACE_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=clean | {variable: str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(snapshot)


def test_a_folder_goes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cached(tmp_path / "hub")
    make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)

    assert resolve_model_folder("org/name", str(tmp_path / "hub")) == Path("org/name")


def test_snapshots_without_a_ref_are_refused(tmp_path: Path) -> None:
    make_cached(tmp_path, has_ref=False)

    with pytest.raises(ConfigError, match="give the folder"):
        resolve_model_folder("org/name", str(tmp_path))


def test_a_ref_to_a_snapshot_that_is_gone_is_refused(tmp_path: Path) -> None:
    make_cached(tmp_path)
    (tmp_path / "models--org--name" / "refs" / "main").write_text("../../elsewhere")

    with pytest.raises(ConfigError, match=r"no config\.json of its revision"):
        resolve_model_folder("org/name", str(tmp_path))


@pytest.mark.parametrize("name", ["org/other", "nowhere", "/no/such/folder", "a/b/c", "../name", ""])
def test_an_unknown_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_model_folder(name, str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(ConfigError, match="give the folder"):
        resolve_model_folder(str(tmp_path / "model.safetensors"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model_folder(str(tmp_path))
