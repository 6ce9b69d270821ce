"""Text to token ids and back, from a model folder; no torch, no network."""

import contextlib
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from tiercel.checkpoint import read_json_object
from tiercel.errors import ConfigError
from tiercel.server.text.vocabulary import Vocabulary, is_control

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """One tokenizer and its twin that knows no control tokens.

    Encoding releases the interpreter lock; call it in a worker thread. All methods may run in several threads.
    """

    def __init__(self, tokenizer_json: str, config: dict[str, object], chat_template: str | None) -> None:
        self._json = tokenizer_json
        self._tokenizer = _parse(tokenizer_json)
        self._twin: tuple[Tokenizer, dict[int, int]] | None = None
        self._twin_lock = threading.Lock()
        self.vocabulary = Vocabulary.of(self._tokenizer)
        self.named_specials = _named_specials(config)
        self.chat_template = chat_template

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as special tokens."""
        return self.vocabulary.special_texts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which special tokens are recognised."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which no control token is recognised.

        A vocabulary that has a control token among its ordinary pieces may still give it: callers look.
        """
        twin, moved = self._plain_twin()
        tokens = twin.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [moved.get(token, token) for token in tokens] if moved else tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text at once."""
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_name(self, token: int) -> str | None:
        """How the tokenizer spells a token; None outside its vocabulary."""
        return self._tokenizer.id_to_token(token)

    def _plain_twin(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer without its control tokens, and the ids of the added tokens that moved up in their place."""
        with self._twin_lock:
            if self._twin is None:
                spec = json.loads(self._json)
                added = [entry for entry in spec["added_tokens"] if not _is_control(entry)]
                twin = _parse(json.dumps({**spec, "added_tokens": added, "post_processor": None}))
                places = {entry["id"]: twin.token_to_id(entry["content"]) for entry in added}
                self._twin = twin, {new: old for old, new in places.items() if new not in (None, old)}
            return self._twin


def load_text_codec(folder: Path, chat_template: str | None = None) -> TextCodec:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a folder.

    `chat_template` overrides the folder's: a file, or the template itself.
    Errors: ConfigError naming the file.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("tokenizer.missing", f"{path} is missing: the model folder has no fast tokenizer")
    with _named_file(path):
        text = path.read_text(encoding="utf-8")
        config = _read_object(folder / "tokenizer_config.json")
        template = _read_template(folder, config, chat_template)
        return TextCodec(text, config, template)


@contextlib.contextmanager
def _named_file(path: Path) -> Generator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as exc:
        raise ConfigError("tokenizer.unreadable", f"cannot read {path}: {exc}") from exc


def _is_control(entry: dict[str, Any]) -> bool:  # Any: an entry of tokenizer.json, which the library has checked
    return is_control(entry["content"], special=entry["special"])


def _parse(tokenizer_json: str) -> Tokenizer:
    """Errors: ValueError (the library raises a bare Exception)."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except BaseException as exc:
        if type(exc) is not Exception:
            raise
        raise ValueError(str(exc)) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_object(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}


def _read_template(folder: Path, config: dict[str, object], override: str | None) -> str | None:
    if override is not None:
        if "{" in override or "\n" in override:
            return override
        try:
            return Path(override).read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigError("chat_template.unreadable", f"cannot read the chat template {override}: {exc}") from exc
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    return _template_of(config.get("chat_template"))


def _template_of(value: object) -> str | None:
    """A template, or the one called `default` of a list of named templates."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in cast(list[object], value):
            if isinstance(entry, dict):
                named = cast(dict[str, object], entry)
                template = named.get("template")
                if named.get("name") == "default" and isinstance(template, str):
                    return template
    return None


def _named_specials(config: dict[str, object]) -> dict[str, str]:
    """`bos_token` and its siblings by name, as templates use them."""
    specials: dict[str, str] = {}
    for name in _NAMED_SPECIALS:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast(dict[str, object], value).get("content")
        if isinstance(value, str):
            specials[name] = value
    return specials
