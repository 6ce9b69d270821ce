"""Every flag of `tiercel bench serve`: one field a flag, with the words that --help says about it."""

from typing import Annotated, Literal

from msgspec import Struct

from tiercel.errors import ConfigError
from tiercel.loadtest.load.mix import DatasetName
from tiercel.loadtest.results.result_file import is_reserved
from tiercel.option import Group, Option, flag_name, options_of

Backend = Literal["openai", "openai-chat", "vllm"]
Arrivals = Literal["auto", "constant", "poisson", "gamma", "on_off", "trace"]
Ramp = Literal["linear", "exponential"]


SERVER, LOAD, DATASET = Group("Server"), Group("Load"), Group("Dataset")
SAMPLING, MEASURE, RESULT = Group("Sampling"), Group("Measuring"), Group("Result")


class BenchSettings(Struct, frozen=True, kw_only=True):
    """The flags with their defaults. None: not given."""

    backend: Annotated[Backend, Option(SERVER, "API to call: completions (openai, vllm) or chat (openai-chat).")] = (
        "openai"
    )
    base_url: Annotated[str | None, Option(SERVER, "Root of the server; instead of --host and --port.", "URL")] = None
    host: Annotated[str, Option(SERVER, "Host of the server.", "HOST")] = "127.0.0.1"
    port: Annotated[int, Option(SERVER, "Port of the server.", "PORT")] = 8000
    endpoint: Annotated[str | None, Option(SERVER, "Path of the API; the backend's own if left out.", "PATH")] = None
    header: Annotated[list[str], Option(SERVER, "More headers.", "K=V", takes_many=True)] = []
    api_key: Annotated[str | None, Option(SERVER, "Key of the API. [TIERCEL_API_KEY, OPENAI_API_KEY]", "KEY")] = None
    insecure: Annotated[bool, Option(SERVER, "Do not verify the server's certificate.")] = False
    model: Annotated[str | None, Option(SERVER, "Model to ask for; the first of /v1/models if left out.", "NAME")] = (
        None
    )
    served_model_name: Annotated[str | None, Option(SERVER, "Name to send, where it differs from --model.", "NAME")] = (
        None
    )
    tokenizer: Annotated[
        str | None, Option(SERVER, "Folder with a tokenizer.json that counts tokens; else the server counts.", "FOLDER")
    ] = None
    ready_check_timeout_sec: Annotated[float, Option(SERVER, "How long to wait for the server.", "SECONDS")] = 600.0
    request_timeout_sec: Annotated[float, Option(SERVER, "A request that takes longer has failed.", "SECONDS")] = 600.0

    num_prompts: Annotated[int, Option(LOAD, "Requests of each tenant (conversations for multi_turn).", "COUNT")] = 1000
    duration: Annotated[float | None, Option(LOAD, "Send nothing after this time.", "SECONDS")] = None
    request_rate: Annotated[float, Option(LOAD, "Requests per second; inf: all at once.", "RATE")] = float("inf")
    burstiness: Annotated[
        float, Option(LOAD, "Shape of the gamma gaps: 1 is Poisson, less comes in bursts, more is even.", "SHAPE")
    ] = 1.0
    arrivals: Annotated[
        Arrivals, Option(LOAD, "How requests arrive; auto: gamma at a rate, the trace's times for timed_trace.")
    ] = "auto"
    on_sec: Annotated[float, Option(LOAD, "on_off: how long requests come.", "SECONDS")] = 10.0
    off_sec: Annotated[float, Option(LOAD, "on_off: how long they do not.", "SECONDS")] = 10.0
    trace_speed: Annotated[float, Option(LOAD, "trace: 2 plays it in half the time.", "FACTOR")] = 1.0
    ramp_up_strategy: Annotated[Ramp | None, Option(LOAD, "Raise the rate over the run.")] = None
    ramp_up_start_rps: Annotated[float | None, Option(LOAD, "Rate at the start of the ramp.", "RATE")] = None
    ramp_up_end_rps: Annotated[float | None, Option(LOAD, "Rate at its end.", "RATE")] = None
    max_concurrency: Annotated[
        int | None, Option(LOAD, "Most requests at a time; with an infinite rate this is the closed loop.", "COUNT")
    ] = None
    num_warmups: Annotated[int, Option(LOAD, "Requests before the clock starts; not reported.", "COUNT")] = 1
    tenants: Annotated[
        str | None, Option(LOAD, "YAML file with a tenant's key, weight, arrivals, ... each.", "FILE")
    ] = None
    isolation: Annotated[bool, Option(LOAD, "Run each tenant alone first, then all together.")] = False
    client_processes: Annotated[str, Option(LOAD, "Processes that send and receive.", "auto|COUNT")] = "auto"
    seed: Annotated[int, Option(LOAD, "Arrivals and prompts depend on it and on nothing else.", "NUMBER")] = 0

    dataset_name: Annotated[DatasetName, Option(DATASET, "What to ask.")] = "random"
    dataset_path: Annotated[str | None, Option(DATASET, "File of the dataset.", "FILE")] = None
    input_len: Annotated[int | None, Option(DATASET, "Prompt length, whatever the dataset.", "TOKENS")] = None
    output_len: Annotated[int | None, Option(DATASET, "Answer length, whatever the dataset.", "TOKENS")] = None
    random_input_len: Annotated[int, Option(DATASET, "random: prompt length.", "TOKENS")] = 1024
    random_output_len: Annotated[int, Option(DATASET, "random: answer length.", "TOKENS")] = 128
    random_range_ratio: Annotated[
        float, Option(DATASET, "random, multi_turn: lengths vary by this part to both sides.", "RATIO")
    ] = 0.0
    random_prefix_len: Annotated[int, Option(DATASET, "random, multi_turn: tokens that all share.", "TOKENS")] = 0
    prefix_repetition_prefix_len: Annotated[int, Option(DATASET, "Tokens of a shared prefix.", "TOKENS")] = 256
    prefix_repetition_suffix_len: Annotated[int, Option(DATASET, "Tokens behind it.", "TOKENS")] = 256
    prefix_repetition_num_prefixes: Annotated[int, Option(DATASET, "How many prefixes.", "COUNT")] = 10
    prefix_repetition_output_len: Annotated[int, Option(DATASET, "Answer length.", "TOKENS")] = 128
    sharegpt_output_len: Annotated[int | None, Option(DATASET, "Answer length instead of the recorded.", "TOKENS")] = (
        None
    )
    custom_output_len: Annotated[int | None, Option(DATASET, "Answer length instead of the file's.", "TOKENS")] = None
    sonnet_input_len: Annotated[int, Option(DATASET, "sonnet: prompt length.", "TOKENS")] = 550
    sonnet_output_len: Annotated[int, Option(DATASET, "sonnet: answer length.", "TOKENS")] = 150
    sonnet_prefix_len: Annotated[int, Option(DATASET, "sonnet: shared tokens.", "TOKENS")] = 200
    multi_turn_num_turns: Annotated[int, Option(DATASET, "multi_turn: turns of a conversation.", "COUNT")] = 4
    multi_turn_think_sec: Annotated[float, Option(DATASET, "multi_turn: mean pause between turns.", "SECONDS")] = 1.0

    no_stream: Annotated[bool, Option(SAMPLING, "Ask for whole answers.")] = False
    logprobs: Annotated[int | None, Option(SAMPLING, "Log-probabilities to ask for.", "COUNT")] = None
    ignore_eos: Annotated[bool, Option(SAMPLING, "Ask the server to go on to the full length.")] = False
    temperature: Annotated[float, Option(SAMPLING, "0: always the likeliest.", "VALUE")] = 0.0
    top_p: Annotated[float | None, Option(SAMPLING, "Nucleus to sample from.", "VALUE")] = None
    top_k: Annotated[int | None, Option(SAMPLING, "How many of the likeliest to sample from.", "COUNT")] = None
    extra_body: Annotated[str | None, Option(SAMPLING, "More fields of every request; null removes one.", "JSON")] = (
        None
    )

    percentile_metrics: Annotated[
        str, Option(MEASURE, "Latencies in the report: ttft,tpot,itl,e2el,client_queue_time.", "LIST")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Option(MEASURE, "Percentiles of them.", "LIST")] = "99"
    goodput: Annotated[
        list[str], Option(MEASURE, "Goals that a good request keeps.", "METRIC:MS", takes_many=True)
    ] = []
    request_id_prefix: Annotated[str, Option(MEASURE, "Begin of every x-request-id.", "TEXT")] = "bench-"
    profile: Annotated[bool, Option(MEASURE, "Call /start_profile and /stop_profile around the run.")] = False
    disable_tqdm: Annotated[bool, Option(MEASURE, "No progress bar.")] = False

    save_result: Annotated[bool, Option(RESULT, "Write the result file.")] = False
    save_detailed: Annotated[bool, Option(RESULT, "Write it with every request in it.")] = False
    append_result: Annotated[bool, Option(RESULT, "Add to the file, one line a result.")] = False
    label: Annotated[str | None, Option(RESULT, "Name of the run.", "TEXT")] = None
    metadata: Annotated[list[str], Option(RESULT, "Keys to add to the result.", "K=V", takes_many=True)] = []
    result_dir: Annotated[str | None, Option(RESULT, "Folder of the result file.", "FOLDER")] = None
    result_filename: Annotated[str | None, Option(RESULT, "Name of the result file.", "NAME")] = None
    report: Annotated[str | None, Option(RESULT, "Draw the report into this folder.", "FOLDER")] = None

    def check(self) -> None:
        """Whether the flags make sense together. Errors: ConfigError."""
        for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "on_sec"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError("bench.flag", f"{flag_name(name)} {value}: must be greater than 0")
        if self.isolation and self.tenants is None:
            raise ConfigError("bench.flag", "--isolation compares tenants: give --tenants FILE")
        for name in _OF_ONE_TENANT if self.tenants is not None else ():
            if getattr(self, name) != getattr(_DEFAULTS, name):
                raise ConfigError("bench.flag", f"{flag_name(name)}: with --tenants it is said in the file, by tenant")
        if self.ramp_up_strategy and (self.ramp_up_start_rps is None or self.ramp_up_end_rps is None):
            raise ConfigError("bench.flag", "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if self.client_processes != "auto" and not (self.client_processes.isdigit() and int(self.client_processes)):
            raise ConfigError("bench.flag", f"--client-processes {self.client_processes}: auto or a number from 1 on")
        percentiles(self.metric_percentiles)
        for name in pairs("--metadata", self.metadata, "="):
            if is_reserved(name):
                raise ConfigError("bench.flag", f"--metadata {name}: the result has a key of this name")

    @property
    def root_url(self) -> str:
        """The server without /v1."""
        url = self.base_url or f"http://{self.host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def path(self) -> str:
        path = self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")
        return path if path.startswith("/") else f"/{path}"


_DEFAULTS = BenchSettings()
_OF_ALL_TENANTS = ("input_len", "output_len")  # the only flags of the panel that a file of tenants leaves alone
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
    """`K=V` words as a map. Errors: ConfigError."""
    found: dict[str, str] = {}
    for word in values:
        name, has_mark, value = word.partition(mark)
        if not has_mark or not name:
            raise ConfigError("bench.flag", f"{flag} {word}: write NAME{mark}VALUE")
        found[name] = value
    return found


def percentiles(text: str) -> tuple[float, ...]:
    """`50,99,99.9` as numbers. Errors: ConfigError."""
    try:
        numbers = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError as exc:
        raise ConfigError("bench.flag", f"--metric-percentiles {text}: write numbers, as in 50,99") from exc
    if not all(0 <= number <= 100 for number in numbers):
        raise ConfigError("bench.flag", f"--metric-percentiles {text}: a percentile is between 0 and 100")
    return numbers
