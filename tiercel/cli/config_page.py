"""The text of docs/configuration.md, made from the declared settings."""

from collections.abc import Iterator

from tiercel.settings.groups import GROUPS
from tiercel.settings.option import OptionField
from tiercel.settings.settings import SETTINGS

_HEAD = """\
# Configuration

*Made by `tiercel config reference > docs/configuration.md`: change `tiercel/settings/settings.py`, not this page.*

The value of a setting is taken from the first of these sources: flag of `tiercel serve`, `TIERCEL_*` variable,
`VLLM_*` variable if the table names one, settings file, default. The settings file is `tiercel.toml` in the
working folder, or the file that `--config` or `TIERCEL_CONFIG` names. A file found in the working folder must belong to
the user of the server or to root, and only its owner may write it; a named file, and the tenants file, must not be
writable by everybody:

```toml
max-num-seqs = 128
kv-cache-memory-bytes = "4G"
scheduling-policy = "fair"
```

`tiercel config show` prints each value and its source (`--json`: as JSON; `--changed`: only settings that differ from
their default); it takes the flags of `tiercel serve`. An unknown key is an error that names the most similar key.

## While the server runs

Settings marked *live* change without a restart, together or not at all:

- `SIGHUP`, or `tiercel config reload` (`POST /admin/reload`), reads the settings file and the tenants file again. If
  either is wrong, or a setting that is not live has changed, nothing changes.
- `tiercel config set KEY=VALUE...` (`PATCH /admin/config` with a JSON object) sets values that override all other
  sources until the next reload or restart; `null`, or `KEY=`, removes an earlier change. With the header
  `If-Match: "3"` the change is made only if version 3 is in force.
- `tiercel config get` (`GET /admin/config`) shows the settings in force, their version and the time of the change.

The engine applies new values between two steps. Running sequences continue; waiting sequences are reordered by the new
policy. A switch to `fair` starts with zero deficits and debts. Lowering `max-num-seqs` or `max-num-queued-reqs` removes
no sequence; `max-num-seqs` cannot exceed its value at start.

A refused change is logged as `config_refused` with the reason and counted in `tiercel_config_errors_total`; the
previous version stays in force (`tiercel_config_version`, `tiercel_config_last_change_timestamp_seconds`). The response
is 400 with the value and the allowed values, 409 `restart_required` with the reason, or 412 `version_mismatch`.
Tenants, their keys, weights and limits are in the tenants file: see [tenants.md](tenants.md).

## Settings

The flag is the key with two dashes in front; `--no-` turns a switch off. The variable is `TIERCEL_` and the key in
capitals with `_`: `max-num-seqs`, `--max-num-seqs`, `TIERCEL_MAX_NUM_SEQS`. Sizes are written as `512M` or `2GiB`,
lengths as `8k` (8,000) or `8K` (8,192). Of two different values for one flag, the last one is used, with a warning.

A default that depends on the device is empty here and in `tiercel config show`, because only the engine process knows
the device; it logs what it chose (`defaults` and `capacity`). `max-num-seqs` is 256, on a GPU with 70 GiB of memory or
more 512, with 130 GiB or more 1,024; `max-num-batched-tokens` is 256 on a CPU, 2,048 on a GPU, with 70 GiB or more
8,192; sizes of KV follow from free memory. While `max-num-seqs` has its default it can be lowered, and raised again up
to 256.
"""


def reference() -> str:
    """Return the page, as Markdown."""
    parts = [_HEAD]
    for group in GROUPS:
        rows = [_row(option) for option in SETTINGS.values() if option.option.group == group]
        parts.append(f"\n### {group.name}\n\n| key | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _row(option: OptionField) -> str:
    notes = [option.option.help, *_notes(option)]
    takes = option.expectation.replace("|", "\\|")
    default = f"`{option.shown_default}`" if option.shown_default else ""
    return f"| `{option.key}` | {takes} | {default} | {' '.join(notes)} |"


def _notes(option: OptionField) -> Iterator[str]:
    if option.name == "config":
        yield f"Flag (`{option.flag}`) or variable only."
    if variable := option.option.vllm_variable:
        yield f"`{variable}`{' in GiB' if variable == 'VLLM_CPU_KVCACHE_SPACE' else ''}."
    if option.option.is_secret:
        yield "Never printed."
    if option.option.is_live:
        yield "*Live.*"
