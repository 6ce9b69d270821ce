"""Text to token ids and back, from a model folder; no torch, no network."""

import contextlib
import json
import logging
import threading
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Literal, cast

from msgspec import Struct
from tokenizers import Tokenizer

from tiercel.modelfile.checkpoint import read_json_object
from tiercel.server.text.vocabulary import Vocabulary
from tiercel.system.file_fault import is_there, list_folder
from tiercel.values.errors import ConfigError

_TEMPLATES = ("default", "tool_use")  # of named templates; those of other names are for other uses
_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

log = logging.getLogger(__name__)


_PIECE_LETTERS = 16 * 1024
_PIECE_SLACK = 64  # tokens by which a piece may have more than its part of the whole text
_LONG_LETTERS = 4 * _PIECE_LETTERS


class LongTextError(Exception):
    """A text has more tokens than it may have. `at_least` is a number of them."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least = at_least


class Truncation(Struct, frozen=True):
    """The number of tokens that are kept of a prompt, those included that the tokenizer adds, which stay.

    They are the last ones, or the first ones where the right side is removed.
    """

    tokens: int  # >= 1
    side: Literal["left", "right"] = "left"  # from which tokens are removed

    def kept(self, tokens: list[int], room: int) -> list[int]:
        """Return so many of the tokens."""
        if len(tokens) <= room:
            return tokens
        return tokens[:room] if self.side == "right" else tokens[len(tokens) - room :]


class TextCodec:
    """One tokenizer.

    Encoding releases the interpreter lock: call it in a worker thread. All methods are thread-safe.
    """

    def __init__(
        self,
        tokenizer_json: str,
        config: dict[str, object],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        self._json = tokenizer_json
        self._tokenizer = _parse(tokenizer_json)
        self.vocabulary = Vocabulary.of(self._tokenizer)
        self.config = config  # of tokenizer_config.json
        self._frame = _frame_of(self._tokenizer)
        self.named_specials = _named_specials(config)
        self.chat_template = chat_template
        self.tool_template = tool_template  # renders conversations with tools instead
        self._bos: int | None = None
        if (bos := self.named_specials.get("bos_token")) is not None:
            self._bos = self._tokenizer.token_to_id(bos)

    @property
    def template_text(self) -> str | None:
        """The text of all chat templates, in which the formats of answers are recognised."""
        if self.chat_template is None or self.tool_template is None:
            return self.chat_template
        return f"{self.chat_template}\n{self.tool_template}"

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as special tokens."""
        return self.vocabulary.special_texts

    def encode(self, text: str, *, add_special_tokens: bool, most_tokens: int | None = None) -> list[int]:
        """Return the ids of a text in which special tokens are recognised.

        The tokenizer takes 150 to 400 bytes for each token while it works. With `most_tokens` a long text that has
        more is refused after as many have been counted, piece by piece. Errors: LongTextError.
        """
        if most_tokens is not None and len(text) > max(_LONG_LETTERS, most_tokens):
            self._refuse_long(text, most_tokens)
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def framed(self, tokens: list[int], *, add_special_tokens: bool, truncation: Truncation | None = None) -> list[int]:
        """Return the tokens of a text, encoded without special ones, with those that the tokenizer adds; truncated."""
        before, after = self._frame if add_special_tokens else ([], [])
        if truncation is not None:
            room = truncation.tokens - len(before) - len(after)
            if room <= 0:
                return truncation.kept([*before, *after], truncation.tokens)
            tokens = truncation.kept(tokens, room)
        return [*before, *tokens, *after] if before or after else tokens

    def warn_of_double_bos(self, prompts: Iterable[Sequence[int]]) -> None:
        """Log once if a prompt begins with BOS twice: its text has it, and the tokenizer adds it."""
        if self._bos is None:
            return
        if any(len(tokens) > 1 and tokens[0] == tokens[1] == self._bos for tokens in prompts):
            self._bos = None  # said
            log.warning(
                "prompt begins with BOS twice: its text spells it and the tokenizer adds it; "
                "send add_special_tokens=false, or the text without it"
            )

    def _refuse_long(self, text: str, most_tokens: int) -> None:
        count = 0
        for start in range(0, len(text), _PIECE_LETTERS):
            piece = text[start : start + _PIECE_LETTERS]
            tokens = len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
            count += max(tokens - _PIECE_SLACK, 0)
            if count > most_tokens:
                raise LongTextError(count)

    def without(self, controls: Collection[str]) -> "PlainEncoder":
        """Return an encoder that does not recognise these tokens."""
        return PlainEncoder(self._json, frozenset(controls))

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens that are decoded at once."""
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_name(self, token: int) -> str | None:
        """Return the tokenizer's spelling of a token; None outside its vocabulary."""
        return self._tokenizer.id_to_token(token)

    def token_id(self, name: str) -> int | None:
        """Return the id of a token by the tokenizer's spelling; None if it has no such token."""
        return self._tokenizer.token_to_id(name)


class PlainEncoder:
    """A copy of a tokenizer that does not recognise some of its added tokens. It is made when it is first used."""

    def __init__(self, tokenizer_json: str, controls: frozenset[str]) -> None:
        self._json = tokenizer_json
        self._controls = controls
        self._made: tuple[Tokenizer, dict[int, int]] | None = None
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        A vocabulary with a control token among its ordinary pieces may still yield it: the caller must check.
        """
        plain, moved = self._tokenizer()
        tokens = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [moved.get(token, token) for token in tokens] if moved else tokens

    def _tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return the tokenizer, and the original ids of added tokens that changed theirs."""
        with self._lock:
            if self._made is None:
                spec = json.loads(self._json)
                added = [entry for entry in spec["added_tokens"] if entry["content"] not in self._controls]
                plain = _parse(json.dumps({**spec, "added_tokens": added, "post_processor": None}))
                places = {entry["id"]: plain.token_to_id(entry["content"]) for entry in added}
                self._made = plain, {new: old for old, new in places.items() if new not in (None, old)}
            return self._made


def load_text_codec(folder: Path, chat_template: str | None = None) -> TextCodec:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a folder.

    `chat_template` is a file or a template that replaces the folder's. Errors: ConfigError naming the file.
    """
    path = folder / "tokenizer.json"
    if not is_there(path):
        raise ConfigError("tokenizer.missing", f"{path} is missing: the model folder has no fast tokenizer")
    with _named_file(path):
        text = path.read_text(encoding="utf-8-sig")
        config = _read_object(folder / "tokenizer_config.json")
        templates = _read_templates(folder, config, chat_template)
        default = templates.pop("default", None) or templates.pop("tool_use", None)  # the only one renders everything
        return TextCodec(text, config, default, templates.get("tool_use"))


@contextlib.contextmanager
def _named_file(path: Path) -> Generator[None]:
    try:
        yield
    except ConfigError:
        raise
    except OSError as exc:
        raise ConfigError("tokenizer.unreadable", f"cannot read {exc.filename or path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ConfigError("tokenizer.unreadable", f"cannot read {path}: {exc}") from exc


def _frame_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and behind a text."""
    framed = tokenizer.encode("a", add_special_tokens=True)
    places = [place for place, is_added in enumerate(framed.special_tokens_mask) if not is_added]
    if not places:
        return framed.ids, []
    return framed.ids[: places[0]], framed.ids[places[-1] + 1 :]


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
    return read_json_object(path) if is_there(path) else {}


def _read_templates(folder: Path, config: dict[str, object], override: str | None) -> dict[str, str]:
    """Return the chat templates by name, from where transformers keeps them. `default` is the usual one.

    A file is preferred to tokenizer_config.json. An override stands for all templates. Errors: ConfigError; OSError.
    """
    if override is not None:
        if "{" in override or "\n" in override:
            return {"default": override}
        try:
            return {"default": Path(override).read_text(encoding="utf-8-sig")}
        except OSError as exc:
            reason = f"cannot read the chat template {override}: {exc.strerror or exc}"
            raise ConfigError("chat_template.unreadable", reason) from exc
    additional = folder / "additional_chat_templates"
    paths = {path.stem: path for path in (list_folder(additional, "*.jinja") if is_there(additional) else ())}
    paths |= {path.stem.removeprefix("chat_template_"): path for path in list_folder(folder, "chat_template_*.jinja")}
    if is_there(beside := folder / "chat_template.jinja"):
        paths["default"] = beside
    named = _templates_of(config.get("chat_template"))
    return named | {name: path.read_text(encoding="utf-8-sig") for name, path in paths.items() if name in _TEMPLATES}


def _templates_of(value: object) -> dict[str, str]:
    """Return the templates of a field that is a template, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    found: dict[str, str] = {}
    for entry in cast(list[object], value) if isinstance(value, list) else ():
        if isinstance(entry, dict):
            named = cast(dict[str, object], entry)
            name, template = named.get("name"), named.get("template")
            if isinstance(name, str) and name in _TEMPLATES and isinstance(template, str):
                found[name] = template
    return found


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
