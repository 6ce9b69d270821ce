"""The result file: `RunResult` as JSON, with its figures on the top level as in the files of other load tests."""

import re
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tiercel.loadtest.results.latency import gaps_s
from tiercel.loadtest.results.record import RunResult
from tiercel.values.errors import ConfigError
from tiercel.wire.encoding import plain_value

_FIGURE = re.compile(r"(mean|median|std|p\d+(\.\d+)?)_[a-z0-9_]+_ms")
_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts"}
_FIELDS = {field.encode_name for field in msgspec.structs.fields(RunResult)} - {"figures", "metadata"}


def is_reserved(key: str) -> bool:
    """Return whether --metadata may not use a key because the result file has it."""
    return key in _FIELDS or key in _DETAILS or _FIGURE.fullmatch(key) is not None


def encode_result(result: RunResult) -> bytes:
    """Return a result as JSON text in one line."""
    plain: dict[str, object] = msgspec.to_builtins(result, enc_hook=plain_value)
    figures, metadata = plain.pop("figures"), plain.pop("metadata")
    assert isinstance(figures, dict)
    assert isinstance(metadata, dict)
    detailed = _details(result) if result.requests else {}
    return msgspec.json.encode({**metadata, **plain, **figures, **detailed}, enc_hook=plain_value)


def decode_result(text: bytes) -> RunResult:
    """Return the result of a JSON text. Errors: ConfigError."""
    try:
        plain = msgspec.json.decode(text, type=dict[str, object])
        known = {key: value for key, value in plain.items() if key in _FIELDS}
        if isinstance(reasons := plain.get("errors"), list):  # with --save-detailed, one for each request
            known["errors"] = Tally(reason for reason in reasons if reason)
        figures = {key: value for key, value in plain.items() if _FIGURE.fullmatch(key)}
        metadata = {
            key: value
            for key, value in plain.items()
            if key not in known and key not in figures and isinstance(value, str)
        }
        return msgspec.convert({**known, "figures": figures, "metadata": metadata}, RunResult)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.result", f"not a result of tiercel bench serve: {exc}") from exc


def read_results(path: Path) -> list[RunResult]:
    """Return the results of a file, one per line (--append-result adds lines). Errors: ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError("bench.result", f"{path}: {exc.strerror}") from exc
    try:
        return list(_results(text))
    except ConfigError as exc:
        raise ConfigError("bench.result", f"{path}: {exc.message}") from exc


def write_result(result: RunResult, path: Path, *, append: bool = False) -> None:
    """Write or append one result. Errors: ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if append else "wb") as file:
            file.write(encode_result(result) + b"\n")
    except OSError as exc:
        raise ConfigError("bench.result", f"{path}: {exc.strerror}") from exc


def _results(text: bytes) -> Iterator[RunResult]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError("bench.result", "the file is empty")
    for line in lines:
        yield decode_result(line)


def _details(result: RunResult) -> dict[str, object]:
    """Return the parallel lists of --save-detailed, times in seconds; `requests` holds these values and more."""
    records = result.requests
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [0.0 if record.first_s is None else record.first_s - record.sent_s for record in records],
        "itls": [gaps_s(record) for record in records],
        "latencies": [record.end_s - record.sent_s for record in records],
        "start_times": [record.sent_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }
