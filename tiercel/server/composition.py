"""The composition of the HTTP process: its parts, and how they are connected."""

import functools
import random
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tiercel.server.api.answer_budget import AnswerBudget
from tiercel.server.api.answer_style import AnswerStyle
from tiercel.server.api.background import BackgroundRuns
from tiercel.server.api.context import ServerContext
from tiercel.server.api.generation_config import load_sampling_defaults
from tiercel.server.api.object_store import ObjectStore, StoreLimits
from tiercel.server.api.pooling import read_pooling
from tiercel.server.batch.service import BatchService
from tiercel.server.client.client import EngineClient
from tiercel.server.client.status import EngineState
from tiercel.server.control.configuration import Configuration, SettingsVersion
from tiercel.server.grammar.checker import GrammarChecker
from tiercel.server.http.body_budget import BodyBudget
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.metrics.tenants import oldest_waits
from tiercel.server.tenancy.admission import Admission
from tiercel.server.tenancy.directory import TenantDirectory, open_directory
from tiercel.server.tenancy.limit_exchange import LimitExchange
from tiercel.server.tenancy.tenants import Tenant, TenantTable
from tiercel.server.tenancy.usage import UsageBook
from tiercel.server.text.chat_template import ChatTemplate, TemplateRendering
from tiercel.server.text.template_pool import TemplatePool
from tiercel.server.text.tokenizer import load_text_codec
from tiercel.server.tracing.sink import make_traces
from tiercel.settings.config import Resolved
from tiercel.settings.settings import EngineSettings, ServerSettings, Settings
from tiercel.system.log import set_log_level
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import TenantId

_TEXT_WORKERS = 2
_STALL_S = 30.0  # without the end of a step, while the engine has not said how long a step may take


def build_context(
    settings: ServerSettings,
    engine: EngineSettings | None = None,
    origin: Resolved | None = None,
    stall_limit_s: Callable[[], float] = lambda: 0.0,
    *,
    open_template: Callable[[str, Mapping[str, str], str | None], TemplateRendering] = TemplatePool.open,
    is_takeover: bool = False,
) -> ServerContext:
    """Read the tokenizer, template and sampling defaults of the model and connect the parts.

    Nothing is started but the process that renders the template: close the context. `engine` are the settings of the
    engine process and `origin` is the source of all settings; without an origin they cannot be changed at run time.
    `stall_limit_s` is what the engine itself allows for a step; 0: not known. `is_takeover`: another daemon serves
    until this one does. Errors: ConfigError.
    """
    clock = MonotonicClock()
    folder = Path(settings.tokenizer or settings.model)
    codec = load_text_codec(folder, settings.chat_template)
    defaults = load_sampling_defaults(
        Path(settings.model), settings.generation_config, settings.override_generation_config
    )
    metrics = ServerMetrics(settings.served_model_names[0])
    usages = UsageBook(clock, settings.scheduling_policy)
    client = _open_client(settings, clock, metrics, usages)
    tenants = open_directory(settings, metrics)

    def apply_tenants(table: TenantTable) -> None:
        usages.set_table(table)
        metrics.tenants.set_table(table)
        client.set_tenants(table.message)

    tenants.add_listener(apply_tenants)
    admission = Admission(client.sequences, metrics, clock, usages, max_queued=settings.max_num_queued_reqs)
    metrics.open(
        client.status,
        usages.counts,
        lambda: oldest_waits(list(client.sequences.facts_by_seq.values()), clock.now_s()),
        lambda: admission.max_queued,
    )
    both = Settings(engine=engine or EngineSettings(model=settings.model), server=settings)
    configuration = Configuration(both, origin, metrics.config, time.time)

    def apply_settings(new: SettingsVersion) -> None:
        server = new.settings.server
        metrics.config.on_config(new.version, new.at_s)
        admission.set_max_queued(server.max_num_queued_reqs)
        usages.set_policy(server.scheduling_policy)
        if new.version > 1:  # version 1 is what the engine and the log were started with
            client.set_settings(new.version, new.settings.engine)
            set_log_level(server.log_level)

    configuration.add_listener(apply_settings)
    if settings.engines is None:
        client.status.stall_limit_s = lambda: configuration.server.stall_timeout_s or stall_limit_s() or _STALL_S
    bodies = BodyBudget(lambda: configuration.server.max_pending_body_bytes, lambda: metrics.on_rejected("body_memory"))
    metrics.open_bodies(lambda: bodies.held_bytes, lambda: configuration.server.max_pending_body_bytes)
    conditions = _Conditions(configuration, client, admission, tenants)
    batches = BatchService.of(settings, conditions, clock, time.time, is_takeover=is_takeover)
    if batches is not None:
        metrics.open_batches(batches)
    store = ObjectStore(lambda: _store_limits(configuration.server), clock, metrics.responses.on_forgotten)
    metrics.responses.open(lambda: store.num_objects, lambda: store.num_bytes)
    traces = make_traces(settings.otlp_traces_endpoint)
    template = None  # last, because an error behind it would leave its process behind
    if codec.chat_template is not None:
        renderer = open_template(codec.chat_template, codec.named_specials, codec.tool_template)
        template = ChatTemplate.open(renderer, codec)
    return ServerContext(
        configuration=configuration,
        codec=codec,
        template=template,
        defaults=defaults,
        client=client,
        admission=admission,
        metrics=metrics,
        tenants=tenants,
        clock=clock,
        workers=ThreadPoolExecutor(_TEXT_WORKERS, "text"),
        draw_seed=functools.partial(secrets.randbits, 63),
        wall_s=time.time,
        started_at=int(time.time()),
        bodies=bodies,
        answers=AnswerBudget(
            lambda: configuration.server.max_answer_bytes, lambda: metrics.on_rejected("answer_memory")
        ),
        batches=batches,
        grammars=GrammarChecker(folder / "tokenizer.json", weight_of=lambda name: _weight_of(tenants, name)),
        pooling=read_pooling(Path(settings.model), settings.pooling),
        answer_style=AnswerStyle.of(
            settings.tool_call_parser, settings.reasoning_parser, codec.template_text, template
        ),
        store=store,
        background=BackgroundRuns(),
        traces=traces,
    )


def _open_client(
    settings: ServerSettings, clock: MonotonicClock, metrics: ServerMetrics, usages: UsageBook
) -> EngineClient:
    """Return the client of the daemon's own engine, or of the engines that the settings name."""
    if settings.engines is None:
        return EngineClient(clock, metrics, usages)
    client = FleetClient(clock, metrics, random.Random(), usages)  # noqa: S311 - breaks ties
    client.limits = LimitExchange(usages, clock)
    metrics.open_fleet(lambda: client.links)
    return client


@dataclass(frozen=True, slots=True)
class _Conditions:
    """The conditions under which lines of batches are asked."""

    configuration: Configuration
    client: EngineClient
    admission: Admission
    tenants: TenantDirectory

    @property
    def is_calm(self) -> bool:
        return self.client.status.state is EngineState.READY and self.admission.is_calm

    @property
    def max_body_bytes(self) -> int:
        return self.configuration.server.max_body_bytes

    def tenant(self, name: TenantId) -> Tenant | None:
        return self.tenants.table.by_name.get(name)


def _weight_of(tenants: TenantDirectory, name: TenantId) -> float:
    """Return the weight of a tenant; a tenant that was removed since has the weight 1."""
    tenant = tenants.table.by_name.get(name)
    return 1.0 if tenant is None else tenant.share.weight


def _store_limits(settings: ServerSettings) -> StoreLimits:
    return StoreLimits(
        tenant_objects=settings.stored_responses,
        tenant_bytes=settings.stored_response_tenant_bytes,
        total_bytes=settings.stored_response_bytes,
        lifetime_s=settings.stored_response_lifetime_s,
    )
