"""The processes that render chat templates.

The template of a model folder is a program: it may loop for ever or write without end for certain messages. It runs
in a process of its own, so that only the request whose messages it renders is lost.
"""

from collections.abc import Mapping

from tiercel.server.text.template_frames import (
    Compiled,
    Rendered,
    RenderJob,
    TemplateSource,
    encode_frame,
    opened_decoder,
    rendering_decoder,
)
from tiercel.server.workers.pool import Loss, WorkerPool, WorkerStartError
from tiercel.values.errors import AdmissionError, ConfigError, WireError

LIMIT_S = 2.0
"""Maximum time of one rendering."""

_NUM_WORKERS = 2
_MODULE = "tiercel.server.text.template_worker"


class TemplatePool:
    """Renders one template in up to two processes. The methods are thread-safe."""

    def __init__(
        self, workers: WorkerPool, variables: frozenset[str], literals: frozenset[str], limit_s: float
    ) -> None:
        """See `open`."""
        self._workers = workers
        self._limit_s = limit_s
        self.variables = variables
        self.literals = literals

    @staticmethod
    def open(
        text: str,
        specials: Mapping[str, str],
        tool_text: str | None = None,
        *,
        limit_s: float = LIMIT_S,
        num_workers: int = _NUM_WORKERS,
    ) -> "TemplatePool":
        """Start the first process and compile the template in it.

        `tool_text`: see `TemplateSource`. Errors: ConfigError if the template does not compile, or the process cannot
        run.
        """
        source = encode_frame(TemplateSource(text, dict(specials), tool_text))
        workers = WorkerPool(_MODULE, source, limit_s=limit_s, num_workers=num_workers)
        try:
            answer = opened_decoder.decode(workers.start_one())
        except WorkerStartError as exc:
            workers.close()
            if exc.is_late:
                message = "the chat template does not compile: that took longer than 10 s"
                raise ConfigError("chat_template.syntax", message) from exc
            raise ConfigError("chat_template.process", f"the process for chat templates: {exc.message}") from exc
        if isinstance(answer, Compiled):
            return TemplatePool(workers, frozenset(answer.variables), frozenset(answer.literals), limit_s)
        workers.close()
        raise ConfigError(answer.code, answer.message)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return self._workers.pids

    def render(self, job: RenderJob) -> str:
        """Return the rendered conversation.

        Errors: AdmissionError: 400 if the template refuses the messages or exceeds a limit, 500 if its processes die.
        """
        try:
            frame = encode_frame(job)
        except WireError as exc:
            raise AdmissionError(400, "The messages are no Unicode text.", param="messages") from exc
        answer = self._workers.ask(frame)
        if isinstance(answer, Loss):
            raise self._refusal_of(answer)
        rendering = rendering_decoder.decode(answer)
        if isinstance(rendering, Rendered):
            return rendering.text
        raise AdmissionError(400, rendering.message, code=rendering.code, param="messages")

    def _refusal_of(self, loss: Loss) -> AdmissionError:
        if loss is Loss.LATE:
            message = f"The chat template did not end within {self._limit_s:g} s."
            return AdmissionError(400, message, code="chat_template_timeout", param="messages")
        message = "The chat template could not be rendered."
        return AdmissionError(500, message, code="chat_template_failed", kind="server_error")

    def close(self) -> None:
        """Kill the processes. Renderings in progress fail."""
        self._workers.close()
