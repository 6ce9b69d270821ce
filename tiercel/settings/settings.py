"""The settings of the daemon. Each is declared once, with its type, default, bounds, group and help.

`config.py` reads flags, variables and the settings file into these values. Facts learnt after the start (how many
blocks fit, the model's context) are not settings: see `tier.Capacity` and `wire.Ready`.

Access to the server is declared in `access_settings`, engines over TCP in `fleet_settings`, the control socket in
`control_settings`, answers in `answer_settings`, files and batches in `batch_settings`, stored responses in
`response_settings`, what both processes act on in `process_settings`.

The struct of a setting says which process acts on it. A setting is called by its field's name unless its option
names another, for instance because the flag is vLLM's and the field carries a unit.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final, Literal

from msgspec import Struct

from tiercel.settings.groups import GROUPS, LOG, MEMORY, MODEL, SCHEDULER, SERVER
from tiercel.settings.option import (
    LENGTH,
    NAMES,
    SIZE,
    Option,
    OptionField,
    options_of,
    read_length,
    read_names,
    read_size,
)
from tiercel.settings.process import ProcessSettings
from tiercel.settings.readers import (
    QUANTIZATIONS,
    read_cache_dtype,
    read_collector,
    read_dtype,
    read_model_length,
    read_quantization,
    read_root_path,
)
from tiercel.settings.responses import ResponseSettings
from tiercel.values.units import GIB, KIB, MIB

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "int8", "fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
DeviceName = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["auto", "sdpa", "grouped", "native", "triton", "fa3"]
PreemptionMode = Literal["auto", "swap", "recompute"]

MAX_CONTEXT_TOKENS: Final = 16 * 1024 * 1024
DEFAULT_SEQUENCES: Final = 256  # that may run, unless the device has a larger default
MOST_DEFAULT_SEQUENCES: Final = 1024  # the largest default: see `engine.memory.capacity.for_device`
_MAX_KV_BYTES = 1024 * 1024 * GIB
_DAY_S = 86_400

_length = partial(Option, metavar="TOKENS", read=read_length, expects=LENGTH)
_size = partial(Option, metavar="SIZE", read=read_size, expects=SIZE)
_seconds = partial(Option, metavar="SECONDS")
_live_size = partial(_size, is_rare=True, is_live=True)
_live_seconds = partial(_seconds, SERVER, is_rare=True, within=(0, _DAY_S), is_live=True)
_names = partial(Option, read=read_names, expects=NAMES)


class EngineSettings(ProcessSettings, frozen=True, kw_only=True):
    """Settings of the engine process: they travel in the `Start` frame."""

    dtype: Annotated[Dtype, Option(MODEL, "Data type of weights and KV.", "TYPE", read=read_dtype)] = (
        "auto"  # the checkpoint's
    )
    kv_cache_dtype: Annotated[
        CacheDtype,
        Option(
            MODEL,
            "Data type of KV: int8 or fp8 store 8 bits with a scale per token and head; auto: see dtype.",
            "TYPE",
            read=read_cache_dtype,
            is_rare=True,
        ),
    ] = "auto"  # the type of the weights
    max_model_len: Annotated[
        int | None,
        Option(
            MODEL,
            "Maximum tokens of prompt and answer.",
            "TOKENS",
            read=read_model_length,
            expects=LENGTH,
            within=(2, MAX_CONTEXT_TOKENS),
        ),
    ] = None  # the model's own, cut to what the KV pool holds
    quantization: Annotated[
        str,
        Option(
            MODEL,
            "Round weights to int8 or int4 while they are loaded; auto: weights as the checkpoint has them.",
            "FORMAT",
            read=read_quantization,
            expects=f"one of {', '.join(QUANTIZATIONS)}; the last five must be the format of the checkpoint",
            is_rare=True,
        ),
    ] = "auto"
    device: Annotated[DeviceName, Option(MODEL, "Device: auto, cpu or cuda.", "NAME")] = "auto"
    load_format: Annotated[
        LoadFormat, Option(MODEL, "Weight format; dummy: random weights, no checkpoint needed.", is_rare=True)
    ] = "auto"
    model_impl: Annotated[
        ModelImpl, Option(MODEL, "native: the built-in decoder; transformers: its modelling code.", is_rare=True)
    ] = "auto"
    attention_backend: Annotated[
        AttentionName,
        Option(
            MODEL,
            "Attention kernels; native needs a CPU, triton a GPU, fa3 (FlashAttention-3) a Hopper GPU.",
            is_rare=True,
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Option(MODEL, "Launch every kernel separately, without CUDA graphs.", is_rare=True)
    ] = False
    seed: Annotated[int, Option(MODEL, "Seed of dummy weights.", is_rare=True, within=(0, 2**63 - 1))] = 0
    threads: Annotated[int | None, Option(MODEL, "CPU threads; default: every core.", "N", within=(1, 1024))] = None

    block_size: Annotated[
        int,
        Option(
            MEMORY,
            "Tokens per KV block.",
            "TOKENS",
            expects="a power of two from 1 to 256",
            is_rare=True,
            within=(1, 256),
        ),
    ] = 16
    gpu_memory_utilization: Annotated[float, Option(MEMORY, "Share of device memory.", "SHARE", within=(0.01, 1))] = (
        0.92  # for weights, activations and KV
    )
    kv_cache_memory_bytes: Annotated[
        int | None,
        _size(
            MEMORY,
            "Memory for KV; default: automatic.",
            within=(MIB // 16, _MAX_KV_BYTES),
            vllm_variable="VLLM_CPU_KVCACHE_SPACE",
        ),
    ] = None  # sized from free memory
    num_gpu_blocks_override: Annotated[
        int | None, Option(MEMORY, "Exact number of KV blocks.", "BLOCKS", is_rare=True, within=(1, 2**31 - 2))
    ] = None
    kv_host_bytes: Annotated[
        int | None, _size(MEMORY, "Host memory for KV (DDR tier).", within=(0, _MAX_KV_BYTES), name="kv_host_size")
    ] = None  # chosen by device; on the CPU this comes on top of the one arena in RAM
    kv_disk_paths: Annotated[
        tuple[str, ...],
        _names(MEMORY, "Folders for KV (SSD tier), striped.", metavar="DIR", name="kv_disk_path", takes_many=True),
    ] = ()  # empty = no SSD tier
    kv_disk_bytes: Annotated[
        int, _size(MEMORY, "Maximum size of the SSD tier.", within=(MIB, _MAX_KV_BYTES), name="kv_disk_size")
    ] = 4 * GIB  # small, so that naming a folder never fills a disk
    kv_disk_optional: Annotated[
        bool,
        Option(
            MEMORY,
            "Start without the SSD tier if its folder cannot be used; restarts of the engine and takeovers always do.",
            is_rare=True,
        ),
    ] = False
    kv_disk_daily_bytes: Annotated[
        int,
        _size(
            MEMORY,
            "Maximum bytes written to the SSD per day; default: kv-disk-size; 0: no limit.",
            within=(0, _MAX_KV_BYTES),
            name="kv_disk_daily_writes",
            default=None,
            is_rare=True,
            is_live=True,
        ),
    ] = 0
    expert_memory_bytes: Annotated[
        int | None,
        _size(
            MEMORY,
            "Memory for experts of a mixture; the others are on the SSD, or beside a GPU in host memory; default: all.",
            within=(1, _MAX_KV_BYTES),
            name="expert_memory",
            is_rare=True,
        ),
    ] = None  # without kv-disk-path they are in the cache folder
    preemption_mode: Annotated[
        PreemptionMode,
        Option(MEMORY, "How preempted KV returns: swap, recompute, or auto (the cheaper one).", "MODE", is_rare=True),
    ] = "auto"
    cpu_device_pool: Annotated[
        bool, Option(MEMORY, "On the CPU, keep a bounded device pool beside host memory, as on a GPU.", is_rare=True)
    ] = False
    enable_prefix_caching: Annotated[bool, Option(MEMORY, "Reuse the KV of equal prompt prefixes.", is_rare=True)] = (
        True
    )

    max_num_seqs: Annotated[
        int | None,
        Option(
            SCHEDULER,
            "Maximum running sequences.",
            "N",
            within=(1, 65_536),
            is_live=True,
            at_most_as_started=True,  # the rows of a batch are laid out at the start
        ),
    ] = None  # chosen by device, in the engine process
    max_num_batched_tokens: Annotated[
        int | None,
        _length(SCHEDULER, "Maximum tokens per step.", within=(1, MAX_CONTEXT_TOKENS)),
    ] = None  # chosen by device, in the engine process
    long_prefill_token_threshold: Annotated[
        int,
        _length(
            SCHEDULER,
            "Maximum tokens of one prompt in a step; 0: no limit.",
            is_rare=True,
            within=(0, MAX_CONTEXT_TOKENS),
            is_live=True,
        ),
    ] = 0
    max_long_partial_prefills: Annotated[
        int,
        Option(
            SCHEDULER,
            "Maximum long prompts in progress at once; 0: no limit.",
            "N",
            is_rare=True,
            within=(0, 65_536),
            is_live=True,
        ),
    ] = 4
    tbt_goal_s: Annotated[
        float | None,
        _seconds(
            SCHEDULER,
            "Goal for the time between tokens; default: 0.2, or twice a step of decodes if that is longer; 0: no goal.",
            name="tbt_goal",
            is_rare=True,
            within=(0, 600),
            is_live=True,
        ),
    ] = None  # a tenant's own goal comes first; on a CPU the goal also bounds steps without decodes
    min_prefill_share: Annotated[
        float,
        Option(
            SCHEDULER,
            "Minimum share of device time that prompts get beside decodes, even if steps then exceed the goal.",
            "SHARE",
            is_rare=True,
            within=(0.05, 0.9),
            is_live=True,
        ),
    ] = 0.3
    calibration_s: Annotated[
        float,
        _seconds(
            SCHEDULER,
            "Maximum time to measure steps at the start; the result is kept; 0: do not measure.",
            name="calibration_seconds",
            default=1.5,
            is_rare=True,
            within=(0, 60),
        ),
    ] = 0.0  # an engine that a program constructs does not measure unless it asks
    async_scheduling: Annotated[bool, Option(SCHEDULER, "Launch one step ahead of the commit.", is_rare=True)] = True

    tokenizer_folder: str | None = None  # whose tokens may be drawn; set by `config.py`; None = the model's
    cache_folder: str | None = None  # keeps measured and computed results; set by `config.py`; None = nowhere

    @property
    def sequences(self) -> int:
        """Maximum running sequences; without a setting, those of a device without a larger default."""
        return self.max_num_seqs or DEFAULT_SEQUENCES

    @property
    def record_rows(self) -> int:
        """Rows of the step record, which is laid out before the device is known: one suspect is admitted beyond."""
        return (self.max_num_seqs or MOST_DEFAULT_SEQUENCES) + 1

    @property
    def async_depth(self) -> int:
        """Steps that are launched ahead of the commit."""
        return int(self.async_scheduling)


class ServerSettings(ResponseSettings, frozen=True, kw_only=True):
    """Settings of the HTTP process."""

    config: Annotated[str | None, Option(MODEL, "Settings file, if not tiercel.toml.", "FILE")] = None
    served_model_names: Annotated[
        tuple[str, ...],
        _names(
            MODEL, "Names that the API accepts.", metavar="NAME", name="served_model_name", default=(), takes_many=True
        ),
    ]  # the first one is reported; at least one
    tokenizer: Annotated[str | None, Option(MODEL, "Tokenizer folder; default: the model's.", "DIR", is_rare=True)] = (
        None
    )

    max_num_queued_reqs: Annotated[
        int, Option(SCHEDULER, "Maximum waiting sequences.", "N", within=(1, 1_000_000), is_live=True)
    ] = 4096  # a sequence waits until its first token; one request may have as many prompts

    host: Annotated[str, Option(SERVER, "Address to bind.", may_be_empty=True)] = "127.0.0.1"
    port: Annotated[int, Option(SERVER, "Port; 0: any free port.", within=(0, 65_535), vllm_variable="VLLM_PORT")] = (
        8000
    )
    uds: Annotated[str | None, Option(SERVER, "Unix socket in place of host and port.", "PATH", is_rare=True)] = None
    shutdown_timeout_s: Annotated[
        float, _seconds(SERVER, "Maximum drain time.", name="shutdown_timeout", within=(0, _DAY_S), is_live=True)
    ] = 30.0  # 0 = end streams at once
    request_timeout_s: Annotated[
        float, _live_seconds("Maximum time to answer a request; 0: no limit.", name="request_timeout")
    ] = 0.0
    queue_timeout_s: Annotated[
        float, _live_seconds("Maximum time until the first slice of a request; 0: no limit.", name="queue_timeout")
    ] = 0.0
    stall_timeout_s: Annotated[
        float | None,
        _seconds(
            SERVER,
            "Time without a step, with work pending, after which the engine is restarted; default: by its steps.",
            name="stall_timeout",
            is_rare=True,
            within=(1, _DAY_S),
            is_live=True,
        ),
    ] = None  # three times the predicted step, but at least 5 s, or 30 s if steps are not measured at the start
    timeout_keep_alive_s: Annotated[
        float,
        _seconds(
            SERVER,
            "Time that an idle connection stays open.",
            name="timeout_keep_alive",
            is_rare=True,
            within=(0, _DAY_S),
            vllm_variable="VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        ),
    ] = 5.0
    timeout_headers_s: Annotated[
        float,
        _seconds(
            SERVER,
            "Maximum time for a TLS handshake, and for the headers of a request.",
            name="timeout_headers",
            is_rare=True,
            within=(0.1, _DAY_S),
        ),
    ] = 10.0  # from the connection, or from the first byte of a later request
    timeout_body_s: Annotated[
        float,
        _seconds(
            SERVER,
            "Maximum time for the body of a request.",
            name="timeout_body",
            is_rare=True,
            within=(0.1, _DAY_S),
            is_live=True,
        ),
    ] = 30.0
    max_connections: Annotated[
        int | None,
        Option(
            SERVER,
            "Maximum client connections; default: what the limit on file descriptors allows, at most 8192.",
            "N",
            is_rare=True,
            within=(1, 1_000_000),
        ),
    ] = None  # see server/http/descriptors.py
    sse_keep_alive_interval_s: Annotated[
        float,
        _live_seconds("Longest silence of a stream without a comment; 0: any.", name="sse_keep_alive_interval"),
    ] = 15.0
    max_body_bytes: Annotated[
        int,
        _size(
            SERVER,
            "Maximum size of a request body.",
            is_rare=True,
            within=(KIB, GIB),
            vllm_variable="VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
            is_live=True,
        ),
    ] = 8 * MIB
    max_pending_body_bytes: Annotated[
        int,
        _live_size(SERVER, "Maximum memory of request bodies that are not admitted yet.", within=(MIB, _MAX_KV_BYTES)),
    ] = 64 * MIB  # beyond it, the largest bodies get 503
    max_answer_bytes: Annotated[
        int,
        _live_size(
            SERVER,
            "Maximum memory of an answer that is not streamed, estimated from max_tokens, n and logprobs.",
            within=(MIB, _MAX_KV_BYTES),
        ),
    ] = 32 * MIB  # four times as much for all such answers with log-probabilities together
    root_path: Annotated[
        str,
        Option(
            SERVER,
            "Path prefix behind a proxy, whether the proxy removes it or not.",
            "PATH",
            read=read_root_path,
            is_rare=True,
            may_be_empty=True,
        ),
    ] = ""
    disable_fastapi_docs: Annotated[bool, Option(SERVER, "Do not serve /docs and /openapi.json.", is_rare=True)] = True
    enable_server_load_tracking: Annotated[bool, Option(SERVER, "Serve /load.", is_rare=True)] = False
    enable_request_id_headers: Annotated[
        bool, Option(SERVER, "Send X-Request-Id with every response.", is_rare=True)
    ] = True

    enable_log_requests: Annotated[bool, Option(LOG, "Log one line per request, without its text.", is_rare=True)] = (
        True
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            LOG,
            "Collector of traces, OTLP over HTTP; needs the extra otel.",
            "URL",
            read=read_collector,
            expects="an http or https URL without a password or query, such as http://127.0.0.1:4318/v1/traces",
            is_rare=True,
        ),
    ] = None


class Settings(Struct, frozen=True, kw_only=True):
    """All settings that `tiercel serve` starts with."""

    engine: EngineSettings
    server: ServerSettings


def _by_group(options: Mapping[str, OptionField]) -> dict[str, OptionField]:
    return dict(sorted(options.items(), key=lambda item: GROUPS.index(item[1].option.group)))


SETTINGS: Final[Mapping[str, OptionField]] = _by_group(options_of(ProcessSettings, ServerSettings, EngineSettings))
"""Every setting by its name, in the order of the groups."""
