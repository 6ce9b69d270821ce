"""Which fields of answers may be null, and which may be left out, by the types of the official SDKs.

    name      always there, never null          name|     always there, may be null
    name?     may be left out, never null       name?|    both

Transcribed from the declarations of openai 6.49 and @anthropic-ai/sdk 1.14 for TypeScript, which, unlike those for
Python, tell the two apart. `OWN` has the fields that no SDK knows, most of them vLLM's. A client that checks answers,
such as Vercel's AI SDK, refuses the whole answer for one null in a field that may only be left out, and the other way
round.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, UnsetType

from tiercel.server.api.replies import (
    batches,
    chat,
    completion,
    conversations,
    embeddings,
    message_batches,
    messages,
    models,
    responses,
    stored_chats,
    tool_calls,
    usage,
)
from tiercel.server.api.replies import message_blocks as _message_blocks  # noqa: F401 - part of the messages
from tiercel.server.api.replies import response_events as events
from tiercel.server.http import failure, message_failure

_EVENT = "type sequence_number"
_ITEM = f"{_EVENT} output_index"
_PART = f"{_ITEM} item_id content_index"

SHAPES: dict[type[Struct], str] = {
    # chat completions
    chat.ChatReply: "id choices created model object service_tier?| system_fingerprint? usage?",
    chat.ChatReplyChoice: "finish_reason index logprobs| message",
    chat.ChatReplyMessage: "content| refusal| role tool_calls?",
    chat.ChatLogprobs: "content| refusal|",
    chat.ChatToken: "token bytes| logprob top_logprobs",
    chat.ChatTokenChoice: "token bytes| logprob",
    chat.ChatChunk: "id choices created model object service_tier?| system_fingerprint? usage?|",
    chat.ChatChunkChoice: "delta finish_reason| index logprobs?|",
    chat.Delta: "content?| refusal?| role? tool_calls?",
    tool_calls.ToolCall: "id function type",
    tool_calls.ToolCallFunction: "arguments name",
    tool_calls.ToolCallDelta: "index id? function type?",  # Vercel's SDK needs `function`
    tool_calls.ToolCallFunctionDelta: "arguments? name?",
    usage.UsageBody: "completion_tokens prompt_tokens total_tokens prompt_tokens_details?",
    usage.PromptTokensDetails: "cached_tokens?",
    stored_chats.StoredChatBody: "id choices created model object service_tier?| system_fingerprint? usage?",
    stored_chats.StoredChatList: "data first_id?| has_more last_id?| object",
    stored_chats.StoredMessage: "id content_parts?| content| refusal| role function_call?| tool_calls?",
    stored_chats.StoredMessageList: "data first_id?| has_more last_id?| object",
    stored_chats.DeletedChat: "id deleted object",
    # completions; OpenAI streams them in the same type, with null for the reason and, by `stream_options`, for usage
    completion.TextReply: "id choices created model object system_fingerprint? usage?",
    completion.TextReplyChoice: "finish_reason index logprobs| text",
    completion.TextLogprobs: "text_offset? token_logprobs tokens top_logprobs?|",
    completion.TextChunk: "id choices created model object system_fingerprint? usage?|",
    completion.TextChunkChoice: "finish_reason| index logprobs| text",
    # embeddings
    embeddings.EmbeddingReply: "data model object usage",
    embeddings.Embedding: "embedding index object",
    embeddings.EmbeddingUsage: "prompt_tokens total_tokens",
    # responses
    responses.ResponseBody: "id created_at error| incomplete_details| instructions| metadata| model object output"
    " parallel_tool_calls temperature| tool_choice tools top_p| background?| completed_at?| max_output_tokens?|"
    " conversation?| previous_response_id?| prompt_cache_key?| reasoning?| safety_identifier?| service_tier?| status?"
    " text? top_logprobs?| truncation?| usage? user?",
    responses.ConversationRef: "id",
    responses.ResponseUsage: "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens",
    responses.InputTokensDetails: "cache_write_tokens cached_tokens",
    responses.OutputTokensDetails: "reasoning_tokens",
    responses.ResponseFault: "code message",
    responses.IncompleteDetails: "reason",
    responses.ReasoningBody: "effort?| summary?|",
    responses.OutputMessage: "id content role status type phase?|",
    responses.OutputText: "annotations text type logprobs?",
    responses.OutputRefusal: "refusal type",
    responses.ReasoningItem: "id summary type content? encrypted_content?| status?",
    responses.ReasoningText: "text type",
    responses.FunctionCall: "arguments call_id name type id status?",  # Vercel's SDK needs `id`
    responses.InputTokenCount: "input_tokens object",
    responses.InputItemList: "data first_id has_more last_id object",
    responses.DeletedResponse: "id object deleted",
    conversations.ConversationBody: "id created_at metadata| object",
    conversations.DeletedConversation: "id deleted object",
    conversations.ConversationItemList: "data first_id has_more last_id object",
    events.ResponseCreated: f"{_EVENT} response",
    events.ResponseQueued: f"{_EVENT} response",
    events.ResponseInProgress: f"{_EVENT} response",
    events.ResponseCompleted: f"{_EVENT} response",
    events.ResponseIncomplete: f"{_EVENT} response",
    events.ResponseFailed: f"{_EVENT} response",
    events.ResponseErrorEvent: f"{_EVENT} code| message param|",
    events.OutputItemAdded: f"{_ITEM} item",
    events.OutputItemDone: f"{_ITEM} item",
    events.ContentPartAdded: f"{_PART} part",
    events.ContentPartDone: f"{_PART} part",
    events.OutputTextDelta: f"{_PART} delta logprobs",
    events.OutputTextDone: f"{_PART} text logprobs",
    events.ReasoningTextDelta: f"{_PART} delta",
    events.ReasoningTextDone: f"{_PART} text",
    events.ArgumentsDelta: f"{_ITEM} item_id delta",
    events.ArgumentsDone: f"{_ITEM} item_id arguments name",
    # messages; TypeScript's types for them demand fields that Anthropic sends with some answers only (`container`,
    # `citations`, `caller`, ...), which Vercel's SDK takes as fields that may be left out and some that cannot be null
    messages.MessageReply: "id content model role stop_reason| stop_sequence| type usage",
    messages.MessageUsage: "cache_creation_input_tokens| cache_read_input_tokens| input_tokens output_tokens"
    " service_tier|",
    messages.TextBlock: "text type citations?",
    messages.ThinkingBlock: "signature thinking type",
    messages.ToolUseBlock: "id input name type",
    messages.MessageStart: "message type",
    messages.BlockStart: "content_block index type",
    messages.BlockDelta: "delta index type",
    messages.BlockStop: "index type",
    messages.TextPiece: "text type",
    messages.ThinkingPiece: "thinking type",
    messages.SignaturePiece: "signature type",
    messages.InputPiece: "partial_json type",
    messages.MessageDelta: "delta type usage",
    messages.MessageEnd: "stop_reason| stop_sequence|",
    messages.MessageStop: "type",
    messages.TokenCount: "input_tokens",
    message_batches.MessageBatch: "id archived_at| cancel_initiated_at| created_at ended_at| expires_at"
    " processing_status request_counts results_url| type",
    message_batches.MessageBatchCounts: "canceled errored expired processing succeeded",
    message_batches.MessageBatchList: "data has_more first_id| last_id|",
    message_batches.DeletedMessageBatch: "id type",
    # models, files and batches; the service of OpenAI sends null for what a file or a batch has not
    models.ModelCard: "id created object owned_by",
    models.ModelList: "data object",
    models.MessageModel: "id created_at display_name lifecycle max_input_tokens| max_tokens| type",
    models.MessageModelList: "data has_more first_id| last_id|",
    batches.FileObject: "id bytes created_at filename object purpose status expires_at?| status_details?|",
    batches.FileList: "data has_more object first_id?| last_id?|",
    batches.DeletedFile: "id deleted object",
    batches.BatchObject: "id completion_window created_at endpoint input_file_id object status cancelled_at?|"
    " cancelling_at?| completed_at?| error_file_id?| errors?| expired_at?| expires_at?| failed_at?| finalizing_at?|"
    " in_progress_at?| metadata?| output_file_id?| request_counts?",
    batches.BatchList: "data has_more object first_id?| last_id?|",
    batches.BatchErrors: "data? object?",
    batches.RequestCounts: "completed failed total",
    # errors
    failure.FaultBody: "error",
    failure.Fault: "code| message param| type",
    message_failure.MessageFaultBody: "error request_id| type",
    message_failure.MessageFault: "message type",
}

OWN: dict[type[Struct], str] = {
    chat.ChatReply: "prompt_logprobs prompt_token_ids kv_transfer_params",
    chat.ChatReplyChoice: "stop_reason token_ids",
    chat.ChatReplyMessage: "reasoning_content",
    chat.ChatChunk: "prompt_token_ids",
    chat.ChatChunkChoice: "stop_reason token_ids",
    chat.Delta: "reasoning_content",
    stored_chats.StoredChatBody: "request_id metadata temperature top_p presence_penalty frequency_penalty seed tools"
    " tool_choice response_format input_user",
    stored_chats.StoredMessage: "name reasoning_content tool_call_id",
    completion.TextReply: "service_tier kv_transfer_params",
    completion.TextReplyChoice: "stop_reason token_ids prompt_logprobs prompt_token_ids",
    completion.TextChunk: "service_tier",
    completion.TextChunkChoice: "stop_reason token_ids prompt_token_ids",
    responses.ResponseBody: "max_tool_calls store",
    events.ResponseErrorEvent: "error",
    models.ModelCard: "root parent max_model_len permission",
    message_failure.MessageFault: "details",
}

ELSEWHERE = ("prompt_logprobs", "similarity")
"""Modules of parts that are wholly ours."""


@dataclass(frozen=True)
class Field:
    """How a field may be sent."""

    may_be_null: bool
    may_be_absent: bool


def shape_of(kind: type[Struct]) -> dict[str, Field]:
    """Return the fields of a type as the SDKs declare it."""
    found: dict[str, Field] = {}
    for word in SHAPES[kind].split():
        found[word.rstrip("?|")] = Field(word.endswith("|"), "?" in word)
    return found


def fields_of(kind: type[Struct]) -> dict[str, Field]:
    """Return the fields of a type as this server sends it, its tag included."""
    config, hints = kind.__struct_config__, get_type_hints(kind)
    found = {} if config.tag is None else {str(config.tag_field): Field(may_be_null=False, may_be_absent=False)}
    for field in msgspec.structs.fields(kind):
        members = set(_members(hints[field.name]))
        is_omitted = config.omit_defaults and not field.required
        may_be_null = type(None) in members and not (is_omitted and field.default is None)
        found[field.encode_name] = Field(may_be_null, UnsetType in members or is_omitted)
    return found


def structs_in(kind: object) -> Iterator[type[Struct]]:
    """Yield every type of answer within another one."""
    waiting, seen = [kind], set[type[Struct]]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, Struct):
            if one not in seen:
                seen.add(one)
                yield one
                waiting += get_type_hints(one).values()
        else:
            waiting += cast(tuple[object, ...], get_args(one))


def _members(hint: Any) -> Iterator[object]:  # Any: a type hint
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint
