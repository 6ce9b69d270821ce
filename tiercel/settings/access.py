"""The settings that say who may reach the server. See `settings.py`."""

from functools import partial
from typing import Annotated

from tiercel.settings.groups import ACCESS
from tiercel.settings.option import NAMES, Option, read_names
from tiercel.settings.process import ProcessSettings
from tiercel.settings.readers import HOSTS, read_hosts

_names = partial(Option, read=read_names, expects=NAMES)


class AccessSettings(ProcessSettings, frozen=True, kw_only=True):
    """Keys, certificates and the names and origins that the HTTP process answers to."""

    api_keys: Annotated[
        tuple[str, ...],
        _names(
            ACCESS,
            "API keys; default: none required.",
            metavar="KEY",
            name="api_key",
            vllm_variable="VLLM_API_KEY",
            takes_many=True,
            is_secret=True,
        ),
    ] = ()
    tenants_config: Annotated[str | None, Option(ACCESS, "Tenants, keys and limits (YAML).", "FILE")] = None
    admin_key: Annotated[
        str | None, Option(ACCESS, "Key of /admin; prefer TIERCEL_ADMIN_KEY.", "KEY", is_rare=True, is_secret=True)
    ] = None  # valid beside the admin key of the tenants file
    allow_unauthenticated: Annotated[
        bool, Option(ACCESS, "Allow a non-loopback address without a key.", is_rare=True)
    ] = False
    admin_port: Annotated[
        int | None,
        Option(
            ACCESS,
            "Second port, the only one with /admin, /metrics and /ui; 0: any free port.",
            "PORT",
            is_rare=True,
            within=(0, 65_535),
        ),
    ] = None  # they are served beside the API
    admin_host: Annotated[
        str | None, Option(ACCESS, "Address of the second port; default: that of --host.", is_rare=True)
    ] = None
    admin_uds: Annotated[str | None, Option(ACCESS, "Unix socket in place of a second port.", "PATH", is_rare=True)] = (
        None
    )
    allowed_hosts: Annotated[
        tuple[str, ...],
        _names(
            ACCESS,
            "Names in the Host header that are answered; default: on loopback localhost, elsewhere any.",
            metavar="NAME",
            read=read_hosts,
            expects=HOSTS,
            takes_many=True,
            is_rare=True,
        ),
    ] = ()
    ssl_keyfile: Annotated[str | None, Option(ACCESS, "TLS key.", "FILE", is_rare=True)] = None
    ssl_certfile: Annotated[str | None, Option(ACCESS, "TLS certificate.", "FILE", is_rare=True)] = None
    allowed_origins: Annotated[tuple[str, ...], _names(ACCESS, "CORS origins.", metavar="JSON", is_rare=True)] = ()
    allowed_methods: Annotated[tuple[str, ...], _names(ACCESS, "CORS methods.", metavar="JSON", is_rare=True)] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], _names(ACCESS, "CORS headers.", metavar="JSON", is_rare=True)] = ("*",)
    allow_credentials: Annotated[bool, Option(ACCESS, "Allow CORS requests with cookies.", is_rare=True)] = False
