"""The example of a config file names arguments and flags that exist, and wrong arguments are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import fields
from pydantic import ValidationError

from tiercel.cluster.fleet_args import FleetArgs
from tiercel.settings.exposure import check_exposure
from tiercel.settings.settings import EngineSettings, ServerSettings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "ray.yaml").read_text(encoding="utf-8"))
APPLICATION = EXAMPLE["applications"][0]
LEAST = {"model": "/models/m", "secret_file": "/etc/secret"}


def test_the_example_is_of_arguments_that_exist() -> None:
    args = FleetArgs(**APPLICATION["args"])
    assert args.most_engines > args.least_engines
    module, _, name = APPLICATION["import_path"].partition(":")
    assert (module, name) == ("tiercel.cluster.ray_app", "app")
    assert (ROOT / "tiercel" / "cluster" / "ray_app.py").exists()


def given(side: str) -> dict[str, str]:
    """The settings that the flags of one side of the example set."""
    flags = [flag.removeprefix("--").split("=", 1) for flag in APPLICATION["args"][side]]
    return {name.replace("-", "_"): value for name, value in flags}


@pytest.mark.parametrize("side", ["front_flags", "engine_flags"])
def test_the_flags_of_the_example_are_settings(side: str) -> None:
    assert given(side)
    assert set(given(side)) <= {field.name for kind in (ServerSettings, EngineSettings) for field in fields(kind)}


def test_the_front_of_the_example_may_be_reached_from_other_machines() -> None:
    """A front at all addresses needs keys, and its engines on other machines need certificates."""
    host = FleetArgs(**APPLICATION["args"]).front_host
    assert host == "0.0.0.0"
    check_exposure(ServerSettings(model="/models/m", served_model_names=("m",), host=host, **given("front_flags")))  # pyright: ignore[reportArgumentType]
    for side in ("front_flags", "engine_flags"):
        assert {"engine_certfile", "engine_keyfile", "engine_cafile"} <= set(given(side))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"models": 1}, "models"),
        ({"model": ""}, "model"),
        ({"front_port": 0}, "front_port"),
        ({"least_engines": 3, "most_engines": 2}, "least_engines is 3, more than most_engines, 2"),
        ({"most_engines": 65}, "most_engines"),
        ({"goal_s": 0}, "goal_s"),
        ({"front_host": "example.org"}, "front_host"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        FleetArgs(**{**LEAST, **wrong})
