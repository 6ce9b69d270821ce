"""Lists of requests as token ids in JSON lines, for engines that are measured without HTTP."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from tiercel.loadtest.load.datasets.dataset import DatasetQuery
from tiercel.loadtest.load.datasets.registry import conversations
from tiercel.loadtest.load.mix import DatasetSettings
from tiercel.loadtest.load.tokens import FolderCounter, TextMaker
from tiercel.loadtest.results.record import ONLY
from tiercel.system.file_fault import is_there
from tiercel.values.errors import ConfigError, TiercelError

_MOST_ID = 2**32 - 1
_encoder = msgspec.json.Encoder()


class ListedRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: the prompt, and the length of the answer; the end of a sequence is ignored."""

    prompt_token_ids: list[int]
    output_len: int

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty")
        for token in (min(self.prompt_token_ids), max(self.prompt_token_ids)):
            if not 0 <= token <= _MOST_ID:
                raise ValueError(f"prompt_token_ids: {token} is not a token id, from 0 to {_MOST_ID}")
        if self.output_len < 1:
            raise ValueError(f"output_len {self.output_len}: must be at least 1")


def read_requests(path: Path) -> list[ListedRequest]:
    """Read the requests of a file. Errors: ConfigError that names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError("bench.requests", f"--requests {path}: {exc.strerror}") from exc
    found: list[ListedRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=ListedRequest))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError("bench.requests", f"--requests {path} line {number}: {exc}") from exc
    if not found:
        raise ConfigError("bench.requests", f"--requests {path}: the file has no requests")
    return found


def write_requests(path: Path, requests: Iterable[ListedRequest]) -> None:
    """Write a file for `read_requests` and the scripts in benchmarks/cpu. Errors: TiercelError."""
    try:
        path.write_bytes(b"".join(map(_line, requests)))
    except OSError as exc:
        raise TiercelError("bench.requests", f"--save-requests {path}: {exc.strerror}") from exc


def digest(requests: Iterable[ListedRequest]) -> str:
    """Return the SHA-256 of the file that `write_requests` writes, to show that two engines got the same requests."""
    found = hashlib.sha256()
    for request in requests:
        found.update(_line(request))
    return found.hexdigest()


def draw_requests(
    settings: DatasetSettings, count: int, seed: int, vocab_size: int, tokenizer: Path
) -> list[ListedRequest]:
    """Return requests of a dataset as token ids, determined by the arguments and the dataset's file alone.

    Random words are drawn as token ids, so that lengths are exact and no tokenizer is needed; a dataset with texts of
    its own needs the tokenizer in the folder `tokenizer`. Errors: ConfigError.
    """
    if settings.name == "multi_turn":
        raise ConfigError(
            "bench.dataset",
            "--dataset-name multi_turn: a turn needs the answer before it, which only `bench serve` has",
        )
    texts, encode = _DrawnTexts(vocab_size), _ids
    if settings.has_own_texts or settings.name == "sonnet":
        if not is_there(tokenizer / "tokenizer.json"):
            needs = f"--dataset-name {settings.name} needs a tokenizer: there is no tokenizer.json in {tokenizer}"
            raise ConfigError("bench.tokenizer", needs)
        counter = FolderCounter(tokenizer)
        texts, encode = TextMaker(counter), counter.encode
    found = conversations(DatasetQuery(settings, count, f"{seed}/{ONLY}", texts))
    turns = [conversation.turns[0] for conversation in found]
    try:
        return [ListedRequest(prompt_token_ids=encode(turn.prompt), output_len=turn.output_tokens) for turn in turns]
    except ValueError as exc:
        raise ConfigError("bench.dataset", f"dataset {settings.in_words()}: {exc}") from exc


def draw_like(requests: Sequence[ListedRequest], seed: int, vocab_size: int) -> list[ListedRequest]:
    """Return requests of the same lengths with other prompts, for warming up without filling the prefix cache."""
    rng = random.Random(f"{seed}/warm-up")  # noqa: S311 - token ids, not secrets
    return [
        ListedRequest(
            prompt_token_ids=rng.choices(range(vocab_size), k=len(request.prompt_token_ids)),
            output_len=request.output_len,
        )
        for request in requests
    ]


class _Characters:
    """Counts one token per character."""

    is_exact = True
    source = "token ids that were drawn"

    def count(self, text: str) -> int:
        return len(text)


class _DrawnTexts(TextMaker):
    """Texts in which every character stands for the token id of its code point."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(_Characters())
        self._ids = range(vocab_size)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Return `tokens` uniformly drawn ids."""
        return "".join(map(chr, rng.choices(self._ids, k=tokens)))


def _ids(text: str) -> list[int]:
    return list(map(ord, text))


def _line(request: ListedRequest) -> bytes:
    return _encoder.encode(request) + b"\n"
