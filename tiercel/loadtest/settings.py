"""The flags of `tiercel bench serve`: one field for each flag, with its help text."""

from typing import Annotated, Literal

from msgspec import Struct, structs

from tiercel.loadtest.load.mix import DEFAULT_LENGTHS, DatasetName
from tiercel.loadtest.results.result_file import is_reserved
from tiercel.settings.option import Group, Option, flag_name, options_of
from tiercel.system.server_url import read_server_url
from tiercel.values.errors import ConfigError

Backend = Literal["openai", "openai-chat", "vllm"]
Arrivals = Literal["auto", "constant", "poisson", "gamma", "on_off", "trace"]
Ramp = Literal["linear", "exponential"]


SERVER, LOAD, DATASET = Group("Server"), Group("Load"), Group("Dataset")
SAMPLING, MEASURE, RESULT = Group("Sampling"), Group("Measuring"), Group("Result")

_RANDOM, _SONNET = DEFAULT_LENGTHS["random"], DEFAULT_LENGTHS["sonnet"]
_REPETITION = DEFAULT_LENGTHS["prefix_repetition"]


class BenchSettings(Struct, frozen=True, kw_only=True):
    """The flags with their defaults. None: not given."""

    backend: Annotated[Backend, Option(SERVER, "API to call: completions (openai, vllm) or chat (openai-chat).")] = (
        "openai"
    )
    base_url: Annotated[str | None, Option(SERVER, "URL of the server; replaces --host and --port.", "URL")] = None
    host: Annotated[str, Option(SERVER, "Host of the server.", "HOST")] = "127.0.0.1"
    port: Annotated[int, Option(SERVER, "Port of the server.", "PORT")] = 8000
    endpoint: Annotated[str | None, Option(SERVER, "Path of the API; default: that of the backend.", "PATH")] = None
    header: Annotated[list[str], Option(SERVER, "Additional headers.", "K=V", takes_many=True)] = []
    api_key: Annotated[str | None, Option(SERVER, "API key. [TIERCEL_API_KEY, OPENAI_API_KEY]", "KEY")] = None
    insecure: Annotated[bool, Option(SERVER, "Do not verify the server's certificate.")] = False
    model: Annotated[str | None, Option(SERVER, "Model to request; default: the first of /v1/models.", "NAME")] = None
    served_model_name: Annotated[
        str | None, Option(SERVER, "Model name to send, if it differs from --model.", "NAME")
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(SERVER, "Folder with a tokenizer.json to count tokens; default: the server counts.", "FOLDER"),
    ] = None
    ready_check_timeout_sec: Annotated[float, Option(SERVER, "Time to wait until the server is ready.", "SECONDS")] = (
        600.0
    )
    request_timeout_sec: Annotated[float, Option(SERVER, "Time after which a request fails.", "SECONDS")] = 600.0

    num_prompts: Annotated[int, Option(LOAD, "Requests of each tenant; for multi_turn, conversations.", "COUNT")] = 1000
    duration: Annotated[float | None, Option(LOAD, "Time after which no request is sent.", "SECONDS")] = None
    request_rate: Annotated[float, Option(LOAD, "Requests per second; inf: all at once.", "RATE")] = float("inf")
    burstiness: Annotated[
        float,
        Option(
            LOAD, "Shape of the gamma distribution of gaps: 1 is Poisson, below 1 bursty, above 1 regular.", "SHAPE"
        ),
    ] = 1.0
    arrivals: Annotated[
        Arrivals, Option(LOAD, "Arrival process; auto: gamma with a rate, the recorded times for timed_trace.")
    ] = "auto"
    on_sec: Annotated[float, Option(LOAD, "on_off: time with requests.", "SECONDS")] = 10.0
    off_sec: Annotated[float, Option(LOAD, "on_off: time without requests.", "SECONDS")] = 10.0
    trace_speed: Annotated[float, Option(LOAD, "trace: speed of the replay; 2 takes half the time.", "FACTOR")] = 1.0
    ramp_up_strategy: Annotated[Ramp | None, Option(LOAD, "Shape in which the rate changes over the run.")] = None
    ramp_up_start_rps: Annotated[float | None, Option(LOAD, "Rate at the start of the ramp.", "RATE")] = None
    ramp_up_end_rps: Annotated[float | None, Option(LOAD, "Rate at the end of the ramp.", "RATE")] = None
    max_concurrency: Annotated[
        int | None, Option(LOAD, "Maximum concurrent requests; with an infinite rate a closed loop.", "COUNT")
    ] = None
    num_warmups: Annotated[int, Option(LOAD, "Requests for warming up, which are not reported.", "COUNT")] = 1
    tenants: Annotated[str | None, Option(LOAD, "YAML file of tenants with key, weight, arrivals, ...", "FILE")] = None
    isolation: Annotated[bool, Option(LOAD, "Run each tenant alone first, then all together.")] = False
    client_processes: Annotated[str, Option(LOAD, "Number of client processes.", "auto|COUNT")] = "auto"
    seed: Annotated[int, Option(LOAD, "Seed of arrivals and prompts.", "NUMBER")] = 0

    dataset_name: Annotated[DatasetName, Option(DATASET, "Dataset of the prompts.")] = "random"
    dataset_path: Annotated[str | None, Option(DATASET, "File of the dataset.", "FILE")] = None
    input_len: Annotated[int | None, Option(DATASET, "Prompt length; overrides that of the dataset.", "TOKENS")] = None
    output_len: Annotated[int | None, Option(DATASET, "Answer length; overrides that of the dataset.", "TOKENS")] = None
    random_input_len: Annotated[int, Option(DATASET, "random: prompt length.", "TOKENS")] = _RANDOM.input_len
    random_output_len: Annotated[int, Option(DATASET, "random: answer length.", "TOKENS")] = _RANDOM.output_len
    random_range_ratio: Annotated[
        float, Option(DATASET, "random, multi_turn: lengths vary by up to this fraction, up and down.", "RATIO")
    ] = 0.0
    random_prefix_len: Annotated[int, Option(DATASET, "random, multi_turn: tokens of the shared prefix.", "TOKENS")] = (
        _RANDOM.prefix_len
    )
    prefix_repetition_prefix_len: Annotated[int, Option(DATASET, "Length of each shared prefix.", "TOKENS")] = (
        _REPETITION.prefix_len
    )
    prefix_repetition_suffix_len: Annotated[int, Option(DATASET, "Tokens after the shared prefix.", "TOKENS")] = 256
    prefix_repetition_num_prefixes: Annotated[int, Option(DATASET, "Number of shared prefixes.", "COUNT")] = 10
    prefix_repetition_output_len: Annotated[int, Option(DATASET, "Answer length.", "TOKENS")] = _REPETITION.output_len
    sharegpt_output_len: Annotated[
        int | None, Option(DATASET, "Answer length; default: the recorded length.", "TOKENS")
    ] = None
    custom_output_len: Annotated[int | None, Option(DATASET, "Answer length; default: that of the file.", "TOKENS")] = (
        None
    )
    sonnet_input_len: Annotated[int, Option(DATASET, "sonnet: prompt length.", "TOKENS")] = _SONNET.input_len
    sonnet_output_len: Annotated[int, Option(DATASET, "sonnet: answer length.", "TOKENS")] = _SONNET.output_len
    sonnet_prefix_len: Annotated[int, Option(DATASET, "sonnet: length of the shared prefix.", "TOKENS")] = (
        _SONNET.prefix_len
    )
    multi_turn_num_turns: Annotated[int, Option(DATASET, "multi_turn: turns of a conversation.", "COUNT")] = 4
    multi_turn_think_sec: Annotated[float, Option(DATASET, "multi_turn: mean pause between turns.", "SECONDS")] = 1.0

    no_stream: Annotated[bool, Option(SAMPLING, "Request complete answers instead of streams.")] = False
    logprobs: Annotated[int | None, Option(SAMPLING, "Number of log-probabilities to request.", "COUNT")] = None
    ignore_eos: Annotated[bool, Option(SAMPLING, "Ask the server to generate the full length.")] = False
    temperature: Annotated[float, Option(SAMPLING, "Sampling temperature; 0: greedy.", "VALUE")] = 0.0
    top_p: Annotated[float | None, Option(SAMPLING, "Probability mass of nucleus sampling.", "VALUE")] = None
    top_k: Annotated[int | None, Option(SAMPLING, "Number of likeliest tokens to sample from.", "COUNT")] = None
    extra_body: Annotated[
        str | None, Option(SAMPLING, "Additional fields of every request; null removes a field.", "JSON")
    ] = None

    percentile_metrics: Annotated[
        str, Option(MEASURE, "Latencies in the report: ttft,tpot,itl,e2el,client_queue_time.", "LIST")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Option(MEASURE, "Percentiles of these latencies.", "LIST")] = "99"
    goodput: Annotated[
        list[str], Option(MEASURE, "Latency limits of a good request.", "METRIC:MS", takes_many=True)
    ] = []
    request_id_prefix: Annotated[str, Option(MEASURE, "Prefix of every x-request-id.", "TEXT")] = "bench-"
    profile: Annotated[bool, Option(MEASURE, "Call /start_profile and /stop_profile around the run.")] = False
    disable_tqdm: Annotated[bool, Option(MEASURE, "No progress bar.")] = False

    save_result: Annotated[bool, Option(RESULT, "Write the result file.")] = False
    save_detailed: Annotated[bool, Option(RESULT, "Write the result file with every request.")] = False
    append_result: Annotated[bool, Option(RESULT, "Append the result to the file as a line.")] = False
    label: Annotated[str | None, Option(RESULT, "Name of the run.", "TEXT")] = None
    metadata: Annotated[list[str], Option(RESULT, "Keys to add to the result.", "K=V", takes_many=True)] = []
    result_dir: Annotated[str | None, Option(RESULT, "Folder of the result file.", "FOLDER")] = None
    result_filename: Annotated[str | None, Option(RESULT, "Name of the result file.", "NAME")] = None
    report: Annotated[str | None, Option(RESULT, "Write the report into this folder.", "FOLDER")] = None

    def check(self) -> None:
        """Check the flags and their combination. Errors: ConfigError."""
        values, defaults = structs.asdict(self), structs.asdict(_DEFAULTS)
        for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "on_sec"):
            value = values[name]
            if value is not None and not value > 0:
                raise ConfigError("bench.flag", f"{flag_name(name)} {value}: must be greater than 0")
        if self.isolation and self.tenants is None:
            raise ConfigError("bench.flag", "--isolation compares tenants: give --tenants FILE")
        for name in _OF_ONE_TENANT if self.tenants is not None else ():
            if values[name] != defaults[name]:
                raise ConfigError(
                    "bench.flag", f"{flag_name(name)}: with --tenants set it in the file, for each tenant"
                )
        if self.ramp_up_strategy and (self.ramp_up_start_rps is None or self.ramp_up_end_rps is None):
            raise ConfigError("bench.flag", "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if self.client_processes != "auto" and not (self.client_processes.isdigit() and int(self.client_processes)):
            raise ConfigError(
                "bench.flag", f"--client-processes {self.client_processes}: write auto or a number of at least 1"
            )
        _ = self.root_url  # raises
        percentiles(self.metric_percentiles)
        for name in pairs("--metadata", self.metadata, "="):
            if is_reserved(name):
                raise ConfigError(
                    "bench.flag", f"--metadata {name}: the result file has a key of this name; choose another"
                )

    @property
    def root_url(self) -> str:
        """URL of the server without /v1. Errors: ConfigError if no server can be there."""
        if self.base_url is not None:
            return read_server_url(self.base_url, "--base-url")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return read_server_url(f"http://{host}:{self.port}", "--host and --port")

    @property
    def is_chat(self) -> bool:
        """Whether the chat API is called."""
        return self.backend == "openai-chat"

    @property
    def path(self) -> str:
        """Path of the API."""
        path = self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")
        return path if path.startswith("/") else f"/{path}"


_DEFAULTS = BenchSettings()
_OF_ALL_TENANTS = ("input_len", "output_len")  # flags of the panel that also apply with --tenants
_OF_ONE_TENANT = (
    *("request_rate", "burstiness", "arrivals", "on_sec", "off_sec", "trace_speed", "max_concurrency"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *(
        name
        for name, option in options_of(BenchSettings).items()
        if option.option.group == DATASET and name not in _OF_ALL_TENANTS
    ),
)


def pairs(flag: str, values: list[str], mark: str) -> dict[str, str]:
    """Parse `K=V` words. Errors: ConfigError."""
    found: dict[str, str] = {}
    for word in values:
        name, has_mark, value = word.partition(mark)
        if not has_mark or not name:
            raise ConfigError("bench.flag", f"{flag} {word}: write NAME{mark}VALUE")
        found[name] = value
    return found


def percentiles(text: str) -> tuple[float, ...]:
    """Parse percentiles such as `50,99,99.9`. Errors: ConfigError."""
    try:
        numbers = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError as exc:
        raise ConfigError("bench.flag", f"--metric-percentiles {text}: write numbers, as in 50,99") from exc
    if not all(0 <= number <= 100 for number in numbers):
        raise ConfigError("bench.flag", f"--metric-percentiles {text}: a percentile is between 0 and 100")
    return numbers
