"""/tokenize and /detokenize."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.body import read_object
from server.params import ModelLimits
from server.prompt import chat_work, encode_texts
from server.schemas import (
    DetokenizeFields,
    TokenizeChatFields,
    TokenizeTextFields,
    read_fields,
    refuse_unsupported,
    refuse_unsupported_in_messages,
)
from server.service import Service
from tiercel.errors import AdmissionError


class TextRoutes:
    """Text to tokens and back, exactly as the generation routes do it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        """The routes, without their guard."""
        router = APIRouter(tags=["text"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=None)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=None)
        return router

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt or of a conversation."""
        body = await read_object(request)
        refuse_unsupported(body)
        with self._service.admission.reserve(1):
            limits = await self._service.limits()
            if "messages" in body:
                tokens, with_names = await self._chat_tokens(body, limits)
            else:
                tokens, with_names = await self._text_tokens(body, limits)
        names = [self._service.codec.token_name(token) for token in tokens] if with_names else None
        return JSONResponse(
            {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens, "token_strs": names}
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        fields = read_fields(DetokenizeFields, await read_object(request))
        self._service.model_name(fields.model)
        with self._service.admission.reserve(1):
            return JSONResponse({"prompt": await self._text(fields)})

    async def _text(self, fields: DetokenizeFields) -> str:
        limits = await self._service.limits()
        if any(not 0 <= token < limits.vocab_size for token in fields.tokens):
            raise AdmissionError(400, "tokens: a token id is out of vocabulary", param="tokens")
        return await self._service.in_worker(lambda: self._service.codec.decode(fields.tokens))

    async def _text_tokens(self, body: dict[str, object], limits: ModelLimits) -> tuple[list[int], bool]:
        fields = read_fields(TokenizeTextFields, body)
        self._service.model_name(fields.model)
        codec, add = self._service.codec, fields.add_special_tokens
        if not fields.prompt:
            return [], bool(fields.return_token_strs)
        prompts = await self._service.in_worker(
            lambda: encode_texts(codec, [fields.prompt], limits, add_special_tokens=add)
        )
        return prompts[0], bool(fields.return_token_strs)

    async def _chat_tokens(self, body: dict[str, object], limits: ModelLimits) -> tuple[list[int], bool]:
        refuse_unsupported_in_messages(body)
        fields = read_fields(TokenizeChatFields, body)
        self._service.model_name(fields.model)
        if fields.add_special_tokens:
            raise AdmissionError(
                400, "add_special_tokens is not supported for messages: the chat template has them",
                param="add_special_tokens",
            )  # fmt: skip
        work = chat_work(fields, self._service.chat_template(), self._service.codec, limits)
        return (await self._service.in_worker(work)).tokens, bool(fields.return_token_strs)
