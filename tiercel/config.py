"""Where settings come from: flags, then TIERCEL_* variables, then a few VLLM_* ones, then tiercel.toml, then defaults.

The only place that reads the environment. A wrong value is a `ConfigError` whose message names where it
stands, the value and what is allowed.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from tiercel.checkpoint import resolve_model_folder
from tiercel.consistency import check_together, conflict
from tiercel.embedded import MODEL_DIR
from tiercel.errors import ConfigError
from tiercel.exposure import check_exposure
from tiercel.options import Options, choices_of, flag_name, flag_of, nearest
from tiercel.refused import REFUSED
from tiercel.settings import EngineSettings, ServerSettings, Settings
from tiercel.units import GIB
from tiercel.word import BODY_NAME, MASK, Source, Word

DEFAULT_FILE = "tiercel.toml"
DEFAULT_DISK_BYTES = 4 * GIB
"""Small on purpose: nobody's disk fills because a path was given."""
EMBEDDED_NAME = "tiercel-embedded"
"""What the API calls the embedded model."""

VLLM_VARIABLES = {
    "VLLM_API_KEY": "api_key",
    "VLLM_PORT": "port",
    "VLLM_LOGGING_LEVEL": "log_level",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout_keep_alive",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "max_body_bytes",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_memory_bytes",
}
"""Variables of vLLM that are honoured, and the fields that they mean."""
_CONFIDENTIAL = re.compile(r"(?<=://).*(?=@)|(?<=[?#]).+", re.DOTALL)
"""What must not be shown of a URL: user and password, and a query, where tokens stand."""
_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a word"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, how they came to be, and what the operator should hear about that."""

    settings: Settings
    warnings: tuple[str, ...]
    options: Options
    words: Mapping[str, Word]  # by field of `Options`, of those that are not left at their default
    flags: Mapping[str, object]
    file: Mapping[str, Word]  # all that the settings file said when it was read

    def again(self) -> "Resolved":
        """The same flags and variables, and the settings file as it is now. Errors: ConfigError as of `resolve`."""
        return resolve(self.flags)

    def under(self, changes: Mapping[str, object]) -> "Resolved":
        """The same flags, variables and words of the file, which is not read again, and `changes` on top of all.

        `changes` are keys and values as tiercel.toml has them, that somebody asked for while the server runs; those
        of before are dropped. Errors: ConfigError as of `resolve`.
        """
        return _merge(self.flags, self.file, words_of(changes, "request", BODY_NAME))


def resolve(flags: Mapping[str, object]) -> Resolved:
    """Merge the sources, check every value, then the values against each other.

    `flags` holds what the command line gave, by the field names of `Options`; a flag that was not given is absent.
    Errors: ConfigError with one line for the operator.
    """
    return _merge(flags, None, {})


def _merge(flags: Mapping[str, object], file: Mapping[str, Word] | None, changes: Mapping[str, Word]) -> Resolved:
    """`file` is what the settings file said; None: it is read."""
    warnings: list[str] = []
    words = dict(_variables(warnings))
    words |= {name: Word(value, "flag", flag_name(name)) for name, value in flags.items()}
    if file is None:
        file = _file_words(words.get("config"))
    words = {**file, **words, **changes}
    options = _check_each(_without_idle_keys(words, warnings))
    check_together(options)
    return Resolved(_settle(options), tuple(warnings), options, words, flags, file)


def _without_idle_keys(words: dict[str, Word], warnings: list[str]) -> dict[str, Word]:
    """With a tenants file its keys are the only ones: a variable is for clients then, a flag is a mistake."""
    if "tenants_config" not in words or "api_key" not in words:
        return words
    word = words["api_key"]
    if word.source != "env":
        place = word.place.rstrip("= ")
        raise conflict(f"{place} beside --tenants-config: the keys of a tenant stand in the tenants file")
    warnings.append(f"{word.name} is ignored: the keys stand in the tenants file")
    del words["api_key"]
    return words


def client_admin_key() -> str | None:
    """The key that the admin verbs of this machine use: TIERCEL_ADMIN_KEY."""
    return os.environ.get("TIERCEL_ADMIN_KEY", "").strip() or None


def client_api_key() -> str | None:
    """The key that a client of this machine's server uses: the first of TIERCEL_API_KEY."""
    return os.environ.get("TIERCEL_API_KEY", "").split(",")[0].strip() or None


def notify_socket() -> str | None:
    """Where systemd listens for what a service of type notify says of itself; None when it did not start us."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_s() -> float | None:
    """How long systemd bears silence before it restarts this process; None when it does not watch it."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or not int(microseconds) or pid not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6


def bench_api_key() -> str | None:
    """The key that a load test uses: of this machine's server, else the one that other load tests read."""
    return client_api_key() or os.environ.get("OPENAI_API_KEY") or None


# Sources


def _variables(warnings: list[str]) -> Iterator[tuple[str, Word]]:
    """Words of the environment, the weaker ones first."""
    for variable, field in VLLM_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value and not _is_service_link(variable, value, warnings):
            yield field, Word(_vllm_value(variable, value), "env", variable)
    for field, value in EnvSettingsSource(Options, env_ignore_empty=True)().items():
        variable = f"TIERCEL_{field.upper()}"
        if not _is_service_link(variable, value, warnings):
            yield field, Word(value, "env", variable)
    for variable in os.environ:
        field = variable.removeprefix("TIERCEL_").lower()
        if variable.startswith("TIERCEL_") and field not in Options.model_fields and (near := nearest(field, 0.85)):
            warnings.append(f"{variable} is no setting and does nothing; did you mean TIERCEL_{near.upper()}?")


def _is_service_link(variable: str, value: object, warnings: list[str]) -> bool:
    """Whether Kubernetes wrote this variable, as it does for each service: TIERCEL_PORT=tcp://10.0.0.1:80."""
    if isinstance(value, str) and value.startswith("tcp://"):
        warnings.append(f"{variable}={value} is the link of a Kubernetes service and is ignored")
        return True
    return False


def _vllm_value(variable: str, value: str) -> object:
    match variable:
        case "VLLM_API_KEY":
            return [value]
        case "VLLM_CPU_KVCACHE_SPACE":
            try:
                return int(float(value) * GIB)
            except (ValueError, OverflowError):
                raise ConfigError("config.value", f"{variable}={value}: expected a number of GiB") from None
        case _:
            return value


def _file_words(chosen: Word | None) -> dict[str, Word]:
    """Words of the settings file: the one that was chosen, or tiercel.toml where it exists."""
    path = Path(str(chosen.value) if chosen else DEFAULT_FILE)
    if not chosen and not path.is_file():
        return {}
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError("config.file", f"--config {path}: expected a TOML file with lines such as `port = 8000`")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as exc:
        raise ConfigError("config.file", f"--config {path}: cannot be read: {exc.strerror}") from exc
    except RecursionError as exc:
        raise ConfigError("config.file", f"--config {path}: not a TOML file: nested too deeply") from exc
    except ValueError as exc:  # of its syntax, of UTF-8, or of a number with thousands of digits
        raise ConfigError("config.file", f"--config {path}: not a TOML file: {exc}") from exc
    return words_of(content, "file", str(path))


def words_of(content: Mapping[str, object], source: Source, document: str) -> dict[str, Word]:
    """Words of a document of keys and values, by the fields of `Options` that the keys mean.

    Errors: ConfigError for a key that is no setting, and for two that mean the same one.
    """
    words: dict[str, Word] = {}
    for key, value in content.items():
        field = key.replace("-", "_")
        if field not in Options.model_fields or field == "config":
            raise ConfigError("config.key", f"{document}: {_unknown_key(key)}")
        if field in words:
            raise ConfigError("config.key", f"{document}: {words[field].key} and {key} are the same setting")
        words[field] = Word(value, source, document, key)
    return words


def _unknown_key(key: str) -> str:
    if reason := REFUSED.get(key.replace("_", "-")):
        return f"{key} is not supported: {reason}"
    near = nearest(key.replace("-", "_"))
    hint = f"; did you mean {near.replace('_', '-')}?" if near else ""
    return f"there is no setting {key[:64]}{hint}"


# Checks


def _check_each(words: Mapping[str, Word]) -> Options:
    for name, word in words.items():
        if isinstance(word.value, bool) and Options.model_fields[name].annotation is not bool:
            raise ConfigError("config.value", _wrong_value(name, word))  # pydantic takes true for 1
    try:
        options = Options.model_validate({name: word.value for name, word in words.items()})
    except ValidationError as exc:
        name = str(exc.errors(include_url=False)[0]["loc"][0])
        raise ConfigError("config.value", _wrong_value(name, words[name])) from None
    for name, word in words.items():
        limits = flag_of(Options.model_fields[name]).within
        number: float | None = getattr(options, name) if limits else None
        if limits and number is not None and not limits[0] <= number <= limits[1]:
            raise ConfigError("config.value", _wrong_value(name, word))
    return options


def _wrong_value(name: str, word: Word) -> str:
    field = Options.model_fields[name]
    value = MASK if flag_of(field).is_secret else _show(word.value)
    return f"{word.place}{value}: expected {expectation(field)}"


def _show(value: object) -> str:
    try:
        text = " ".join(str(part) for part in cast(list[object], value)) if isinstance(value, list) else str(value)
    except RecursionError:  # a.a.a.a = 1, a thousand times
        text = "..."
    if "://" in text:
        text = _CONFIDENTIAL.sub(MASK, text)
    return text if 0 < len(text) <= 80 and text.isprintable() else f"{text[:80]!r}"


def expectation(field: FieldInfo) -> str:
    """What a field takes, to end the sentence "expected ..."."""
    if choices := choices_of(field):
        return f"one of {', '.join(choices)}"
    words = flag_of(field)
    expects = words.expects or next(text for kind, text in _KINDS.items() if kind in str(field.annotation))
    if words.within is None or " from " in expects:
        return expects
    return f"{expects}, from {words.within[0]:,} to {words.within[1]:,}"


# The result


def _settle(options: Options) -> Settings:
    folder = resolve_model_folder(options.model or str(MODEL_DIR), os.environ)
    server = _server(options, str(folder))
    check_exposure(server)
    return Settings(engine=_engine(options, str(folder)), server=server)


def _served_names(options: Options) -> tuple[str, ...]:
    """The names the operator chose, else what was typed, and its last part where that is a path."""
    if options.served_model_name:
        return options.served_model_name
    if options.model is None:
        return (EMBEDDED_NAME,)
    return tuple(dict.fromkeys((options.model, Path(options.model).expanduser().resolve().name)))


def _engine(options: Options, folder: str) -> EngineSettings:
    return EngineSettings(
        model=folder,
        dtype=options.dtype,
        device=options.device,
        load_format=options.load_format,
        model_impl=options.model_impl,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_host_bytes=options.kv_host_size,
        kv_disk_paths=tuple(str(Path(path).expanduser().absolute()) for path in options.kv_disk_path),
        kv_disk_bytes=_disk_bytes(options),
        kv_disk_daily_bytes=_disk_bytes(options)
        if options.kv_disk_daily_writes is None
        else options.kv_disk_daily_writes,
        preemption_mode=options.preemption_mode,
        cpu_device_pool=options.cpu_device_pool,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_long_partial_prefills=options.max_long_partial_prefills,
        tbt_goal_s=options.tbt_goal,
        scheduling_policy=options.scheduling_policy,
        async_depth=1 if options.async_scheduling else 0,
        calibration_s=options.calibration_seconds,
        cache_folder=_cache_folder(),
        seed=options.seed,
        threads=options.threads,
        log_level=options.log_level,
        log_format=options.log_format,
    )


def _cache_folder() -> str | None:
    """$XDG_CACHE_HOME/tiercel, else ~/.cache/tiercel; None where there is no home. As the standard has it, a relative
    path does not count."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return str(base / "tiercel")
    try:
        return str(Path.home() / ".cache" / "tiercel")
    except RuntimeError:
        return None


def _disk_bytes(options: Options) -> int:
    if not options.kv_disk_path:
        return 0
    return DEFAULT_DISK_BYTES if options.kv_disk_size is None else options.kv_disk_size


def _server(options: Options, folder: str) -> ServerSettings:
    return ServerSettings(
        model=folder,
        served_model_names=_served_names(options),
        host=options.host,
        port=options.port,
        uds=options.uds,
        api_keys=options.api_key,
        tenants_config=options.tenants_config,
        admin_key=options.admin_key,
        allow_unauthenticated=options.allow_unauthenticated,
        root_path=options.root_path,
        allowed_origins=options.allowed_origins,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        response_role=options.response_role,
        generation_config=options.generation_config,
        override_generation_config=options.override_generation_config,
        max_logprobs=options.max_logprobs,
        max_num_queued_reqs=options.max_num_queued_reqs,
        is_fair=str(options.scheduling_policy) == "fair",
        max_body_bytes=options.max_body_bytes,
        stream_interval=options.stream_interval,
        sse_keep_alive_interval_s=options.sse_keep_alive_interval,
        enable_request_id_headers=options.enable_request_id_headers,
        enable_force_include_usage=options.enable_force_include_usage,
        enable_prompt_tokens_details=options.enable_prompt_tokens_details,
        enable_server_load_tracking=options.enable_server_load_tracking,
        disable_fastapi_docs=options.disable_fastapi_docs,
        disable_uvicorn_access_log=options.disable_uvicorn_access_log,
        uvicorn_log_level=options.uvicorn_log_level,
        enable_log_requests=options.enable_log_requests,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        shutdown_timeout_s=options.shutdown_timeout,
        stall_timeout_s=options.stall_timeout,
        timeout_keep_alive_s=options.timeout_keep_alive,
        log_level=options.log_level,
        log_format=options.log_format,
    )
