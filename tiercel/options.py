"""Every flag of `tiercel serve`, spelled as vLLM spells it, with its range: one table for flags, environment and file.

A field `max_num_seqs` is the flag `--max-num-seqs`, the variable `TIERCEL_MAX_NUM_SEQS` and the key
`max-num-seqs` of tiercel.toml. `tiercel.config` merges the three and turns the result into `Settings`.
"""

import difflib
import json
from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from tiercel.settings import AttentionName, DeviceName, Dtype, LoadFormat, ModelImpl, PolicyName, PreemptionMode
from tiercel.units import GIB, KIB, MIB, parse_bytes, parse_length

Panel = Literal["Model", "Memory", "Scheduler", "Server", "Access", "Answers", "Log"]

MAX_CONTEXT_TOKENS = 16 * 1024 * 1024
_MAX_KV_BYTES = 1024 * 1024 * GIB
_KV_RANGE = (0, _MAX_KV_BYTES)
_OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Flag:
    """What the help and the error messages say of a field, beyond its type and range."""

    panel: Panel
    help: str
    metavar: str = ""
    within: tuple[float, float] | None = None  # least and largest number
    expects: str = ""  # ends the sentence "expected ..."; empty = told from the type and the range
    is_rare: bool = False  # shown by --help=all only
    is_secret: bool = False  # its value is never printed
    is_live: bool = False  # may change while the server runs; see `tiercel.live`


def _read_length(value: object) -> object:
    return parse_length(value) if isinstance(value, str) else value


def _read_model_length(value: object) -> object:
    return None if value == "auto" else _read_length(value)


def _read_bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _read_level(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _read_collector(value: object) -> object:
    """An URL; one without a path gets OTLP's."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError(value)
    if parts.query or parts.fragment:  # a token might stand there, and settings are shown and logged
        raise ValueError(value)
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else value


def _read_dtype(value: object) -> object:
    return {"half": "float16", "float": "float32"}.get(value, value) if isinstance(value, str) else value


def _read_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


def _read_names(value: object) -> object:
    """A JSON list, or names between commas, or a flag given several times."""
    values = cast(list[object], value) if isinstance(value, list) else [value]
    match values:
        case [str() as text] if text.lstrip().startswith("["):
            return json.loads(text)
        case [str() as text] if not isinstance(value, list):
            return [name.strip() for name in text.split(",")]
        case _:
            return values


def _check_overrides(overrides: dict[str, float]) -> dict[str, float]:
    for name in overrides:
        if name not in _OVERRIDABLE:
            raise ValueError(name)
    return overrides


Length = Annotated[int, BeforeValidator(_read_length)]
ModelLength = Annotated[int | None, BeforeValidator(_read_model_length)]
Size = Annotated[int, BeforeValidator(_read_bytes)]
Word = Annotated[str, Field(min_length=1)]
Words = Annotated[tuple[Word, ...], NoDecode, BeforeValidator(_read_names)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_read_level)]
UvicornLevel = Annotated[
    Literal["trace", "debug", "info", "warning", "error", "critical"], BeforeValidator(_read_level)
]
Overrides = Annotated[dict[str, float], NoDecode, BeforeValidator(_read_json), AfterValidator(_check_overrides)]

_LENGTH = "tokens such as 4096, 8k or 8K"
_SIZE = "a size such as 1073741824, 512M or 2GiB"
_NAMES = "names that are not empty: given again, or as a JSON list"
_JSON = f"a JSON object of numbers with keys from {', '.join(_OVERRIDABLE)}"


class Options(BaseSettings):
    """The operator's words, checked one by one; `tiercel.config` checks them against each other."""

    model_config = SettingsConfigDict(env_prefix="TIERCEL_", extra="forbid", frozen=True, validate_default=False)

    model: Annotated[Word | None, Flag("Model", "A folder, or org/name of the hub cache.")] = None
    config: Annotated[Word | None, Flag("Model", "Instead of ./tiercel.toml.", "FILE")] = None
    served_model_name: Annotated[Words, Flag("Model", "Names the API answers to.", "NAME", expects=_NAMES)] = ()
    tokenizer: Annotated[
        Word | None, Flag("Model", "Folder of the tokenizer; default: the model's.", "DIR", is_rare=True)
    ] = None
    dtype: Annotated[
        Dtype,
        BeforeValidator(_read_dtype),
        Flag("Model", "auto, float32, bfloat16 or float16.", "TYPE"),
    ] = "auto"
    max_model_len: Annotated[
        ModelLength,
        Flag("Model", "Most tokens of prompt and answer.", "TOKENS", expects=_LENGTH, within=(2, MAX_CONTEXT_TOKENS)),
    ] = None
    device: Annotated[DeviceName, Flag("Model", "auto, cpu or cuda.", "NAME")] = "auto"
    load_format: Annotated[LoadFormat, Flag("Model", "dummy: random weights, no checkpoint needed.", is_rare=True)] = (
        "auto"
    )
    model_impl: Annotated[ModelImpl, Flag("Model", "Our decoder, or transformers' modelling code.", is_rare=True)] = (
        "auto"
    )
    attention_backend: Annotated[
        AttentionName,
        Flag("Model", "Attention kernels; triton needs a GPU, fa3 (FlashAttention-3) a Hopper one.", is_rare=True),
    ] = "auto"
    enforce_eager: Annotated[bool, Flag("Model", "No CUDA graphs: every kernel is launched.", is_rare=True)] = False
    seed: Annotated[int, Flag("Model", "Seed of dummy weights.", is_rare=True, within=(0, 2**63 - 1))] = 0
    threads: Annotated[int | None, Flag("Model", "CPU threads, if not one a core.", "N", within=(1, 1024))] = None

    block_size: Annotated[
        int,
        Flag(
            "Memory",
            "Tokens of one KV block.",
            "TOKENS",
            expects="a power of two from 1 to 256",
            is_rare=True,
            within=(1, 256),
        ),
    ] = 16
    gpu_memory_utilization: Annotated[float, Flag("Memory", "Share of the memory to use.", "X", within=(0.01, 1))] = (
        0.92
    )
    kv_cache_memory_bytes: Annotated[
        Size | None,
        Flag("Memory", "Room for KV, such as 2G.", "SIZE", expects=_SIZE, within=(MIB // 16, _MAX_KV_BYTES)),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, Flag("Memory", "Exact number of KV blocks.", "BLOCKS", is_rare=True, within=(1, 2**31 - 2))
    ] = None
    kv_host_size: Annotated[
        Size | None,
        Flag("Memory", "Host memory for KV.", "SIZE", expects=_SIZE, within=_KV_RANGE),
    ] = None
    kv_disk_path: Annotated[Words, Flag("Memory", "Folders on SSD for KV, striped.", "DIR", expects=_NAMES)] = ()
    kv_disk_size: Annotated[
        Size | None,
        Flag("Memory", "Most bytes in them; default: 4G.", "SIZE", expects=_SIZE, within=(MIB, _MAX_KV_BYTES)),
    ] = None
    kv_disk_daily_writes: Annotated[
        Size | None,
        Flag(
            "Memory",
            "Most bytes written to the SSD a day; default: once its size; 0: no cap.",
            "SIZE",
            expects=_SIZE,
            is_rare=True,
            within=_KV_RANGE,
            is_live=True,
        ),
    ] = None
    preemption_mode: Annotated[
        PreemptionMode, Flag("Memory", "auto: what is cheaper, else swap or recompute.", "MODE", is_rare=True)
    ] = "auto"
    cpu_device_pool: Annotated[
        bool, Flag("Memory", "On the CPU: a device pool apart from host memory, as on a GPU.", is_rare=True)
    ] = False
    enable_prefix_caching: Annotated[
        bool, Flag("Memory", "Reuse the KV of prompts that begin alike.", is_rare=True)
    ] = True

    max_num_seqs: Annotated[
        int, Flag("Scheduler", "Most sequences at once.", "N", within=(1, 65_536), is_live=True)
    ] = 256
    max_num_batched_tokens: Annotated[
        Length | None,
        Flag("Scheduler", "Most tokens of one step.", "TOKENS", expects=_LENGTH, within=(1, MAX_CONTEXT_TOKENS)),
    ] = None
    max_num_queued_reqs: Annotated[
        int, Flag("Scheduler", "Most waiting sequences.", "N", within=(1, 1_000_000), is_live=True)
    ] = 1024
    long_prefill_token_threshold: Annotated[
        Length,
        Flag(
            "Scheduler",
            "Most tokens of one prompt in a step; 0: no cap.",
            "TOKENS",
            expects=_LENGTH,
            is_rare=True,
            within=(0, MAX_CONTEXT_TOKENS),
            is_live=True,
        ),
    ] = 0
    scheduling_policy: Annotated[
        PolicyName, Flag("Scheduler", "Who runs next: fair, priority or fcfs.", "NAME", is_rare=True, is_live=True)
    ] = "fair"
    max_long_partial_prefills: Annotated[
        int,
        Flag(
            "Scheduler",
            "Long prompts under way at once; 0: no cap.",
            "N",
            is_rare=True,
            within=(0, 65_536),
            is_live=True,
        ),
    ] = 4
    tbt_goal: Annotated[
        float,
        Flag(
            "Scheduler",
            "Goal between two tokens, and on a CPU for every step; 0: none.",
            "SECONDS",
            is_rare=True,
            within=(0, 600),
            is_live=True,
        ),
    ] = 0.2
    calibration_seconds: Annotated[
        float,
        Flag(
            "Scheduler",
            "Longest measuring of steps at the start, kept for the next; 0: none.",
            "SECONDS",
            is_rare=True,
            within=(0, 60),
        ),
    ] = 1.5
    async_scheduling: Annotated[bool, Flag("Scheduler", "Launch one step ahead.", is_rare=True)] = True

    host: Annotated[str, Flag("Server", "Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Flag("Server", "0: the kernel chooses.", within=(0, 65_535))] = 8000
    uds: Annotated[Word | None, Flag("Server", "Unix socket instead of host and port.", "PATH", is_rare=True)] = None
    shutdown_timeout: Annotated[
        float, Flag("Server", "Longest drain at a stop.", "SECONDS", within=(0, 86_400), is_live=True)
    ] = 30.0
    stall_timeout: Annotated[
        float,
        Flag(
            "Server",
            "No step for so long with work pending: /health turns 503.",
            "SECONDS",
            is_rare=True,
            within=(1, 86_400),
            is_live=True,
        ),
    ] = 30.0
    timeout_keep_alive: Annotated[
        float, Flag("Server", "How long an idle connection stays open.", "SECONDS", is_rare=True, within=(0, 86_400))
    ] = 5.0
    sse_keep_alive_interval: Annotated[
        float,
        Flag("Server", "Comment in quiet streams; 0: off.", "SECONDS", is_rare=True, within=(0, 86_400), is_live=True),
    ] = 0.0
    max_body_bytes: Annotated[
        Size,
        Flag("Server", "Largest request body.", "SIZE", expects=_SIZE, is_rare=True, within=(KIB, GIB), is_live=True),
    ] = 8 * MIB
    root_path: Annotated[str, Flag("Server", "Path prefix behind a proxy.", "PATH", is_rare=True)] = ""
    disable_fastapi_docs: Annotated[bool, Flag("Server", "No /docs and no /openapi.json.", is_rare=True)] = True
    enable_server_load_tracking: Annotated[bool, Flag("Server", "Serve /load.", is_rare=True)] = False
    enable_request_id_headers: Annotated[bool, Flag("Server", "Answer with X-Request-Id.", is_rare=True)] = False

    api_key: Annotated[Words, Flag("Access", "Keys of the API, if any.", "KEY", expects=_NAMES, is_secret=True)] = ()
    tenants_config: Annotated[Word | None, Flag("Access", "Tenants, keys and limits (YAML).", "FILE")] = None
    admin_key: Annotated[
        Word | None, Flag("Access", "Key of /admin; better TIERCEL_ADMIN_KEY.", "KEY", is_rare=True, is_secret=True)
    ] = None
    allow_unauthenticated: Annotated[bool, Flag("Access", "Bind beyond loopback without a key.", is_rare=True)] = False
    ssl_keyfile: Annotated[Word | None, Flag("Access", "TLS key.", "FILE", is_rare=True)] = None
    ssl_certfile: Annotated[Word | None, Flag("Access", "TLS certificate.", "FILE", is_rare=True)] = None
    allowed_origins: Annotated[Words, Flag("Access", "CORS origins.", "JSON", expects=_NAMES, is_rare=True)] = ()
    allowed_methods: Annotated[Words, Flag("Access", "CORS methods.", "JSON", expects=_NAMES, is_rare=True)] = ("*",)
    allowed_headers: Annotated[Words, Flag("Access", "CORS headers.", "JSON", expects=_NAMES, is_rare=True)] = ("*",)
    allow_credentials: Annotated[bool, Flag("Access", "CORS with cookies.", is_rare=True)] = False

    chat_template: Annotated[
        Word | None, Flag("Answers", "A file or a template; default: the model's.", "FILE", is_rare=True)
    ] = None
    response_role: Annotated[Word, Flag("Answers", "Role of the answers.", "ROLE", is_rare=True)] = "assistant"
    generation_config: Annotated[
        Word,
        Flag("Answers", "Defaults of sampling: auto (the model's), vllm, tiercel or a folder.", "SOURCE", is_rare=True),
    ] = "auto"
    override_generation_config: Annotated[
        Overrides, Flag("Answers", "Defaults of sampling.", "JSON", expects=_JSON, is_rare=True)
    ] = Field(default_factory=dict)
    max_logprobs: Annotated[
        int, Flag("Answers", "Most log-probabilities a token.", "N", is_rare=True, within=(0, 1024), is_live=True)
    ] = 20
    stream_interval: Annotated[
        int,
        Flag("Answers", "Tokens of one chunk of a stream.", "TOKENS", is_rare=True, within=(1, 65_536), is_live=True),
    ] = 1
    enable_force_include_usage: Annotated[
        bool, Flag("Answers", "Usage at the end of every stream.", is_rare=True, is_live=True)
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Flag("Answers", "Cached tokens in the usage.", is_rare=True, is_live=True)
    ] = True

    log_level: Annotated[LogLevel, Flag("Log", "Least severe event to log.", "LEVEL", is_live=True)] = "info"
    log_format: Annotated[Literal["json", "console"], Flag("Log", "json, or console for people.", "FORMAT")] = "json"
    enable_log_requests: Annotated[bool, Flag("Log", "One line a request, never its text.", is_rare=True)] = True
    otlp_traces_endpoint: Annotated[
        Word | None,
        BeforeValidator(_read_collector),
        Flag(
            "Log",
            "Collector of traces, OTLP over HTTP; needs the extra otel.",
            "URL",
            expects="an http or https URL without a password or query, such as http://127.0.0.1:4318/v1/traces",
            is_rare=True,
        ),
    ] = None
    uvicorn_log_level: Annotated[
        UvicornLevel, Flag("Log", "Least severe event of the HTTP server.", "LEVEL", is_rare=True)
    ] = "warning"
    disable_uvicorn_access_log: Annotated[bool, Flag("Log", "No access log of the HTTP server.", is_rare=True)] = True

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what it is given: `tiercel.config` reads the other sources, to know where a wrong value stands."""
        return (init_settings,)


def flag_of(field: FieldInfo) -> Flag:
    """The words behind a field of `Options`."""
    return next(part for part in field.metadata if isinstance(part, Flag))


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a field of `Options` is restricted to, if it is."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def flag_name(field: str) -> str:
    """The flag of a field of `Options`."""
    return f"--{field.replace('_', '-')}"


def nearest(name: str, likeness: float = 0.6) -> str | None:
    """The field of `Options` that somebody may have meant."""
    near = difflib.get_close_matches(name, Options.model_fields, n=1, cutoff=likeness)
    return near[0] if near else None
