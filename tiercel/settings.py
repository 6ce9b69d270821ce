"""What the operator decided, resolved once and frozen. `tiercel.config` reads flags, environment and files into these.

Facts learnt later (how many blocks fit, the model's context) are not settings: see `tier.Capacity` and `wire.Ready`.
"""

from typing import Literal

from msgspec import Struct

from tiercel.units import MIB

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
DeviceName = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["auto", "sdpa", "grouped", "triton", "fa3"]
PreemptionMode = Literal["auto", "swap", "recompute"]
PolicyName = Literal["fair", "priority", "fcfs"]
LogFormat = Literal["json", "console"]


class EngineSettings(Struct, frozen=True, kw_only=True):
    """Settings of the engine process: they travel in the `Start` frame."""

    model: str  # a folder
    dtype: Dtype = "auto"  # auto = the checkpoint's
    device: DeviceName = "auto"
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    attention_backend: AttentionName = "auto"
    enforce_eager: bool = False  # no CUDA graphs
    max_model_len: int | None = None  # tokens; None = the model's own, cut to what the KV pool holds
    block_size: int = 16  # tokens
    kv_cache_memory_bytes: int | None = None  # None = sized from free memory
    gpu_memory_utilization: float = 0.92  # share of device memory that weights, activations and KV may take
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_host_bytes: int | None = None  # of the DDR tier, or on top of the one RAM arena; None = by device
    kv_disk_paths: tuple[str, ...] = ()  # folders of the SSD tier, striped; empty = no such tier
    kv_disk_bytes: int = 0  # hard cap of the SSD tier, everything in its folders counted
    kv_disk_daily_bytes: int = 0  # written to the SSD a day; 0 = no cap
    preemption_mode: PreemptionMode = "auto"  # auto = per victim the cheaper of swap and recompute
    cpu_device_pool: bool = False  # on the CPU: a bounded device pool beside the DDR tier, as on a GPU
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # tokens a step; None = by device
    long_prefill_token_threshold: int = 0  # tokens of one prompt a step; 0 = no cap
    scheduling_policy: PolicyName = "fair"
    async_depth: int = 1  # steps launched ahead of the commit; 0 = synchronous
    max_long_partial_prefills: int = 4  # long prompts under way at once; 0 = no cap
    tbt_goal_s: float = 0.2  # between two tokens, where the tenant has no goal of its own; 0 = none
    calibration_s: float = 0.0  # to measure steps at the start; 0 = the linear default (the flag's default is more)
    cache_folder: str | None = None  # what may be measured or computed again is kept here; None = nowhere
    seed: int = 0  # of dummy weights
    threads: int | None = None  # CPU compute threads; None = the cores this process may use
    log_level: str = "info"
    log_format: LogFormat = "json"


class ServerSettings(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP process."""

    model: str  # a folder
    served_model_names: tuple[str, ...]  # the first one answers; at least one
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    tenants_config: str | None = None  # a file; None = one tenant with `api_keys`
    admin_key: str | None = None  # beside the one of the tenants file
    allow_unauthenticated: bool = False
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    tokenizer: str | None = None  # a folder; None = the model's
    chat_template: str | None = None  # a file, or the template itself; None = the model's
    response_role: str = "assistant"
    generation_config: str = "auto"  # auto = the model's, vllm or tiercel = neutral defaults, or a folder
    override_generation_config: dict[str, float] = {}
    max_logprobs: int = 20
    max_num_queued_reqs: int = 1024  # sequences waiting for their first slice
    is_fair: bool = True  # the engine shares a band by weight, so a tenant's wait is that of its own queue
    max_body_bytes: int = 8 * MIB
    stream_interval: int = 1  # tokens a chunk, after the first
    sse_keep_alive_interval_s: float = 0.0  # 0 = off
    enable_request_id_headers: bool = False
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = True
    enable_server_load_tracking: bool = False
    disable_fastapi_docs: bool = True
    disable_uvicorn_access_log: bool = True
    uvicorn_log_level: str = "warning"
    enable_log_requests: bool = True  # one JSON line a request at its end; never its text
    otlp_traces_endpoint: str | None = None  # an URL; None = no traces
    shutdown_timeout_s: float = 30.0  # drain; 0 = end streams at once
    stall_timeout_s: float = 30.0  # /health turns 503 when work is pending and no step ended for so long
    timeout_keep_alive_s: float = 5.0
    log_level: str = "info"
    log_format: LogFormat = "json"


class Settings(Struct, frozen=True, kw_only=True):
    """Everything, as `tiercel serve` starts with it."""

    engine: EngineSettings
    server: ServerSettings
