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
    """One tokenizer, and a copy of it that recognises no control tokens.

    Encoding releases the interpreter lock: call it in a worker thread. All methods are thread-safe.
    """

    def __init__(self, tokenizer_json: str, config: dict[str, object], chat_template: str | None) -> None:
        self._json = tokenizer_json
        self._tokenizer = _parse(tokenizer_json)
        self._plain: tuple[Tokenizer, dict[int, int]] | None = None
        self._plain_lock = threading.Lock()
        self.vocabulary = Vocabulary.of(self._tokenizer)
        self.named_specials = _named_specials(config)
        self.chat_template = chat_template

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as special tokens."""
        return self.vocabulary.special_texts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text in which special tokens are recognised."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which no control token is recognised.

        A vocabulary with a control token among its ordinary pieces may still yield it: the caller must check.
        """
        plain, moved = self._without_controls()
        tokens = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [moved.get(token, token) for token in tokens] if moved else tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens that are decoded at once."""
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_name(self, token: int) -> str | None:
        """Return the tokenizer's spelling of a token; None outside its vocabulary."""
        return self._tokenizer.id_to_token(token)

    def token_id(self, name: str) -> int | None:
        """Return the id of a token by the tokenizer's spelling; None if it has no such token."""
        return self._tokenizer.token_to_id(name)

    def _without_controls(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return the tokenizer without its control tokens, and the original ids of added tokens that changed theirs."""
        with self._plain_lock:
            if self._plain is None:
                spec = json.loads(self._json)
                added = [entry for entry in spec["added_tokens"] if not _is_control(entry)]
                plain = _parse(json.dumps({**spec, "added_tokens": added, "post_processor": None}))
                places = {entry["id"]: plain.token_to_id(entry["content"]) for entry in added}
                self._plain = plain, {new: old for old, new in places.items() if new not in (None, old)}
            return self._plain


def load_text_codec(folder: Path, chat_template: str | None = None) -> TextCodec:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a folder.

    `chat_template` is a file or a template that replaces the folder's. Errors: ConfigError naming the file.
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


def _is_control(entry: dict[str, Any]) -> bool:  # Any: an entry of tokenizer.json, checked by the library
    return is_control(entry["content"], special=entry["special"])


def _parse(tokenizer_json: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Errors: ValueError (the library raises a bare Exception)."""
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
    """Return the template, or the template called `default` of a list of named templates."""
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
    """Return `bos_token` and the like by name, as templates use them."""
    specials: dict[str, str] = {}
    for name in _NAMED_SPECIALS:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast(dict[str, object], value).get("content")
        if isinstance(value, str):
            specials[name] = value
    return specials
