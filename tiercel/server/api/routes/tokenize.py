"""/tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.middleware import record_of
from tiercel.server.api.params import ModelLimits
from tiercel.server.api.prompt import are_tokens, chat_work, check_tokens, encode_texts
from tiercel.server.api.replies.tokenize import DetokenizeReply, TokenizeReply
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.tokenize import DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from tiercel.server.api.schemas.unsupported import refuse_unsupported, refuse_unsupported_in_messages
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.pieces import PieceAnswer
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.admission import Entry
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_OF_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")

TokenWork = Callable[[], list[int]]
"""Tokenising, to be run by a worker. Errors: AdmissionError (400)."""


class TokenizeRoutes:
    """Text to tokens and back, exactly as the generation routes do it."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        bodies = (TokenizeTextFields, TokenizeChatFields)
        return [
            ApiRoute("POST", "/tokenize", self.tokenize, _contract(bodies, TokenizeReply)),
            ApiRoute("POST", "/detokenize", self.detokenize, _contract((DetokenizeFields,), DetokenizeReply)),
            *self._info_routes(),
        ]

    def _info_routes(self) -> list[ApiRoute]:
        if not self._context.settings.tokenizer_info_endpoint:
            return []
        contract = Contract(answers={200: dict[str, object]}, refusals=KEY_REFUSALS)
        return [ApiRoute("GET", "/tokenizer_info", self.tokenizer_info, contract)]

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or of a conversation."""
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            refuse_unsupported(body)
            with self._enter(request):
                return await run_watched(self._tokenized(body, holding), request.receive)

    async def tokenizer_info(self, _: Request) -> Response:
        """Return tokenizer_config.json, with the chat template in use and without names of files."""
        codec = self._context.codec
        config = {name: value for name, value in codec.config.items() if name not in _OF_FILES}
        template = {} if codec.chat_template is None else {"chat_template": codec.chat_template}
        kind = {"tokenizer_class": config.get("tokenizer_class") or "PreTrainedTokenizerFast"}
        return json_answer(config | codec.named_specials | kind | template)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, special ones included."""
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            with self._enter(request):
                return await run_watched(self._detokenized(body, holding), request.receive)

    def _enter(self, request: Request) -> AbstractContextManager[Entry]:
        tenant = tenant_of(request.scope)
        record_of(request.scope).rate_headers = lambda: self._context.admission.rate_headers(tenant)
        return self._context.admission.enter(tenant)

    async def _tokenized(self, body: dict[str, object], holding: BodyHolding) -> Response:
        with holding.displaceable():
            limits = await self._context.limits()
        is_chat = body.get("messages") is not None
        work, with_names = self._chat_work(body, limits) if is_chat else self._text_work(body, limits)
        codec = self._context.codec

        def reply() -> bytes:
            tokens = work()
            names = [codec.token_name(token) for token in tokens] if with_names else None
            return msgspec.json.encode(TokenizeReply(len(tokens), limits.max_model_len, tokens, names))

        return await self._answer(reply)

    async def _detokenized(self, body: dict[str, object], holding: BodyHolding) -> Response:
        with holding.displaceable():
            limits = await self._context.limits()
        fields = read_fields(DetokenizeFields, body)
        self._context.model_name(fields.model)
        tokens = _read_tokens(fields.tokens)

        def reply() -> bytes:
            check_tokens([tokens], limits, "tokens")
            self._check_text(tokens)
            return msgspec.json.encode(DetokenizeReply(self._context.codec.decode(tokens)))

        return await self._answer(reply)

    def _check_text(self, tokens: list[int]) -> None:
        """Refuse tokens of a text that is too large for an answer. Errors: AdmissionError (400)."""
        codec, limit_bytes = self._context.codec, self._context.settings.max_answer_bytes
        if len(tokens) * codec.vocabulary.longest_bytes <= limit_bytes:
            return
        size = sum(len((codec.token_name(token) or "").encode()) for token in tokens)
        if size > limit_bytes:
            raise AdmissionError(
                400,
                f"tokens: their text takes up to {size} bytes; at most {limit_bytes} are allowed (--max-answer-bytes).",
                code="answer_too_large",
                param="tokens",
            )

    async def _answer(self, reply: Callable[[], bytes]) -> Response:
        """Return an answer that a worker makes; its memory counts until it is sent."""
        body = await self._context.in_worker(reply)
        return PieceAnswer([body], lambda: self._context.answers.reserve_bytes(len(body)))

    def _text_work(self, body: dict[str, object], limits: ModelLimits) -> tuple[TokenWork, bool]:
        fields = read_fields(TokenizeTextFields, body)
        self._context.model_name(fields.model)
        codec, most = self._context.codec, self._context.max_values

        def work() -> list[int]:
            add = fields.add_special_tokens
            if not fields.prompt:
                return codec.framed([], add_special_tokens=add)
            return encode_texts(codec, [fields.prompt], limits, add_special_tokens=add, most_tokens=most)[0]

        return work, bool(fields.return_token_strs)

    def _chat_work(self, body: dict[str, object], limits: ModelLimits) -> tuple[TokenWork, bool]:
        refuse_unsupported_in_messages(body)
        fields = read_fields(TokenizeChatFields, body)
        self._context.model_name(fields.model)
        context = self._context
        work = chat_work(fields, context.chat_template(), context.codec, limits, most_tokens=context.max_values)
        return lambda: work().tokens, bool(fields.return_token_strs)


def _read_tokens(value: object) -> list[int]:
    entries = cast(list[object], value) if isinstance(value, list) else None
    if entries is None or not (are_tokens(entries) or not entries):
        raise AdmissionError(400, "tokens must be a list of token ids", param="tokens")
    return cast(list[int], entries)  # as many as a body may have values


def _contract(bodies: tuple[object, ...], answer: object) -> Contract:
    return Contract(bodies=bodies, answers={200: answer}, refusals=GENERATION_REFUSALS)
