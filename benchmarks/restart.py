"""A restart with the SSD tier: time to first token of one long prompt, cold and after the daemon was started again.

    python benchmarks/restart.py [--model FOLDER] [--tokens 4000] [--flags '--threads 2'] [--json FILE]

Without --model a Qwen2 of the 0.5 B class with random weights is served. The prompt is served once, the daemon is
stopped with SIGTERM after the answer and started again on the same folder. Then the prompt is sent twice; the second
time its blocks are in memory. In bfloat16 the answer of a random model may differ between chunks of 256 and of 16
tokens; it must not differ between disk and memory.

Exit code 1 if fewer than 95 % of the prompt's tokens come from the SSD after the restart, if the first token is not at
least `--least-ratio` (5) times faster than cold, or if the answer differs from that with the blocks in memory.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.daemon import running_daemon
from tiercel.embedded import MODEL_DIR

ANSWER_S = 300.0

QWEN2_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def make_model(folder: Path) -> list[str]:
    """Write a model folder for `--load-format dummy`, which makes random weights. Return the flags to serve it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2_HALF_B))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder / name)
    return [str(folder), "--load-format", "dummy", "--seed", "7"]


def ask(url: str, log: Path, prompt: list[int]) -> tuple[float, str, int]:
    """Return the seconds to the first token, the text, and the number of cached prompt tokens.

    The time is that of the daemon's log: a random token may give no text, so that a stream would not show it.
    """
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S).raise_for_status().json()
    time.sleep(0.2)
    done = [line for line in log.read_text().splitlines() if '"request_done"' in line]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return json.loads(done[-1])["ttft_ms"] / 1e3, answer["choices"][0]["text"], cached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--flags", default="", help="more flags of `tiercel serve`")
    parser.add_argument("--folder", type=Path, help="where the SSD tier lies; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--least-ratio", type=float, default=5.0, help="of the cold first token to the warm one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        model = [str(args.model)] if args.model else make_model(folder / "model")
        flags = [*model, "--kv-disk-path", str(folder / "kv"), "--kv-disk-size", "1G", *shlex.split(args.flags)]
        prompt = [100 + (number * 7919) % 1000 for number in range(args.tokens)]
        warm_up = [200] * 64
        with running_daemon(flags, folder / "first.log") as (url, log, process):
            ask(url, log, warm_up)
            cold_s, _, _ = ask(url, log, prompt)
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            process.wait()
            drain_s = time.monotonic() - began_s
        with running_daemon(flags, folder / "second.log") as (url, log, _):
            ask(url, log, warm_up)
            warm_s, said, cached = ask(url, log, prompt)
            hit_s, again, _ = ask(url, log, prompt)  # the same work with the blocks in memory
    result = {
        "tokens": args.tokens, "cold_s": round(cold_s, 3), "warm_s": round(warm_s, 3), "hit_s": round(hit_s, 3),
        "ratio": round(cold_s / warm_s, 1), "drain_s": round(drain_s, 2), "cached_tokens": cached,
        "is_same_answer": said == again, "load": os.getloadavg()[0],
    }  # fmt: skip
    print(f"first token of {args.tokens} tokens: cold {cold_s:.2f} s, after a restart {warm_s:.3f} s: "
          f"{cold_s / warm_s:.1f} times sooner (from memory {hit_s:.3f} s)")  # fmt: skip
    print(f"cached {cached} tokens, drain {drain_s:.1f} s, same answer as from memory: {said == again}")
    if args.json:
        args.json.write_text(json.dumps(result))
    checks = {
        f"{cached} of {args.tokens} tokens came from a cache": cached < 0.95 * args.tokens,
        f"less than {args.least_ratio:g} times sooner than cold": cold_s < args.least_ratio * warm_s,
        "the answer differs from the one out of memory": said != again,
    }
    broken = [text for text, is_broken in checks.items() if is_broken]
    for text in broken:
        print(f"FAILED: {text}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
