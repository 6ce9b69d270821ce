"""The content of a message, block by block, while it arrives."""

import secrets
from collections.abc import Iterator

from tiercel.server.api.replies.messages import (
    NO_INPUT,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputPiece,
    MessageEvent,
    SignaturePiece,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    ToolUseBlock,
)
from tiercel.server.api.replies.partial_json import partial_object
from tiercel.server.api.replies.tool_calls import new_call_id
from tiercel.server.text.answer.event import (
    AnswerEvent,
    CallArguments,
    CallCount,
    CallEnd,
    CallStart,
    ContentPart,
    ThoughtPart,
)
from tiercel.server.text.answer.formats import CallFormat


class BlockWriter:
    """Writes the events of the blocks of one message, one block after the other, and keeps the blocks that are over."""

    def __init__(self, form: CallFormat | None) -> None:
        self._form = form
        self._done: list[ContentBlock] = []
        self._num_begun = 0
        self._open: ContentBlock | None = None
        self._texts: list[str] = []  # of the open block
        self._count = CallCount()

    @property
    def is_called(self) -> bool:
        """True if the client may run the calls: see `CallCount`."""
        return self._count.is_called

    def whole(self) -> list[ContentBlock]:
        """Return all blocks, which are over. A call that is not complete has as much of its input as can be read."""
        return self._done

    def take(self, event: AnswerEvent) -> Iterator[MessageEvent]:
        """Add a part of the answer."""
        self._count.take(event)
        match event:
            case ContentPart(text):
                yield from self.text(text)
            case ThoughtPart(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock(""))
                yield self._piece(ThinkingPiece(text), text)
            case CallStart(name=name):
                yield from self._begin(ToolUseBlock(self._new_id(), name, NO_INPUT))
            case CallArguments(text=text):
                yield self._piece(InputPiece(text), text)
            case CallEnd():
                yield from self.close()

    def text(self, text: str) -> Iterator[MessageEvent]:
        """Add text for the user."""
        if not isinstance(self._open, TextBlock):
            yield from self._begin(TextBlock(""))
        yield self._piece(TextPiece(text), text)

    def close(self) -> Iterator[MessageEvent]:
        """End the open block, if there is one."""
        match self._open:
            case None:
                return
            case TextBlock():
                self._done.append(TextBlock("".join(self._texts)))
            case ThinkingBlock():
                yield self._piece(SignaturePiece(), "")
                self._done.append(ThinkingBlock("".join(self._texts)))
            case ToolUseBlock(id=id, name=name):
                self._done.append(ToolUseBlock(id, name, partial_object("".join(self._texts))))
        self._open = None
        yield BlockStop(self._num_begun - 1)

    def _begin(self, block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self.close()
        self._open, self._texts = block, []
        self._num_begun += 1
        yield BlockStart(self._num_begun - 1, block)

    def _piece(self, piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece, text: str) -> MessageEvent:
        self._texts.append(text)
        return BlockDelta(self._num_begun - 1, piece)

    def _new_id(self) -> str:
        """Return an id that the templates of this format accept when the client sends it back."""
        has_own_ids = self._form is not None and self._form.id_letters
        return new_call_id(self._form) if has_own_ids else f"toolu_{secrets.token_hex(12)}"
