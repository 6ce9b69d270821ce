"""/v1/responses: create, retrieve, delete, list the input, and count its tokens."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.begun import BegunAnswer
from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, KEY_REFUSALS, ApiRoute, Contract, QueryField
from tiercel.server.api.hold import Hold
from tiercel.server.api.middleware import record_of
from tiercel.server.api.paging import page_of, page_query
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.prompt import least_tokens
from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.response_events import ResponseEvent
from tiercel.server.api.replies.response_shape import ResponseShape
from tiercel.server.api.replies.responses import (
    ConversationRef,
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    Json,
    ReasoningBody,
    ResponseBody,
)
from tiercel.server.api.response_call import RESPONSE_PATHS, ResponseCall, as_responses_say, in_our_words
from tiercel.server.api.response_input import ResponseInput
from tiercel.server.api.response_items import new_id, read_items
from tiercel.server.api.response_replay import ReplayAnswer
from tiercel.server.api.response_session import KeptAnswer, ResponseKeeper
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.responses import (
    ResponseFields,
    ResponseInputFields,
    chat_body,
    ignored_by,
    prompt_fields,
    refuse_foreign,
)
from tiercel.server.api.schemas.unsupported import refuse_unsupported
from tiercel.server.api.stored_conversation import find_conversation
from tiercel.server.api.stored_items import Item, StoredItem, StoredPart, listed
from tiercel.server.api.stored_response import StoredResponse, StoredTurn
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.pieces import PieceAnswer
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_NUMBER = re.compile(r"-1|[0-9]{1,9}")
_MAX_PAGE = 100
_PAGE = 20  # items of a list, if the client names no number
_REPLAY = (
    QueryField("stream", {"type": "boolean", "default": False}, "The response as the events of its stream."),
    QueryField(
        "starting_after",
        {"type": "integer", "minimum": -1, "maximum": 999_999_999, "default": -1},
        "With `stream`: the number of the event behind which the events begin.",
    ),
)


class ResponseRoutes:
    """The handlers of the responses API."""

    def __init__(self, context: ServerContext, pipeline: GenerationPipeline) -> None:
        self._context = context
        self._pipeline = pipeline
        self._store = context.store
        self._runs = context.background

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        create = Contract(
            bodies=(ResponseFields,), answers={200: ResponseBody}, events=ResponseEvent, refusals=GENERATION_REFUSALS
        )
        count = Contract(bodies=(ResponseInputFields,), answers={200: InputTokenCount}, refusals=GENERATION_REFUSALS)
        items = _contract(InputItemList, 400, query=page_query(default=_PAGE, most=_MAX_PAGE))
        one = "/v1/responses/{id}"
        return [
            ApiRoute("POST", "/v1/responses", self.create, create),
            ApiRoute("POST", "/v1/responses/input_tokens", self.count, count),
            ApiRoute("POST", "/v1/responses/compact", self.compact, Contract(refusals=(*KEY_REFUSALS, 404))),
            ApiRoute("GET", one, self.retrieve, _contract(ResponseBody, 400, 503, events=ResponseEvent, query=_REPLAY)),
            ApiRoute("DELETE", one, self.delete, _contract(DeletedResponse)),
            ApiRoute("POST", f"{one}/cancel", self.cancel, _contract(ResponseBody, 400)),
            ApiRoute("GET", f"{one}/input_items", self.input_items, items),
        ]

    async def create(self, request: Request) -> Response:
        """Answer the next turn of a conversation."""
        tenant = tenant_of(request.scope).name
        made: list[_Made] = []
        with contextlib.ExitStack() as until_stored:

            def read(body: dict[str, object]) -> ReadCall:
                made.append(one := self._read(body, tenant))
                until_stored.callback(one.keeper.release)
                return one.call, one.shape, one.shape.body.model

            try:
                begun = await self._pipeline.begin(request, read)
            except AdmissionError as exc:
                raise (as_responses_say(exc) if made else exc) from exc  # what `read` refuses has our names already
            (one,) = made
            if one.shape.body.background:
                return self._answer_later(begun, one, request)
            answer = self._pipeline.answer_of(begun)
            if not one.is_kept:
                return answer
            until_stored.pop_all()
            return KeptAnswer(answer, one.shape, one.keeper, one.call.input)

    async def cancel(self, request: Request, id: str) -> Response:
        """End a response that is generated in the background."""
        entry = self._stored(request, id)
        if not entry.is_in_background:
            raise AdmissionError(
                400, "Only a response with background can be cancelled. A stream ends with its connection.", param="id"
            )
        await self._runs.cancel(tenant_of(request.scope).name, id)
        return self._shown(request, self._stored(request, id))

    async def count(self, request: Request) -> Response:
        """Return the number of tokens that the model would read."""
        tenant = tenant_of(request.scope)
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            record_of(request.scope).rate_headers = lambda: self._context.admission.rate_headers(tenant)
            with self._context.admission.enter(tenant):
                return await run_watched(self._counted(body, tenant.name, holding), request.receive)

    async def compact(self, _: Request) -> Response:
        """Refuse to compact a conversation, which OpenAI's API does."""
        raise AdmissionError(
            404,
            "This server does not compact conversations: only the model that wrote a conversation could sum it up. Set"
            " truncation to auto, which leaves out the oldest turns, or send the part of the conversation that counts.",
            code="compaction_not_supported",
        )

    async def retrieve(self, request: Request, id: str) -> Response:
        """Return a stored response; with `stream=true` as events, which are made anew."""
        entry, query = self._stored(request, id), request.query_params
        if query.get("stream", "false").lower() in ("true", "1"):
            if not entry.is_over:
                raise AdmissionError(
                    400,
                    "A response in progress cannot be streamed here; retrieve it until it has ended.",
                    param="stream",
                )
            after = query.get("starting_after", "-1")
            if not _NUMBER.fullmatch(after):
                raise AdmissionError(400, "starting_after must be the number of an event", param="starting_after")
            return ReplayAnswer(self._context, request, entry, int(after))
        return self._shown(request, entry)

    async def delete(self, request: Request, id: str) -> Response:
        """Forget a stored response. Later turns of its conversation keep their context."""
        self._stored(request, id)
        tenant = tenant_of(request.scope).name
        await self._runs.cancel(tenant, id)
        self._store.remove(tenant, StoredResponse, id)
        return json_answer(DeletedResponse(id))

    async def input_items(self, request: Request, id: str) -> Response:
        """List the items that the client sent with a stored response, the latest first, page by page."""
        items = self._stored(request, id).turn.input
        page, has_more = page_of(request, items, lambda item: item.id, default=_PAGE, most=_MAX_PAGE)
        first, last = (page[0].id, page[-1].id) if page else ("", "")
        before, after = msgspec.json.encode(InputItemList(hole(list[Json]), first, last, has_more)).split(HOLE)
        return PieceAnswer([before, *listed(page), after], self._reading(request, page))

    def _shown(self, request: Request, entry: StoredResponse) -> Response:
        return PieceAnswer(list(entry.body()), self._reading(request, entry.read_parts))

    def _reading(self, request: Request, parts: Sequence[StoredPart]) -> Callable[[], Hold]:
        tenant = tenant_of(request.scope).name
        return lambda: self._store.read(tenant, parts)

    def _stored(self, request: Request, id: str) -> StoredResponse:
        entry = self._store.get(tenant_of(request.scope).name, StoredResponse, id)
        if entry is None:
            raise AdmissionError(
                404, f"Response with id '{id[:128]}' not found.", code="response_not_found", param="id"
            )
        return entry

    def _read(self, body: dict[str, object], tenant: str) -> "_Made":
        refuse_foreign(body)
        fields = read_fields(ResponseFields, body)
        self._check_background(fields)
        model = self._context.model_name(fields.model)
        before, items = self._conversation(fields, tenant)
        chat = self._chat(chat_body(fields, body))
        chat.note_ignored(ignored_by(body))
        tier = self._pipeline.head(chat, "resp_", with_logprobs=False).service_tier
        head = self._body(fields, chat, model, tier or "default")
        input = self._input(fields, before, items)
        is_kept = head.store or before.conversation is not None
        call = ResponseCall(self._call(chat), input, fields.truncation == "auto", is_kept)
        # last, because it holds parts of the store
        keeper = ResponseKeeper(self._store, tenant, before.turn, items, before.conversation)
        shape = ResponseShape(
            head,
            keeper.change if is_kept else _ignored,
            new_id,
            self._context.wall_s,
            reader=call.chat.reader,
            with_logprobs=fields.wants_logprobs,
        )
        return _Made(call, shape, keeper, is_kept)

    def _check_background(self, fields: ResponseFields) -> None:
        if not fields.background:
            return
        if fields.stream:
            raise AdmissionError(
                400,
                "background with stream is not supported: retrieve the response until it has ended.",
                code="unsupported_parameter",
                param="background",
            )
        if fields.store is False or not self._store.keeps_any:
            raise AdmissionError(
                400, "background needs store: the response is retrieved from there.", param="background"
            )

    def _answer_later(self, begun: BegunAnswer, one: "_Made", request: Request) -> Response:
        """Go on with a response in the background, and return it as it is now."""
        one.keeper.begin(one.shape.body, one.call.input)
        tenant = tenant_of(request.scope).name
        record_of(request.scope).background = self._runs.start(tenant, begun, one.shape)
        return json_answer(one.shape.body)

    def _conversation(self, fields: ResponseInputFields, tenant: str) -> tuple["_Before", list[Item | StoredItem]]:
        """Return what is before this turn, and the items of this one. Errors: AdmissionError (400, 404 or 413)."""
        if fields.conversation_id is not None and fields.previous_response_id is not None:
            raise AdmissionError(
                400,
                "Only one of conversation and previous_response_id can be given.",
                code="mutually_exclusive_parameters",
                param="conversation",
            )
        parent, conversation = None, None
        if fields.previous_response_id is not None:
            entry = self._store.get(tenant, StoredResponse, fields.previous_response_id)
            if entry is None:
                raise AdmissionError(
                    404,
                    f"Previous response with id '{fields.previous_response_id}' not found. Responses are kept in"
                    " memory, for a limited time and number; send the whole conversation as input.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            if not entry.is_over:
                raise AdmissionError(400, "The previous response is still in progress.", param="previous_response_id")
            parent = entry.turn
        if fields.conversation_id is not None:
            conversation = find_conversation(self._store, tenant, fields.conversation_id, "conversation")
            parent = conversation.turn
        items = read_items(fields.input, lambda id: self._store.item(tenant, id))
        if parent is None and not items and fields.input is not None:
            raise AdmissionError(400, "input: expected a text or at least one item.", param="input")
        if conversation is not None:
            conversation.check(self._store, "conversation", more_items=1 + len(items))
        return _Before(parent, None if conversation is None else conversation.id), items

    def _input(self, fields: ResponseInputFields, before: "_Before", items: list[Item | StoredItem]) -> ResponseInput:
        """Return what the model reads, counted and not decoded. Errors: AdmissionError (400 or 413)."""
        return ResponseInput(
            before.turn,
            items,
            fields.instructions,
            truncates=fields.truncation == "auto",
            limit_bytes=self._context.settings.max_body_bytes,
            may_fit=self._may_fit,
            earlier_field="previous_response_id" if before.conversation is None else "conversation",
        )

    def _may_fit(self, letters: int) -> bool:
        """Return whether so many characters may fit into the context; True while it is not known."""
        ready = self._context.client.status.ready
        return ready is None or least_tokens(letters, self._context.codec) < ready.max_model_len

    def _chat(self, chat: Mapping[str, object]) -> ChatFields:
        """Return the request as a chat request whose messages are known later. Errors: AdmissionError (400)."""
        body: dict[str, object] = {**chat, "messages": [{"role": "user", "content": ""}]}
        with in_our_words():
            refuse_unsupported(body)
            read = read_fields(ChatFields, body)
        read.name_schemas(RESPONSE_PATHS)
        return read

    def _call(self, chat: ChatFields) -> ChatCall:
        with in_our_words():
            return ChatCall.of(chat, self._context)

    def _body(self, fields: ResponseFields, chat: ChatFields, model: str, service_tier: str) -> ResponseBody:
        defaults, reasoning = self._context.defaults, fields.reasoning
        return ResponseBody(
            id=new_id("resp_"),
            created_at=int(self._context.wall_s()),
            status="queued" if fields.background else "in_progress",
            background=bool(fields.background),
            conversation=UNSET if fields.conversation_id is None else ConversationRef(fields.conversation_id),
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            metadata=fields.metadata or {},
            model=model,
            output=[],
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=fields.prompt_cache_key,
            reasoning=ReasoningBody(reasoning.effort, reasoning.summary) if reasoning is not None else ReasoningBody(),
            safety_identifier=fields.safety_identifier,
            service_tier=service_tier,
            store=fields.store is not False and self._store.keeps_any,
            temperature=defaults.temperature if chat.temperature is None else chat.temperature,
            text=_text_body(fields),
            tool_choice=fields.tool_choice or "auto",
            tools=[{"parameters": None, "strict": None, **_given(tool)} for tool in fields.tools or []],
            top_logprobs=fields.top_logprobs or 0,
            top_p=defaults.top_p if chat.top_p is None else chat.top_p,
            truncation=fields.truncation or "disabled",
            user=UNSET if fields.user is None else fields.user,
        )

    async def _counted(self, body: dict[str, object], tenant: str, holding: BodyHolding) -> Response:
        with holding.displaceable():
            limits = await self._context.limits()
        refuse_foreign(body)
        fields = read_fields(ResponseInputFields, body)
        self._context.model_name(fields.model)
        before, items = self._conversation(fields, tenant)
        chat = self._call(self._chat(prompt_fields(fields)))
        call = ResponseCall(chat, self._input(fields, before, items), fields.truncation == "auto", is_stored=False)
        holding.grow(call.expanded_bytes)
        keeper = ResponseKeeper(self._store, tenant, before.turn, items)
        try:
            (tokens,) = await call.tokenize(limits)
        finally:
            keeper.release()
        return json_answer(InputTokenCount(len(tokens)))


@dataclass(frozen=True, slots=True)
class _Before:
    """The turns before a response, and the id of the conversation that they are taken from."""

    turn: StoredTurn | None
    conversation: str | None


@dataclass(frozen=True, slots=True)
class _Made:
    """A response that is about to be generated."""

    call: ResponseCall
    shape: ResponseShape
    keeper: ResponseKeeper
    is_kept: bool  # the response is stored, or its turn is added to a conversation


def _text_body(fields: ResponseFields) -> dict[str, object]:
    text = fields.text
    form = None if text is None else text.format
    verbosity = None if text is None else text.verbosity
    return {"format": _given(form or {"type": "text"}), **({} if verbosity is None else {"verbosity": verbosity})}


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not null, which is what most of them cannot be in an answer."""
    return {name: value for name, value in fields.items() if value is not None}


def _ignored(_body: ResponseBody) -> None:
    """Forget a response that is not stored."""


def _contract(
    answer: object, *refusals: int, events: object | None = None, query: tuple[QueryField, ...] = ()
) -> Contract:
    return Contract(query=query, answers={200: answer}, events=events, refusals=(*refusals, *KEY_REFUSALS, 404))
