"""Share of structured outputs that are valid, on the embedded model and on a random one, over HTTP.

    python benchmarks/structured_validity.py [--generations 500] [--without-constraint]

Each model answers prompts under the schemas of `benchmarks/schemas.py`, with temperature 1 and a seed for each
generation. Every output that ends by itself (`finish_reason` "stop") must be a JSON document that `jsonschema` accepts;
those that end by `max_tokens` are counted apart. Exits with 1 if an output is invalid, or if fewer than half of the
outputs of a model end by themselves. `--without-constraint` leaves the schema out: the script must then exit with 1.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema

from benchmarks.checks import missed_checks
from benchmarks.daemon import running_daemon
from benchmarks.random_llama import random_llama
from benchmarks.schemas import SCHEMAS
from tiercel.embedded import MODEL_DIR

CONCURRENCY = 16
MAX_TOKENS = 400


def random_model(folder: Path) -> None:
    """Write a model folder for `--load-format dummy`, with the tokenizer of the embedded model."""
    embedded = Path(MODEL_DIR)
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((embedded / "config.json").read_text())
    fields = random_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=config["vocab_size"])
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    fields |= {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    (folder / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 2048}))


def is_valid(text: str, schema: dict[str, object]) -> bool:
    """Return whether a text is a JSON document that the schema accepts."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return validator.is_valid(document)


async def generate(
    client: httpx.AsyncClient, jobs: Iterator[int], constrained: bool, counts: Counter[str], wrong: list[str]
) -> None:
    """Send one request after the other until there are no more jobs."""
    names = list(SCHEMAS)
    for number in jobs:
        name = names[number % len(names)]
        form = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
        answer = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": f"Write the JSON document number {number}, {name}."}],
                "max_tokens": MAX_TOKENS,
                "temperature": 1.0,
                "seed": number,
                **({"response_format": form} if constrained else {}),
            },
        )
        if answer.status_code != 200:
            raise SystemExit(f"{name}: {answer.status_code} {answer.text}")
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"]
        if choice["finish_reason"] != "stop":
            counts["ended by max_tokens"] += 1
        elif is_valid(text, SCHEMAS[name]):
            counts["valid"] += 1
        else:
            counts["invalid"] += 1
            wrong.append(f"{name}: {text[:200]!r}")


async def measure(url: str, generations: int, constrained: bool) -> tuple[Counter[str], list[str]]:
    """Return the numbers of outputs of each kind, and the invalid ones."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    jobs = iter(range(generations))
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(generate(client, jobs, constrained, counts, wrong) for _ in range(CONCURRENCY)))
    return counts, wrong


def main() -> None:
    """Measure both models and exit with 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--generations", type=int, default=500, help="outputs of each model")
    parser.add_argument("--without-constraint", action="store_true", help="leave the schemas out of the requests")
    arguments = parser.parse_args()
    checks: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory() as name:
        random_model(Path(name) / "random")
        for model, flags in (
            ("embedded", []),
            ("random", ["--model", str(Path(name) / "random"), "--load-format", "dummy"]),
        ):
            with running_daemon(flags, Path(name) / f"{model}.log") as daemon:
                counts, wrong = asyncio.run(
                    measure(daemon.url, arguments.generations, not arguments.without_constraint)
                )
            print(f"{model}: {dict(counts)} over {len(SCHEMAS)} schemas")
            for line in wrong[:5]:
                print(f"  invalid {line}")
            ended = counts["valid"] + counts["invalid"]
            checks.append(
                (f"{model}: {counts['valid']} of {ended} outputs that ended are valid", not counts["invalid"])
            )
            checks.append((f"{model}: at least half of the outputs ended by themselves", 2 * ended >= counts.total()))
    sys.exit(1 if missed_checks(checks) else 0)


if __name__ == "__main__":
    main()
