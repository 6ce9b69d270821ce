"""Flags of vLLM without effect here: refused where they would change the outcome, else accepted with a warning."""

from dataclasses import dataclass
from typing import Final

_TENSORS = "one engine runs on one device"
_LORA = "LoRA adapters are not served"
_GRAMMAR = "structured output is not served yet"
_MEDIA = "only text models are served"
_PLUGIN = "third-party code is not loaded into the server"
_GRAPHS = "CUDA graphs cover all lengths and are captured per batch size; --enforce-eager disables them"
_DRAFTS = "draft models are not served; --prompt-lookup-num-tokens proposes tokens from earlier text"

REFUSED: Final[dict[str, str]] = {
    "calculate-kv-scales": "KV has the type of the weights",
    "trust-remote-code": "a model folder that needs its own code is not served",
    "enable-lora": _LORA,
    "lora-modules": _LORA,
    "max-loras": _LORA,
    "max-lora-rank": _LORA,
    "max-cpu-loras": _LORA,
    "speculative-config": _DRAFTS,
    "speculative-model": _DRAFTS,
    "num-speculative-tokens": _DRAFTS,
    "enable-expert-parallel": _TENSORS,
    "distributed-executor-backend": _TENSORS,
    "headless": _TENSORS,
    "tool-parser-plugin": _PLUGIN,
    "reasoning-parser-plugin": _PLUGIN,
    "guided-decoding-backend": _GRAMMAR,
    "structured-outputs-config": _GRAMMAR,
    "limit-mm-per-prompt": _MEDIA,
    "mm-processor-kwargs": _MEDIA,
    "allowed-local-media-path": _MEDIA,
    "middleware": _PLUGIN,
    "scheduler-cls": _PLUGIN,
    "worker-cls": _PLUGIN,
    "worker-extension-cls": _PLUGIN,
    "logits-processors": _PLUGIN,
    "kv-transfer-config": "KV is not sent to other engines",
    "cpu-offload-gb": "all weights are on the one device",
    "max-num-queued-tokens": "use --max-num-queued-reqs",
    "max-num-active-seqs": "use --max-num-seqs",
    "nano-batch-size": "nano-batches are chosen by the planner",
    "num-nano-batches": "nano-batches are chosen by the planner",
    "compilation-config": _GRAPHS,
    "cuda-graph-sizes": _GRAPHS,
    "cudagraph-capture-sizes": _GRAPHS,
    "collect-detailed-traces": "every stage of a request is traced; see --otlp-traces-endpoint",
    "custom-histogram-buckets": "the buckets of the metrics are fixed",
    "skip-tokenizer-init": "the server needs a tokenizer",
    "tokenizer-revision": "the cached revision main is served",
    "revision": "the cached revision main is served",
    "code-revision": "a model folder that needs its own code is not served",
    "download-dir": "nothing is downloaded: give a folder, or org/name from the hub cache",
    "hf-overrides": "change config.json in a copy of the model folder",
    "hf-token": "nothing is downloaded: give a folder, or org/name from the hub cache",
    "disable-sliding-window": "use --max-model-len",
    "no-enable-chunked-prefill": "long prompts are always computed in chunks",
    "ssl-ca-certs": "client certificates are not checked; use a proxy that does",
    "ssl-cert-reqs": "client certificates are not checked; use a proxy that does",
}


@dataclass(frozen=True, slots=True)
class Harmless:
    """A flag that is accepted and has no effect."""

    values: tuple[str, ...] = ()  # accepted values; empty = any value; see `takes_value`
    note: str = ""  # the warning; empty = none, because the flag asks for the behaviour of the server
    otherwise: str = ""  # the reason why other values are refused
    takes_value: bool = True


def _only(*values: str, otherwise: str) -> Harmless:
    return Harmless(values=values, otherwise=otherwise)


def _old_switch(note: str = "") -> Harmless:
    return Harmless(note=note, takes_value=False)


HARMLESS: Final[dict[str, Harmless]] = {
    "tensor-parallel-size": _only("1", otherwise=_TENSORS),
    "pipeline-parallel-size": _only("1", otherwise=_TENSORS),
    "data-parallel-size": _only("1", otherwise=_TENSORS),
    "api-server-count": _only("1", otherwise="there is one HTTP process"),
    "kv-offloading-backend": _only("native", otherwise="KV tiers are built in; see --kv-host-size"),
    "max-num-partial-prefills": _only("1", otherwise="the token budget limits them; see --max-num-batched-tokens"),
    "prefix-caching-hash-algo": _only("sha256", otherwise="blocks are keyed by SHA-256"),
    "tokenizer-mode": _only("auto", "hf", "fast", otherwise="the tokenizer is read from tokenizer.json"),
    "chat-template-content-format": _only(
        "auto", "string", otherwise="the template receives message content as a string"
    ),
    "runner": _only("auto", "generate", otherwise="only text generation is served"),
    "task": _only("auto", "generate", otherwise="only text generation is served"),
    "response-role": _only("assistant", otherwise="answers have the role assistant"),
    "uvicorn-log-level": Harmless(note="it has no effect: warnings of the HTTP server are logged; see --log-level"),
    "disable-uvicorn-access-log": _old_switch(),
    "enable-auto-tool-choice": _old_switch(),  # always on
    "enable-chunked-prefill": _old_switch(),
    "disable-custom-all-reduce": _old_switch(),
    "use-v2-block-manager": _old_switch("it has no effect"),
    "disable-frontend-multiprocessing": _old_switch("it has no effect: the engine always runs in its own process"),
    "disable-log-stats": _old_switch("it has no effect: statistics are metrics, not log lines"),
    "num-scheduler-steps": Harmless(note="it has no effect: one step is launched ahead"),
    "max-seq-len-to-capture": Harmless(note=f"it has no effect: {_GRAPHS}"),
    "max-cudagraph-capture-size": Harmless(note=f"it has no effect: {_GRAPHS}"),
    "max-log-len": Harmless(note="it has no effect: prompts are never logged"),
    "disable-access-log-for-endpoints": Harmless(note="it has no effect: there is no access log"),
    "show-hidden-metrics-for-version": Harmless(note="it has no effect: no metric is hidden"),
}

RENAMED: Final[dict[str, str]] = {"disable-log-requests": "no-enable-log-requests"}
"""Deprecated spellings that still act, with a warning."""

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
    "-q": "quantization",
    "-sc": "speculative-config",
}
"""vLLM's short spellings of the flags above."""
