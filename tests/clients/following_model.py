"""A model for tests that does what it is told: it calls the functions that it is offered and fills in schemas.

The embedded model is too small to decide when to call a function. This one reads the text of the prompt, as the chat
template of the embedded model rendered it, and answers by rules. It obeys the grammar of the request as a sampler does:
a wanted answer that the grammar excludes is replaced by a short output that the grammar allows.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tiercel.embedded import MODEL_DIR
from tiercel.values.request import Request, unpack_tokens

Tree = dict[str, Any]  # Any: a JSON document
END = 2  # <|im_end|>
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)</tools>", re.DOTALL)
_MOST_WALKED = 500  # tokens
_CLOSERS = '}],":{[-t'


class FollowingModel:
    """Answers requests with token ids of the embedded model's tokenizer."""

    def __init__(self, folder: Path = Path(MODEL_DIR)) -> None:
        path = str(folder / "tokenizer.json")
        self._tokenizer = Tokenizer.from_file(path)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self._grammar_tokenizer = LLTokenizer(path, eos_token=[END])
        self._texts = [self._tokenizer.decode([token], skip_special_tokens=False) for token in range(self.vocab_size)]

    def answer(self, request: Request) -> Sequence[int]:
        """Return the output for a request, with the end token."""
        prompt = self._tokenizer.decode(list(unpack_tokens(request.prompt)), skip_special_tokens=False)
        grammar = request.params.grammar
        for wanted in wanted_answers(prompt):
            tokens = [*self._tokenizer.encode(wanted, add_special_tokens=False).ids, END]
            if not grammar or self._matcher(grammar).validate_tokens(tokens) == len(tokens):
                return tokens
        return self._walk(self._matcher(grammar))

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._grammar_tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _walk(self, matcher: LLMatcher) -> list[int]:
        """Return a short output that a grammar allows: strings of one token, no white space, closed early."""
        tokens: list[int] = []
        text = ""
        while not matcher.is_accepting() and len(tokens) < _MOST_WALKED:
            allowed = _allowed(matcher, self.vocab_size)
            token = min(allowed, key=lambda one: _walk_order(text, self._texts[one]))
            matcher.consume_token(token)
            tokens.append(token)
            text += self._texts[token]
        return [*tokens, END]


def wanted_answers(prompt: str) -> Iterator[str]:
    """Yield the answers that the end of a rendered conversation asks for, the most wanted first."""
    messages = [(found[1], found[2]) for found in _MESSAGE.finditer(prompt)]
    said = next((text for role, text in reversed(messages) if role == "user" and "<tool_response>" not in text), "")
    last = next((text for role, text in reversed(messages) if role == "user"), "")
    result = re.search(r"<tool_response>\n(.*?)\n</tool_response>", last, re.DOTALL)
    offered = [json.loads(line) for block in _TOOLS.findall(prompt) for line in block.splitlines() if line.strip()]
    functions = [tool.get("function", tool) for tool in offered]
    called = {name for role, text in messages if role == "assistant" for name in re.findall(r'"name": "([^"]+)"', text)}
    new = [one for one in functions if one["name"] not in called]
    named = [one for one in new if one["name"] in said]
    calls = [_call(one, said) for one in (*named, *new, *functions)]
    if result is None or (new and called):
        yield from calls
    if result is None:
        yield from _documents(prompt, said)
    yield f"The answer is: {result[1]}" if result else "Two and two is four. I have nothing to add."
    yield from calls


def _call(function: Tree, said: str) -> str:
    call = {"name": function["name"], "arguments": _filled(function.get("parameters") or {}, said)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _documents(prompt: str, said: str) -> Iterator[str]:
    """Yield a document for each JSON schema in the prompt, and one with the keys that are named in quotes."""
    for found in re.finditer(r"\{", prompt):
        try:
            schema, _ = json.JSONDecoder().raw_decode(prompt, found.start())
        except ValueError:
            continue
        if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
            yield json.dumps(_filled(schema, said))
            break
    keys = re.findall(r"[`'](\w+)[`']", said)
    if keys and "JSON" in said:
        yield json.dumps(dict.fromkeys(keys, "a text"))


def _filled(schema: Tree, said: str, root: Tree | None = None) -> Any:
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return _filled(target, said, root)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return _filled(schema[name][0], said, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return next((one for one in schema["enum"] if str(one) in said), schema["enum"][0])
    kinds = schema.get("type", "object")
    number = re.search(r"\d+", said)
    quoted = re.search(r"'([^']+)'", said)
    words = re.findall(r"[A-Z]\w+", said)
    fillers: dict[str, Callable[[], Any]] = {
        "object": lambda: {
            name: _filled(entry, said, root)
            for name, entry in schema.get("properties", {}).items()
            if name in schema.get("required", ())
        },
        "array": lambda: [_filled(schema.get("items", {"type": "string"}), said, root)],
        "string": lambda: quoted[1] if quoted else words[-1] if words else "Paris",
        "integer": lambda: int(number[0]) if number else 3,
        "number": lambda: float(number[0]) if number else 3.5,
        "boolean": lambda: True,
        "null": lambda: None,
    }
    return fillers[kinds if isinstance(kinds, str) else kinds[0]]()


def _allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits[:vocab_size]).tolist()
    assert allowed, "the grammar allows no token"
    return allowed


def _walk_order(text: str, token: str) -> tuple[int, int]:
    """Return how unwelcome a token is after a text."""
    in_string = len(re.findall(r'(?<!\\)"', text)) % 2 == 1
    if in_string:
        is_word = token.isascii() and token.isalnum()
        return (0 if text.endswith('"') == is_word and (is_word or token == '"') else 1 if is_word else 2), -len(token)
    if token == "3" and not text[-1:].isdigit():
        return 0, 0
    return (1, _CLOSERS.index(token)) if len(token) == 1 and token in _CLOSERS else (2 + token.isspace(), len(token))
