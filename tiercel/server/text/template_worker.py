"""The process that renders chat templates: `python -m tiercel.server.text.template_worker --fd N`."""

import datetime

from tiercel.server.text.template_frames import (
    Compiled,
    Rendered,
    RenderJob,
    TemplateFailure,
    encode_frame,
    job_decoder,
    source_decoder,
)
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.workers.serving import Work, serve
from tiercel.values.errors import AdmissionError, ConfigError, WireError

COMPILE_S = 10.0
"""Maximum time to compile a template: jinja2 computes constants."""


def _compile(frame: bytearray) -> tuple[bytes, Work]:
    source = source_decoder.decode(frame)
    try:
        renderer = TemplateRenderer(source.text, source.specials, source.tool_text, today=datetime.datetime.now)
    except ConfigError as exc:
        failure = encode_frame(TemplateFailure(exc.message, exc.code))
        return failure, lambda frame: failure

    def work(frame: bytearray) -> bytes:
        return _encoded(_render(renderer, job_decoder.decode(frame)))

    return encode_frame(Compiled(sorted(renderer.variables), sorted(renderer.literals))), work


def _render(renderer: TemplateRenderer, job: RenderJob) -> Rendered | TemplateFailure:
    try:
        return Rendered(renderer.render(job))
    except AdmissionError as exc:
        return TemplateFailure(exc.message, exc.code)


def _encoded(answer: Rendered | TemplateFailure) -> bytes:
    try:
        return encode_frame(answer)
    except WireError:
        return encode_frame(TemplateFailure("The chat template writes text that is no Unicode.", "invalid_value"))


if __name__ == "__main__":
    serve(_compile, open_s=COMPILE_S)
