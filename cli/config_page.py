"""docs/configuration.md, made from the table of options."""

from collections.abc import Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from tiercel.config import VLLM_VARIABLES, expectation
from tiercel.options import Options, Panel, flag_name, flag_of

_HEAD = """\
# Configuration

*Made by `tiercel config reference > docs/configuration.md`: change `tiercel/options.py`, not this page.*

A setting is looked for in this order: flag of `tiercel serve`, `TIERCEL_*` variable, `VLLM_*` variable where one is
named below, settings file, default. The settings file is `tiercel.toml` in the working folder, or the one that
`--config` or `TIERCEL_CONFIG` names:

```toml
max-num-seqs = 128
kv-cache-memory-bytes = "4G"
scheduling-policy = "fair"
```

`tiercel config show` prints each value with where it comes from (`--json` for programs, `--changed` for what is not at
its default); it takes the flags of `tiercel serve`. A key that does not exist is an error that names the nearest one.

## While the server runs

Settings marked *live* change without a restart, together or not at all:

- `SIGHUP`, or `tiercel config reload` (`POST /admin/reload`), reads the settings file and the tenants file again. When
  either is wrong, or a setting that is not live has changed, nothing changes at all.
- `tiercel config set KEY=VALUE...` (`PATCH /admin/config` with a JSON object) puts values above all other sources until
  the next reload or restart; `null`, or `KEY=`, drops one. With `If-Match: "3"` only when version 3 is in force.
- `tiercel config get` (`GET /admin/config`) shows what is in force, its version and when it came.

The engine takes new values between two steps. Nobody is lost: what runs goes on, what waits stands in the new policy's
order. A switch to `fair` begins with nobody owed anything. A lower `max-num-seqs` or `max-num-queued-reqs` throws
nobody out, and `max-num-seqs` never goes over what the server started with.

What was refused is logged as `config_refused` with the reason and counted in `tiercel_config_errors_total`; the old
version stays in force (`tiercel_config_version`, `tiercel_config_last_change_timestamp_seconds`). The answer is 400
with the value and what is allowed, 409 `restart_required` with the reason, or 412 `version_mismatch`. Tenants, their
keys, weights and limits are in the tenants file: see [tenants.md](tenants.md).

## Settings

The flag is the key with two dashes in front, a switch is turned off with `--no-`; the variable is `TIERCEL_` and the
key in capitals with `_`: `max-num-seqs`, `--max-num-seqs`, `TIERCEL_MAX_NUM_SEQS`. Sizes take `512M` or `2GiB`, lengths
`8k` (8,000) or `8K` (8,192).
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for panel in get_args(Panel):
        rows = [row for name, field in Options.model_fields.items() if (row := _row(name, field, panel))]
        if rows:
            head = f"\n### {panel}\n\n| key | takes | default | |\n|---|---|---|---|\n"
            parts.append(head + "\n".join(rows) + "\n")
    return "".join(parts)


def _row(name: str, field: FieldInfo, panel: str) -> str | None:
    words = flag_of(field)
    if words.panel != panel:
        return None
    default = field.get_default(call_default_factory=True, validated_data={})
    notes = [words.help, *_notes(name, field)]
    return f"| `{name.replace('_', '-')}` | {_escaped(expectation(field))} | {_default(default)} | {' '.join(notes)} |"


def _notes(name: str, field: FieldInfo) -> Iterator[str]:
    words = flag_of(field)
    if name == "config":
        yield f"Flag (`{flag_name(name)}`) or variable only."
    for variable, other in VLLM_VARIABLES.items():
        if other == name:
            yield f"`{variable}`{' in GiB' if variable == 'VLLM_CPU_KVCACHE_SPACE' else ''}."
    if words.is_secret:
        yield "Never printed."
    if words.is_live:
        yield "*Live.*"


def _default(value: object) -> str:
    match value:
        case None | () | {} | "":
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:g}`"
        case tuple():
            return " ".join(f"`{part}`" for part in value)
        case _:
            return f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
