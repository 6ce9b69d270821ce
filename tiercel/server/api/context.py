"""The parts of the server that routes use."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from tiercel.server.api.answer_budget import AnswerBudget
from tiercel.server.api.answer_style import AnswerStyle
from tiercel.server.api.background import BackgroundRuns
from tiercel.server.api.generation_config import SamplingDefaults
from tiercel.server.api.object_store import ObjectStore
from tiercel.server.api.params import ModelLimits
from tiercel.server.api.pooling import PoolingStyle
from tiercel.server.batch.service import BatchService
from tiercel.server.client.client import EngineClient
from tiercel.server.client.status import EngineStartError
from tiercel.server.control.configuration import Configuration
from tiercel.server.grammar.checker import GrammarChecker
from tiercel.server.http.body import read_object
from tiercel.server.http.body_budget import BodyBudget, BodyHolding
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.tenancy.admission import Admission
from tiercel.server.tenancy.directory import TenantDirectory
from tiercel.server.tenancy.tenants import DEFAULT_TENANT, Tenant
from tiercel.server.text.chat_template import ChatTemplate
from tiercel.server.text.tokenizer import TextCodec
from tiercel.server.tracing.sink import TraceSink
from tiercel.settings.settings import ServerSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import AdmissionError

_MIN_VALUE_LIMIT = 256 * 1024
_FIELD_VALUES = 4096  # of a body besides the prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One model behind one engine. Frozen: state that changes is in `configuration`, `client`, `admission`, `tenants`,
    `store`, `background` and `metrics`."""

    configuration: Configuration
    codec: TextCodec
    template: ChatTemplate | None  # None if the model has none
    defaults: SamplingDefaults
    client: EngineClient
    admission: Admission
    metrics: ServerMetrics
    tenants: TenantDirectory
    clock: Clock
    workers: Executor  # tokenising and rendering
    draw_seed: Callable[[], int]  # 63 bits
    wall_s: Callable[[], float]  # seconds since 1970, for `created`
    started_at: int
    bodies: BodyBudget  # of requests that are not admitted yet
    answers: AnswerBudget  # that are not streamed
    grammars: GrammarChecker
    pooling: PoolingStyle
    answer_style: AnswerStyle
    store: ObjectStore
    background: BackgroundRuns
    batches: BatchService | None = None  # None without a folder for files
    traces: TraceSink | None = None  # None if no traces are made

    @property
    def settings(self) -> ServerSettings:
        """The settings in force."""
        return self.configuration.server

    def close(self) -> None:
        """End the threads and processes that work on text."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        if self.template is not None:
            self.template.close()
        self.grammars.close()

    async def limits(self, tenant: Tenant = DEFAULT_TENANT) -> ModelLimits:
        """Return the limits of the model and of the tenant; wait for the engine to load.

        Errors: AdmissionError (503) if the engine cannot serve.
        """
        try:
            ready = await self.client.status.wait_ready()
        except EngineStartError as exc:
            raise self._unserved() from exc
        if self.client.status.is_over:
            raise self._unserved()
        return ModelLimits.of(ready, self.settings, tenant.share.kv_quota.hbm)

    def _unserved(self) -> AdmissionError:
        return AdmissionError(503, "The engine has stopped.", code="engine_dead", kind="server_error", retry_after_s=5)

    def model_name(self, requested: str | None) -> str:
        """Return the model name for the answer. Errors: AdmissionError (404) for an unknown model."""
        names = self.settings.served_model_names
        if requested is None or requested in names:
            return requested or names[0]
        aliases = ", ".join(f"`{name}`" for name in names)
        raise AdmissionError(
            404,
            f"The model `{requested[:128]}` does not exist. Valid aliases: {aliases}",
            code="model_not_found",
            param="model",
        )

    def chat_template(self) -> ChatTemplate:
        """Return the model's template. Errors: AdmissionError (400) if it has none."""
        if self.template is None:
            raise AdmissionError(400, "This model has no chat template; use /v1/completions.", param="messages")
        return self.template

    @property
    def max_values(self) -> int:
        """Maximum number of values in a body: enough for a prompt that fills the context, given as token ids.

        Until the engine has reported the context, only the size of the body limits the number.
        """
        ready = self.client.status.ready
        return max(
            _MIN_VALUE_LIMIT, self.settings.max_body_bytes if ready is None else ready.max_model_len + _FIELD_VALUES
        )

    def hold_body(self, request: Request) -> AbstractContextManager[BodyHolding]:
        """Return the memory of a request's body, counted for its tenant, or for its address if it has no key."""
        tenant: Tenant | None = request.scope.get("state", {}).get("tenant")
        if tenant is None or tenant.name == DEFAULT_TENANT.name:
            return self.bodies.hold(request.client.host if request.client else "local")
        return self.bodies.hold(f"tenant {tenant.name}")

    async def read_object(self, request: Request, holding: BodyHolding) -> dict[str, object]:
        """Return the body of a request as a JSON object. Errors: AdmissionError, ClientGoneError."""
        return await read_object(
            request,
            self.in_worker,
            holding,
            max_values=self.max_values,
            limit_s=self.settings.timeout_body_s,
        )

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run work on text in a thread, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)
