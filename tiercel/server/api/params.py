"""The sampling of a request: client fields and the model's defaults, with the checks that need the model."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from tiercel.server.api.generation_config import SamplingDefaults
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.completion import CompletionFields
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.api.structured import check_ends, constraint_of
from tiercel.server.grammar.constraint import Constraint
from tiercel.server.text.stop import TextRules
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import AdmissionError
from tiercel.values.request import SamplingParams
from tiercel.wire.frames import Ready

_MIN_TEMPERATURE = 0.01  # a lower one overflows half precision; 0 itself means greedy
_SEED_BITS = 63
_MAX_ID_DIGITS = 10
_MAX_SHOWN_IDS = 300  # in an error
WHOLE_VOCABULARY = -1
"""The number of log-probabilities that stands for all."""

T = TypeVar("T")


class ModelLimits(Struct, frozen=True, kw_only=True):
    """The limits of the model, of its KV pool and of the tenant."""

    max_model_len: int  # tokens, prompt and outputs together
    vocab_size: int
    pool_tokens: int  # KV pool of the device tier
    max_logprobs: int  # at most vocab_size
    prompt_lookup_num_tokens: int = 0  # of requests that do not say
    has_grammars: bool = True  # requests may have a grammar
    quota_tokens: int | None = None  # of the tenant, of the same pool; None = no quota

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence, limited by the context and by the pool."""
        return min(self.max_model_len, self.pool_tokens)

    @staticmethod
    def of(ready: Ready, settings: ServerSettings, quota_bytes: int | None = None) -> "ModelLimits":
        """Return the limits that the engine reported, with the tenant's quota of the device tier in whole blocks."""
        most = settings.max_logprobs
        return ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            pool_tokens=ready.blocks_total * ready.block_size,
            max_logprobs=min(ready.vocab_size if most == WHOLE_VOCABULARY else most, ready.vocab_size),
            prompt_lookup_num_tokens=settings.prompt_lookup_num_tokens,
            has_grammars=ready.has_grammars,
            quota_tokens=None if quota_bytes is None else quota_bytes // ready.block_bytes * ready.block_size,
        )


class SamplingPlan(Struct, frozen=True, kw_only=True):
    """The sampling of a request, as far as it does not depend on the prompt."""

    n: int  # choices that are computed of each prompt
    kept: int | None = None  # choices of each prompt that are returned: the best; None = all
    echo: tuple[str | None, ...] | None = None  # the text of each prompt, if it is repeated; None: given as tokens
    seed: int | None
    max_tokens: int | None  # None = the rest of the context
    max_tokens_field: str
    params: SamplingParams  # seed and max_tokens are set for each choice and prompt
    returns_tokens: bool = False
    is_streamed: bool = False
    pooled_bytes: int = 0  # memory of the vector of each prompt
    held_bytes: int = 0  # memory that the answer takes beside its outputs
    rules: TextRules
    constraint: Constraint | None = None  # not checked yet; its grammar is set in `params` once it is
    is_parsed: bool = False  # answers are split into calls, thoughts and content

    def for_prompt(self, num_prompt: int, limits: ModelLimits, default_cap: int | None) -> SamplingParams:
        """Return the sampling for a prompt of `num_prompt` tokens.

        Errors: AdmissionError (400) if prompt and outputs exceed the context or the KV pool.
        """
        check_length(num_prompt, self.max_tokens, self.max_tokens_field, limits)
        room = limits.longest - num_prompt
        max_tokens = self.max_tokens if self.max_tokens is not None else min(room, default_cap or room)
        if self.params.min_tokens > max_tokens:
            raise AdmissionError(
                400,
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {self.params.min_tokens}.",
                param="min_tokens",
            )
        return replace(self.params, max_tokens=max_tokens)

    def choice_params(self, params: SamplingParams, choice: int, draw_seed: Callable[[], int]) -> SamplingParams:
        """Return the sampling of one choice, with a seed of its own, derived from the client's seed if there is one."""
        seed = draw_seed() if self.seed is None else choice_seed(self.seed, choice)
        # A stream must not wait for another choice. A whole answer has the log-probabilities of a prompt once.
        prompt_logprobs = params.prompt_logprobs if choice == 0 or self.is_streamed else None
        return replace(params, seed=seed, prompt_logprobs=prompt_logprobs)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice, 63 bits. The first choice has the client's seed unless it is negative."""
    if choice == 0 and seed >= 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def chat_plan(fields: ChatFields, defaults: SamplingDefaults, limits: ModelLimits) -> SamplingPlan:
    """Return the sampling of a chat request. Errors: AdmissionError (400)."""
    logprobs = None
    if fields.logprobs:
        logprobs = _num_logprobs("top_logprobs", fields.top_logprobs or 0, limits)
    elif fields.top_logprobs:
        raise AdmissionError(400, "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    has_new_name = fields.max_completion_tokens is not None
    return _plan(
        fields,
        defaults,
        limits,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(fields, limits),
        max_tokens=fields.max_outputs,
        max_tokens_field="max_completion_tokens" if has_new_name else "max_tokens",
        least_tokens=1 if fields.prompt_logprobs is None else 0,
    )


def completion_plan(fields: CompletionFields, defaults: SamplingDefaults, limits: ModelLimits) -> SamplingPlan:
    """Return the sampling of a text completion. Errors: AdmissionError (400)."""
    logprobs = None if fields.logprobs is None else _num_logprobs("logprobs", fields.logprobs, limits)
    prompt_logprobs = _prompt_logprobs(fields, limits)
    if prompt_logprobs is None and fields.echo:
        prompt_logprobs = logprobs
    best_of = None if fields.best_of in (None, fields.n or 1) else fields.best_of
    if best_of is not None:
        if best_of < (fields.n or 1):
            raise AdmissionError(400, f"best_of must be at least n={fields.n}, got {best_of}.", param="best_of")
        if fields.stream:
            raise AdmissionError(
                400, "best_of cannot be streamed: it must equal n, or stream be false.", param="best_of"
            )
        logprobs = logprobs or 0  # they choose
    plan = _plan(
        fields,
        defaults,
        limits,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=fields.num_outputs,
        max_tokens_field="max_tokens",
        least_tokens=0,
    )
    return plan if best_of is None else replace(plan, kept=fields.n or 1)


def _plan(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_tokens: int | None,
    max_tokens_field: str,
    least_tokens: int,
) -> SamplingPlan:
    if fields.stream_options is not None and not fields.stream:
        raise AdmissionError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if max_tokens is not None and max_tokens < least_tokens:
        raise AdmissionError(
            400,
            f"{max_tokens_field} must be at least {least_tokens}, got {_short(max_tokens)}.",
            param=max_tokens_field,
        )
    constraint = constraint_of(fields)
    if constraint is not None:
        check_ends(constraint, ignore_eos=bool(fields.ignore_eos))
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    min_tokens = fields.min_tokens or 0
    top_p = _or(fields.top_p, defaults.top_p)  # 0: the smallest set of tokens has one token, as with temperature 0
    return SamplingPlan(
        n=fields.num_choices,
        seed=fields.seed,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        params=SamplingParams(
            temperature=0.0 if top_p == 0 else _temperature(fields.temperature, defaults),
            top_p=top_p or 1.0,
            top_k=max(_or(fields.top_k, defaults.top_k), 0),
            min_p=_or(fields.min_p, defaults.min_p),
            repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(fields.presence_penalty, 0.0),
            frequency_penalty=_or(fields.frequency_penalty, 0.0),
            logit_bias=_logit_bias(fields.logit_bias or {}, limits),
            min_tokens=min_tokens,
            stop_token_ids=_token_ids(fields.stop_token_ids or [], "stop_token_ids", limits),
            ignore_eos=bool(fields.ignore_eos),
            prompt_lookup_num_tokens=_or(fields.prompt_lookup_num_tokens, limits.prompt_lookup_num_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_token_ids=_token_ids(fields.allowed_token_ids or [], "allowed_token_ids", limits),
        ),
        rules=TextRules(
            stops=stops,
            include_stop=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            min_tokens=min_tokens,
        ),
        constraint=constraint,
        returns_tokens=bool(fields.return_token_ids),
        is_streamed=bool(fields.stream),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _temperature(value: float | None, defaults: SamplingDefaults) -> float:
    temperature = _or(value, defaults.temperature)
    return temperature if temperature == 0 else max(temperature, _MIN_TEMPERATURE)


def _short(number: int) -> str:
    """Return a client's number for a message, of limited length."""
    return str(number) if abs(number) < 10**20 else "a number too large"


def _prompt_logprobs(fields: SamplingFields, limits: ModelLimits) -> int | None:
    """Return the number of log-probabilities of each token of the prompt. Errors: AdmissionError (400)."""
    if fields.prompt_logprobs is None:
        return None
    if fields.stream and fields.prompt_logprobs:
        raise AdmissionError(400, "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    return _num_logprobs("prompt_logprobs", fields.prompt_logprobs, limits)


def _num_logprobs(field: str, count: int, limits: ModelLimits) -> int:
    """Return the number of log-probabilities; WHOLE_VOCABULARY stands for all. Errors: AdmissionError (400)."""
    if count == WHOLE_VOCABULARY:
        count = limits.vocab_size
    if count > limits.max_logprobs:
        raise AdmissionError(
            400,
            f"Requested {field} of {_short(count)}, which is greater than max allowed: {limits.max_logprobs}",
            param=field,
        )
    return count


def _shown_key(name: str) -> str:
    """Return a key for a message: letters that could confuse a reader are replaced."""
    return '"' + re.sub(r"[^A-Za-z0-9_.:/+ -]", "?", name[:32]) + '"'


def _logit_bias(entries: Mapping[str, float], limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """Return the biases by token id. Errors: AdmissionError (400) naming every bad key; the field has at most 300."""
    keys = [name for name in entries if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_ID_DIGITS)]
    if keys:
        shown = ", ".join(map(_shown_key, keys))
        raise AdmissionError(400, f"logit_bias: keys must be token ids, such as 50256, not {shown}", param="logit_bias")
    large = [f"token {name} has {bias:g}" for name, bias in entries.items() if not -100 <= bias <= 100]
    if large:
        raise AdmissionError(
            400, f"logit_bias: values must be between -100 and 100: {', '.join(large)}", param="logit_bias"
        )
    biases = {int(name): bias for name, bias in entries.items()}
    _token_ids(list(biases), "logit_bias", limits)
    return tuple(biases.items())


def _token_ids(tokens: list[int], field: str, limits: ModelLimits) -> tuple[int, ...]:
    """Return the token ids of a field. Errors: AdmissionError (400) naming those that the model does not have."""
    unknown = [token for token in tokens if not 0 <= token < limits.vocab_size]
    if unknown:
        shown = ", ".join(map(_short, unknown[:_MAX_SHOWN_IDS]))
        rest = f" and {len(unknown) - _MAX_SHOWN_IDS} more" if len(unknown) > _MAX_SHOWN_IDS else ""
        words = f"token id {shown} is" if len(unknown) == 1 else f"token ids {shown}{rest} are"
        raise AdmissionError(
            400,
            f"{field}: {words} out of vocabulary: the model has {limits.vocab_size} tokens,"
            f" 0 to {limits.vocab_size - 1}",
            param=field,
        )
    return tuple(tokens)


def check_length(num_prompt: int, max_tokens: int | None, field: str, limits: ModelLimits) -> None:
    """Refuse a request that can never run.

    Errors: AdmissionError (400) if prompt and outputs exceed the context or the KV pool, or the prompt alone exceeds
            the tenant's quota. An answer that reaches the quota ends there.
    """
    longest = limits.longest
    if num_prompt >= longest + (max_tokens == 0):  # without outputs, the prompt may fill the context
        raise too_long(num_prompt, limits)
    if limits.quota_tokens is not None and num_prompt > limits.quota_tokens:
        raise AdmissionError(
            400,
            f"Your prompt contains {num_prompt} input tokens, and kv_quota_bytes.hbm of your tenant has room for"
            f" {limits.quota_tokens}. Please reduce the length of the input prompt.",
            code="context_length_exceeded",
            param="input_tokens",
        )
    total = num_prompt + (1 if max_tokens is None else max_tokens)
    if total > longest:
        raise AdmissionError(
            400,
            f"This model's maximum context length is {longest} tokens. However, you requested {_short(max_tokens or 1)}"
            f" output tokens and your prompt contains {num_prompt} input tokens, for a total of {_short(total)} tokens."
            f" Please reduce the length of the input prompt or the number of requested output tokens.{_cause(limits)}",
            code="context_length_exceeded",
            param=field,
        )


def too_long(num_prompt: int, limits: ModelLimits, *, at_least: bool = False) -> AdmissionError:
    """Return the refusal of a long prompt. Clients recognise it by the words "maximum context length"."""
    return AdmissionError(
        400,
        f"This model's maximum context length is {limits.longest} tokens. However, your prompt contains"
        f" {'at least ' if at_least else ''}{num_prompt} input tokens, which exceeds this limit."
        f" Please reduce the length of the input prompt.{_cause(limits)}",
        code="context_length_exceeded",
        param="input_tokens",
    )


def _cause(limits: ModelLimits) -> str:
    """Return the explanation for a limit below the model's own: the engine cuts the context to its KV pool."""
    if limits.pool_tokens > limits.max_model_len:
        return ""
    return f" The limit is that of the server's KV pool, which holds {limits.pool_tokens} tokens."
