"""What the pages quote of the program is what the program has: defaults, flags, metrics, files."""

import re
from collections.abc import Iterator
from functools import cache

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tests.pages.written import PAGES, ROOT, page_text, prose
from tiercel.cli.main import build_app
from tiercel.settings.option import OptionField
from tiercel.settings.settings import SETTINGS
from tiercel.settings.vllm_flags import CONFIGS, HARMLESS, IN_GIB, OTHER_NAMES, REFUSED
from tiercel.values.units import parse_bytes, parse_length

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?!-`)")
_IN_BRACKETS = re.compile(r"`(?:--)?([a-z][a-z-]+)` \(([^()`|]{1,24})\)")
_IN_A_LIST = re.compile(r"^\| `--([a-z-]+)[^`]*` \|.*?\bdefault ([^;|]+?) ?[;|]", re.MULTILINE)
_TABLE = re.compile(r"^\| flag \|[^\n]*\| default \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| `--([a-z-]+)[^`]*` \|.*\| ([^|]+) \|$", re.MULTILINE)
_AMOUNT = re.compile(r"([\d,.]+) ?(s|seconds|KiB|MiB|GiB|G|M)?\b")
_METRIC = re.compile(r"`((?:tiercel|vllm)[_:][a-z0-9_]+)(?![\w*.:/])")
# The first two are vLLM's and left out: docs/metrics.md says why. The last one is made by the adapter of Prometheus.
_NOT_EXPORTED = {"vllm:engine_sleep_state", "vllm:lora_requests_info", "tiercel_fleet_work_seconds"}
_SUFFIXES = ("_bucket", "_sum", "_count")
_WORDS = {"no limit": 0, "one day": 86_400, "off": False, "on": True}
# Defaults in words, which no value stands for: they depend on the machine or on another setting.
_IN_WORDS = {
    "kv-cache-memory-bytes": "free memory",
    "kv-host-size": "quarter of the free memory",
    "kv-disk-path": "no SSD tier",
    "kv-disk-daily-writes": "`--kv-disk-size`",
    "expert-memory": "all of them",
}
# Numbers in brackets behind the name of a setting that are no defaults.
_NO_DEFAULTS = {("max-num-queued-reqs", "503")}


def quoted_defaults() -> Iterator[tuple[str, str, str]]:
    """Yield page, setting and default of every place where a page quotes one."""
    for page in PAGES:
        if page == "docs/configuration.md":  # made from the settings: tests/cli/test_config.py
            continue
        text = page_text(page)
        rows = [row for table in _TABLE.findall(text) for row in _ROW.findall(table)]
        brackets = [(name, told) for name, told in _IN_BRACKETS.findall(text) if told[0].isdigit() or told in _WORDS]
        for name, told in (*rows, *_IN_A_LIST.findall(text), *brackets):
            if name.replace("-", "_") in SETTINGS and (name, told) not in _NO_DEFAULTS:
                yield page, name, told.strip()


def _is_default(option: OptionField, told: str) -> bool:
    """Whether a quoted default is that of the setting."""
    words = told.split(":")[0].strip("`")
    default = option.default
    if words == option.shown_default:
        return True
    if words in _WORDS:
        return default == _WORDS[words] or (_WORDS[words] == 0 and default is None)
    amount = _AMOUNT.match(words)
    if amount is None:
        return False
    number, unit = amount[1].replace(",", ""), amount[2] or ""
    if words.endswith("%"):
        return float(number) / 100 == default
    if unit in ("KiB", "MiB", "GiB", "G", "M"):
        return parse_bytes(f"{number}{unit}") == default
    return float(number if unit in ("s", "seconds") else parse_length(number)) == default


def test_every_quoted_default_is_the_default() -> None:
    quotes = list(quoted_defaults())
    assert len(quotes) > 25
    for page, name, told in quotes:
        option = SETTINGS[name.replace("-", "_")]
        if name in _IN_WORDS and _IN_WORDS[name] in told:
            assert option.default in (None, ()), (page, name)
        else:
            assert _is_default(option, told), f"{page}: {name}: {told}, not {option.shown_default or option.default}"


def test_a_wrong_default_is_found() -> None:
    assert not _is_default(SETTINGS["shutdown_timeout"], "31 s")
    assert not _is_default(SETTINGS["kv_disk_daily_writes"], "0: no limit")
    assert not _is_default(SETTINGS["max_body_bytes"], "8 GiB")


@cache
def _our_flags() -> set[str]:
    """Return the flags of all verbs."""
    found: set[str] = set()
    groups = [get_command(build_app("all"))]
    while groups:
        command = groups.pop()
        if isinstance(command, TyperGroup):
            groups += command.commands.values()
        found |= {option.removeprefix("--") for parameter in command.params for option in parameter.opts}
    return found | {"help"}


@cache
def _script_flags() -> set[str]:
    """Return the flags that scripts and the Makefile's programs declare."""
    found: set[str] = set()
    for folder in ("benchmarks", "tools", "docker", "deploy", "tests/faults", "tests/fuzz"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh"):
                found |= set(_FLAG.findall(path.read_text(encoding="utf-8")))
    return found


# Flags of other programs, by the program.
_FOREIGN = {
    "docker": {"build-arg", "detach", "build", "wait", "init", "volumes"},
    "pip": {"constraint", "extra-index-url", "require-hashes", "no-deps", "no-index", "target"},
    "py-spy": {"pid"},
    "llama-gguf-split": {"merge"},
    "prometheus": {"web"},
}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_the_text_exists(page: str) -> None:
    theirs = {*REFUSED, *HARMLESS, *CONFIGS, *OTHER_NAMES, *IN_GIB}
    known = _our_flags() | theirs | _script_flags() | set().union(*_FOREIGN.values())
    named = set(_FLAG.findall(re.sub(r"\]\([^)]*\)", "]", prose(page))))
    assert {name for name in named if name.removeprefix("no-") not in known} <= known, page


def test_every_metric_that_a_page_names_exists() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| \w+ \|", page_text("docs/metrics.md"), flags=re.MULTILINE)
    families = set(rows)  # the page itself is compared with /metrics in tests/observability/test_metrics_page.py
    assert len(families) > 100
    for page in PAGES:
        for name in set(_METRIC.findall(page_text(page))):
            base = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
            assert {name, base} & (families | _NOT_EXPORTED), f"{page}: {name}"


def test_every_number_of_faults_is_that_of_the_scorecard() -> None:
    rows = len(re.findall(r"^\| \d+ \|", page_text("docs/faults.md"), flags=re.MULTILINE))
    told = {(page, count) for page in PAGES for count in re.findall(r"\b(\d+) faults\b", page_text(page))}
    assert told
    assert {int(count) for _, count in told} == {rows}, told


def test_every_file_of_the_code_that_a_page_names_exists() -> None:
    rooms = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
    pattern = re.compile(rf"`((?:{rooms})/[\w./-]+\.(?:py|md|toml|yaml|sh|h|cpp|json))(?=[`:])")
    for page in PAGES:
        missing = [name for name in pattern.findall(page_text(page)) if not (ROOT / name).is_file()]
        assert not missing, page
