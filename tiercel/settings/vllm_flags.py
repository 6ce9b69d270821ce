"""Flags of vLLM that are no settings here: refused where they would change the outcome, else accepted.

A flag that has no effect is accepted with a warning that says why, or without one if it asks for what the server does
anyway. A flag that holds a JSON object (`--structured-outputs-config`) is decided key by key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

_DEVICES = "one engine runs on one device; docs/scale.md shows how several engines serve together"
_LORA = "LoRA adapters are not served"
_MEDIA = "only text is served"
_PLUGIN = "third-party code is not loaded into the server"
_GRAPHS = "CUDA graphs cover all lengths and are captured per batch size; --enforce-eager disables them"
_DRAFTS = "draft models are not served; --prompt-lookup-num-tokens proposes tokens from earlier text"
_COPY = "change config.json in a copy of the model folder"
_LOCAL = "nothing is downloaded: give a folder, or org/name from the hub cache"
_CACHED = "the cached revision main is served"
_REMOTE_CODE = "a model folder that needs its own code is not served"
_GENERATION = (
    "one server generates text and answers /v1/embeddings, /v1/score and /v1/rerank; a model with a head of another "
    "kind is not served"
)
_GRAMMARS = "llguidance enforces every grammar"
_NO_EFFECT = "it has no effect: "
_SCHEMA_KEYS = "write additionalProperties into the schema"
_SPACES = "a request chooses with structured_outputs.disable_any_whitespace"

REFUSED: Final[dict[str, str]] = {
    "lora-modules": _LORA,
    "max-loras": _LORA,
    "max-lora-rank": _LORA,
    "max-cpu-loras": _LORA,
    "speculative-model": _DRAFTS,
    "num-speculative-tokens": _DRAFTS,
    "data-parallel-rank": _DEVICES,
    "data-parallel-start-rank": _DEVICES,
    "data-parallel-address": _DEVICES,
    "data-parallel-rpc-port": _DEVICES,
    "data-parallel-backend": _DEVICES,
    "node-rank": _DEVICES,
    "master-addr": _DEVICES,
    "master-port": _DEVICES,
    "tool-parser-plugin": _PLUGIN,
    "reasoning-parser-plugin": _PLUGIN,
    "mm-processor-kwargs": _MEDIA,
    "media-io-kwargs": _MEDIA,
    "allowed-local-media-path": _MEDIA,
    "allowed-media-domains": _MEDIA,
    "middleware": _PLUGIN,
    "scheduler-cls": _PLUGIN,
    "worker-extension-cls": _PLUGIN,
    "logits-processors": _PLUGIN,
    "logits-processor-pattern": _PLUGIN,
    "tool-server": "tools of other servers are not called; the client calls them",
    "kv-transfer-config": "KV is not sent to other engines",
    "kv-events-config": "changes of the prefix cache are not published; fronts of several engines hear of them",
    "max-num-queued-tokens": "use --max-num-queued-reqs",
    "max-num-active-seqs": "use --max-num-seqs",
    "nano-batch-size": "nano-batches are chosen by the planner",
    "num-nano-batches": "nano-batches are chosen by the planner",
    "custom-histogram-buckets": "the buckets of the metrics are fixed",
    "code-revision": _REMOTE_CODE,
    "download-dir": _LOCAL,
    "hf-overrides": _COPY,
    "hf-config-path": _COPY,
    "rope-scaling": _COPY,
    "rope-theta": _COPY,
    "quantization-param-path": "scales of 8-bit KV are computed while tokens are stored",
    "ssl-ca-certs": "client certificates are not checked; use a proxy that does",
    "log-config-file": "see --log-level and --log-format",
    "pooler-output-dtype": "embeddings are float32; a request chooses encoding_format",
}
"""Flags that have no value which the server could honour."""


@dataclass(frozen=True, slots=True)
class Harmless:
    """A flag, or a key of a JSON flag, that has no effect.

    A value among `same` asks for what the server does anyway. Other values are refused with the reason `otherwise`, or
    accepted with the warning `note` if there is no such reason. The value of a switch is `true`, with --no- `false`.
    """

    same: tuple[str, ...] = ()
    note: str = ""
    otherwise: str = ""
    takes: Literal["value", "values", "perhaps a value", "nothing"] = "value"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key of a JSON flag that acts as a setting."""

    flag: str  # without the dashes
    words: tuple[str, ...] = ()  # in any case; empty: the flag judges the value
    otherwise: str = ""  # the reason why other words are refused


def _only(*same: str, otherwise: str) -> Harmless:
    return Harmless(same=same, otherwise=otherwise)


def _without_effect(reason: str) -> Harmless:
    return Harmless(note=f"{_NO_EFFECT}{reason}")


def _idle_switch(reason: str) -> Harmless:
    return Harmless(note=f"{_NO_EFFECT}{reason}", takes="nothing")


def _always_on(reason: str) -> Harmless:
    return Harmless(same=("true",), otherwise=reason, takes="nothing")


def _never_on(reason: str) -> Harmless:
    return Harmless(same=("false",), otherwise=reason, takes="nothing")


HARMLESS: Final[dict[str, Harmless]] = {
    "tensor-parallel-size": _only("1", otherwise=_DEVICES),
    "pipeline-parallel-size": _only("1", otherwise=_DEVICES),
    "data-parallel-size": _only("1", otherwise=_DEVICES),
    "data-parallel-size-local": _only("1", otherwise=_DEVICES),
    "decode-context-parallel-size": _only("1", otherwise=_DEVICES),
    "prefill-context-parallel-size": _only("1", otherwise=_DEVICES),
    "nnodes": _only("1", otherwise=_DEVICES),
    "api-server-count": _only("1", otherwise="one command starts one HTTP process; docs/scale.md shows several fronts"),
    "distributed-executor-backend": _only("mp", "uni", otherwise=_DEVICES),
    "headless": _never_on(_DEVICES),
    "enable-expert-parallel": _never_on(_DEVICES),
    "enable-eplb": _never_on(_DEVICES),
    "trust-remote-code": _never_on(_REMOTE_CODE),
    "enable-lora": _never_on(_LORA),
    "enable-prompt-embeds": _never_on("prompts are text or token ids"),
    "enable-sleep-mode": _never_on("the weights stay on the device while the server runs"),
    "skip-tokenizer-init": _never_on("the server needs a tokenizer"),
    "disable-sliding-window": _never_on("use --max-model-len"),
    "enable-log-outputs": _never_on("texts of prompts and answers are never logged"),
    "enable-dbo": _never_on("`tiercel calibrate` measures which steps gain from overlapping halves"),
    "kv-sharing-fast-prefill": _never_on("every layer computes the whole prompt"),
    "enable-mm-embeds": _never_on(_MEDIA),
    "worker-cls": _only("auto", otherwise=_PLUGIN),
    "config-format": _only("auto", "hf", otherwise="the configuration is read from config.json"),
    "revision": _only("main", otherwise=_CACHED),
    "tokenizer-revision": _only("main", otherwise=_CACHED),
    "kv-offloading-backend": _only("native", otherwise="KV tiers are built in; see --kv-host-size"),
    "max-num-partial-prefills": _only("1", otherwise="the token budget limits them; see --max-num-batched-tokens"),
    "prefix-caching-hash-algo": _only("sha256", otherwise="blocks are keyed by SHA-256"),
    "tokenizer-mode": _only("auto", "hf", "fast", otherwise="the tokenizer is read from tokenizer.json"),
    "chat-template-content-format": _only(
        "auto", "string", otherwise="the template receives message content as a string"
    ),
    "logprobs-mode": _only("raw_logprobs", otherwise="log-probabilities are those of the model before sampling"),
    "runner": _only("auto", "generate", "pooling", otherwise=_GENERATION),
    "task": _only("auto", "generate", "embed", "embedding", "score", otherwise=_GENERATION),
    "convert": _only("auto", "none", "embed", otherwise=_GENERATION),
    "response-role": _only("assistant", otherwise="answers have the role assistant"),
    "ssl-cert-reqs": _only("0", otherwise="client certificates are not checked; use a proxy that does"),
    "cpu-offload-gb": Harmless(
        same=("0",),
        note=f"{_NO_EFFECT}the device holds all weights, except experts of a mixture beyond --expert-memory",
    ),
    "calculate-kv-scales": _idle_switch("scales of 8-bit KV are always computed; see --kv-cache-dtype"),
    "guided-decoding-backend": Harmless(same=("auto", "guidance"), note=f"{_NO_EFFECT}{_GRAMMARS}"),
    "guided-decoding-disable-fallback": _idle_switch(_GRAMMARS),
    "guided-decoding-disable-any-whitespace": _never_on(_SPACES),
    "guided-decoding-disable-additional-properties": _never_on(_SCHEMA_KEYS),
    "limit-mm-per-prompt": _without_effect(f"{_MEDIA}, and requests with images or audio are refused"),
    "language-model-only": _always_on(_MEDIA),
    "hf-token": Harmless(note=f"{_NO_EFFECT}{_LOCAL}", takes="perhaps a value"),
    "ignore-patterns": Harmless(note=f"{_NO_EFFECT}{_LOCAL}", takes="values"),
    "collect-detailed-traces": _without_effect("every stage of a request is traced; see --otlp-traces-endpoint"),
    "uvicorn-log-level": _without_effect("warnings of the HTTP server are logged; see --log-level"),
    "disable-uvicorn-access-log": _always_on("there is no access log; see --enable-log-requests"),
    "enable-auto-tool-choice": _always_on("a request chooses with tool_choice"),
    "enable-chunked-prefill": _always_on("long prompts are always computed in chunks"),
    "disable-custom-all-reduce": _idle_switch("one device has nothing to reduce"),
    "disable-cascade-attn": _idle_switch("a shared prefix is stored once and read by every sequence"),
    "disable-hybrid-kv-cache-manager": _idle_switch("all layers have blocks of one size"),
    "use-v2-block-manager": _idle_switch("there is one manager of blocks"),
    "use-tqdm-on-load": _idle_switch("progress is logged, and reported by /ready"),
    "disable-frontend-multiprocessing": _idle_switch("the engine always runs in its own process"),
    "disable-log-stats": _idle_switch("statistics are metrics, not log lines"),
    "num-scheduler-steps": _without_effect("one step is launched ahead"),
    "tokenizer-pool-size": _without_effect("texts are encoded in threads"),
    "max-parallel-loading-workers": _without_effect("weights are read by one process"),
    "max-seq-len-to-capture": _without_effect(_GRAPHS),
    "max-cudagraph-capture-size": _without_effect(_GRAPHS),
    "cuda-graph-sizes": Harmless(note=f"{_NO_EFFECT}{_GRAPHS}", takes="values"),
    "cudagraph-capture-sizes": Harmless(note=f"{_NO_EFFECT}{_GRAPHS}", takes="values"),
    "compilation-config": _without_effect(_GRAPHS),
    "optimization-level": _without_effect(_GRAPHS),
    "max-log-len": _without_effect("prompts are never logged"),
    "disable-access-log-for-endpoints": _without_effect("there is no access log"),
    "show-hidden-metrics-for-version": _without_effect("no metric is hidden"),
}

CONFIGS: Final[Mapping[str, Mapping[str, Harmless | Renamed]]] = {
    "structured-outputs-config": {
        "backend": HARMLESS["guided-decoding-backend"],
        "disable-fallback": Harmless(same=("true", "false")),
        "disable-any-whitespace": _only("false", otherwise=_SPACES),
        "disable-additional-properties": _only("false", otherwise=_SCHEMA_KEYS),
        "reasoning-parser": Renamed("reasoning-parser"),
        "enable-in-reasoning": Harmless(
            same=("true",),
            note=f"{_NO_EFFECT}grammars hold from the first token, those of required calls behind the thoughts",
        ),
    },
    "pooler-config": {
        "pooling-type": Renamed("pooling", ("last", "mean"), otherwise="embeddings are pooled by last or mean"),
        "normalize": _only("true", otherwise="embeddings have the length 1"),
        "use-activation": _only("true", otherwise="embeddings have the length 1"),
    },
    "speculative-config": {
        "method": _only("ngram", "[ngram]", otherwise=_DRAFTS),
        "model": _only("ngram", "[ngram]", otherwise=_DRAFTS),
        "num-speculative-tokens": Renamed("prompt-lookup-num-tokens"),
        "prompt-lookup-max": _without_effect("the last 4 to 2 tokens are looked up"),
        "prompt-lookup-min": _without_effect("the last 4 to 2 tokens are looked up"),
    },
}
"""Flags that hold a JSON object, whole or by dotted keys: `--structured-outputs-config.backend xgrammar`."""

RENAMED: Final[dict[str, str]] = {"disable-log-requests": "no-enable-log-requests"}
"""Deprecated spellings that still act, with a warning."""

OTHER_NAMES: Final[dict[str, str]] = {
    "override-pooler-config": "pooler-config",  # the older one
    "enable-tokenizer-info-endpoint": "tokenizer-info-endpoint",  # too long for --help on a screen of 80 columns
}
"""vLLM's names of flags that have another one here."""

IN_GIB: Final[dict[str, str]] = {
    "swap-space": "kv-host-size",
    "host-swap-space": "kv-host-size",
    "kv-offloading-size": "kv-host-size",
}
"""Other spellings of sizes. A number without a unit is GiB, as in vLLM."""

SHORT: Final[dict[str, str]] = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-O": "compilation-config",
}
"""vLLM's short spellings of the flags above."""
