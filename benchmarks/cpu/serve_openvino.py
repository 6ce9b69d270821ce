"""OpenVINO GenAI behind a minimal /v1/completions.

    python serve_openvino.py MODEL_FOLDER --port 8000

OpenVINO's own server is not on PyPI. MODEL_FOLDER is an export of `optimum-cli export openvino`. One thread runs the
pipeline; each answer goes to its connection through a queue of the event loop.
"""

import argparse
import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openvino_genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

_YIELD_S = 0.0005  # step() keeps the interpreter lock; without a pause the event loop could not send


@dataclass
class PendingRequest:
    """A request for the pipeline, and the queue of its answers."""

    prompt: str
    config: openvino_genai.GenerationConfig
    loop: asyncio.AbstractEventLoop
    answers: "asyncio.Queue[tuple[list[int], bool]]"
    input_tokens: int = 0
    is_gone: bool = False


class Pipeline:
    """The pipeline and its thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = arguments.kv_gib
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": arguments.threads} if arguments.threads else {}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self.inbox: queue.Queue[PendingRequest] = queue.Queue()
        self._ids = itertools.count()

    def run(self) -> None:
        """Run steps while requests are pending; otherwise wait for a request."""
        running: dict[object, PendingRequest] = {}
        while True:
            self._take(running)
            self._pipeline.step()
            time.sleep(_YIELD_S)
            for handle, request in list(running.items()):
                tokens: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                is_done = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if request.is_gone:
                    handle.stop()
                elif tokens or is_done:
                    request.loop.call_soon_threadsafe(request.answers.put_nowait, (tokens, is_done))
                if is_done or request.is_gone:
                    del running[handle]

    def _take(self, running: dict[object, PendingRequest]) -> None:
        while True:
            try:
                request = self.inbox.get(block=not running)
            except queue.Empty:
                return
            encoded = self.tokenizer.encode(request.prompt)
            request.input_tokens = encoded.input_ids.shape[-1]
            running[self._pipeline.add_request(next(self._ids), encoded.input_ids, request.config)] = request


def make_app(pipeline: Pipeline, name: str) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(http: Request) -> StreamingResponse:
        fields = await http.json()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = fields.get("max_tokens", 16)
        config.ignore_eos = bool(fields.get("ignore_eos"))
        config.do_sample = False
        request = PendingRequest(fields["prompt"], config, asyncio.get_running_loop(), asyncio.Queue())
        pipeline.inbox.put(request)
        return StreamingResponse(_events(pipeline, request), media_type="text/event-stream")

    return app


async def _events(pipeline: Pipeline, request: PendingRequest) -> AsyncIterator[str]:
    total, is_done = 0, False
    try:
        while not is_done:
            tokens, is_done = await request.answers.get()
            total += len(tokens)
            text = (pipeline.tokenizer.decode(tokens) or "?") if tokens else ""
            yield _event({"choices": [{"index": 0, "text": text, "finish_reason": "length" if is_done else None}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": request.input_tokens, "completion_tokens": total}})
        yield "data: [DONE]\n\n"
    finally:
        request.is_gone = True


def _event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=0, help="0: OpenVINO's choice")
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    arguments = parser.parse_args()
    pipeline = Pipeline(arguments)
    threading.Thread(target=pipeline.run, daemon=True).start()
    uvicorn.run(make_app(pipeline, "openvino"), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
