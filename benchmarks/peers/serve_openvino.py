"""Serves OpenVINO GenAI's continuous batching at /v1/completions, with the fields that a load test needs.

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

_GIVE_WAY_S = 0.0005  # step() keeps the interpreter lock; without a pause the event loop could not send


@dataclass
class Asked:
    """One request for the pipeline."""

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
        self.inbox: queue.Queue[Asked] = queue.Queue()
        self._ids = itertools.count()

    def run(self) -> None:
        """Step while there is work; else wait for the inbox."""
        running: dict[object, Asked] = {}
        while True:
            self._take(running)
            self._pipeline.step()
            time.sleep(_GIVE_WAY_S)
            for handle, asked in list(running.items()):
                tokens: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                is_done = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if asked.is_gone:
                    handle.stop()
                elif tokens or is_done:
                    asked.loop.call_soon_threadsafe(asked.answers.put_nowait, (tokens, is_done))
                if is_done or asked.is_gone:
                    del running[handle]

    def _take(self, running: dict[object, Asked]) -> None:
        while True:
            try:
                asked = self.inbox.get(block=not running)
            except queue.Empty:
                return
            encoded = self.tokenizer.encode(asked.prompt)
            asked.input_tokens = encoded.input_ids.shape[-1]
            running[self._pipeline.add_request(next(self._ids), encoded.input_ids, asked.config)] = asked


def make_app(pipeline: Pipeline, name: str) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        fields = await request.json()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = fields.get("max_tokens", 16)
        config.ignore_eos = bool(fields.get("ignore_eos"))
        config.do_sample = False
        asked = Asked(fields["prompt"], config, asyncio.get_running_loop(), asyncio.Queue())
        pipeline.inbox.put(asked)
        return StreamingResponse(_events(pipeline, asked), media_type="text/event-stream")

    return app


async def _events(pipeline: Pipeline, asked: Asked) -> AsyncIterator[str]:
    total, is_done = 0, False
    try:
        while not is_done:
            tokens, is_done = await asked.answers.get()
            total += len(tokens)
            text = (pipeline.tokenizer.decode(tokens) or "?") if tokens else ""
            yield _event({"choices": [{"index": 0, "text": text, "finish_reason": "length" if is_done else None}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": asked.input_tokens, "completion_tokens": total}})
        yield "data: [DONE]\n\n"
    finally:
        asked.is_gone = True


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
