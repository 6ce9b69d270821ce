"""The process that renders chat templates: `python -m tiercel.server.text.template_worker --fd N`.

It answers one frame after another until its socket ends. The kernel ends it when a rendering takes too long (SIGALRM),
whatever it is doing, and so also if the HTTP process has died in the meantime. Its memory is limited.
"""

import argparse
import datetime
import resource
import signal
import socket

from tiercel.errors import AdmissionError, ConfigError
from tiercel.server.text.template_frames import (
    Compiled,
    FromWorker,
    Rendered,
    RenderJob,
    TemplateFailure,
    TemplateSource,
    encode_frame,
    read_frame,
    to_worker_decoder,
)
from tiercel.server.text.template_renderer import TemplateRenderer

MEMORY_BYTES = 1024 * 1024 * 1024
COMPILE_S = 10.0
"""Maximum time to compile a template."""


def main() -> None:
    """Serve the socket that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the HTTP process decides about its end
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=arguments.fd) as sock:
        try:
            _serve(sock, arguments.limit_s)
        except (EOFError, ConnectionError):
            return  # the HTTP process has ended


def _serve(sock: socket.socket, limit_s: float) -> None:
    renderer: TemplateRenderer | None = None
    while True:
        frame = to_worker_decoder.decode(read_frame(sock))
        if isinstance(frame, TemplateSource):
            signal.setitimer(signal.ITIMER_REAL, COMPILE_S)  # jinja2 computes constants
            renderer, answer = _compile(frame)
        else:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            answer = _render(renderer, frame)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sock.sendall(_encoded(answer))


def _compile(source: TemplateSource) -> tuple[TemplateRenderer | None, FromWorker]:
    try:
        renderer = TemplateRenderer(source.text, source.specials, today=datetime.datetime.now)
    except ConfigError as exc:
        return None, TemplateFailure(exc.message, exc.code)
    return renderer, Compiled(sorted(renderer.variables))


def _render(renderer: TemplateRenderer | None, job: RenderJob) -> FromWorker:
    if renderer is None:
        return TemplateFailure("There is no template.", "no_template")
    try:
        return Rendered(renderer.render(job))
    except AdmissionError as exc:
        return TemplateFailure(exc.message, exc.code)


def _encoded(answer: FromWorker) -> bytes:
    try:
        return encode_frame(answer)
    except UnicodeEncodeError:
        return encode_frame(TemplateFailure("The chat template writes text that is no Unicode.", "invalid_value"))


if __name__ == "__main__":
    main()
