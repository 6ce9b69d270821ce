"""A request for pooled states: its inputs, checked and tokenised."""

from dataclasses import dataclass

from tiercel.server.api.context import ServerContext
from tiercel.server.api.params import ModelLimits, SamplingPlan
from tiercel.server.api.prompt import check_tokens, encode_texts
from tiercel.server.api.schemas.embeddings import PooledFields
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.api.truncation import truncated, truncation_of
from tiercel.server.text.stop import TextRules
from tiercel.values.errors import AdmissionError
from tiercel.values.request import SamplingParams

_NUMBER_BYTES = 4
_UNKNOWN_SIZE = 8192  # numbers of a vector, for the memory of an answer


@dataclass(frozen=True, slots=True)
class PooledCall:
    """Inputs whose states are pooled; `field` is their name for refusals."""

    pooled: PooledFields
    inputs: list[str] | list[list[int]]
    field: str
    context: ServerContext

    @property
    def fields(self) -> SamplingFields:
        """The fields that all requests have."""
        own = self.pooled
        fields = SamplingFields(priority=own.priority, cache_salt=own.cache_salt, timeout=own.timeout)
        fields.take_ignored(own)
        return fields

    @property
    def num_prompts(self) -> int:
        """Number of inputs."""
        return len(self.inputs)

    @property
    def expanded_bytes(self) -> int:
        """The memory of what the body stands for beyond its own values: nothing, each text is encoded once."""
        return 0

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        """Return that nothing is sampled. Errors: AdmissionError (400) if the model has no pooling."""
        style = self.context.pooling
        if style.pooling is None:
            raise AdmissionError(
                400,
                f"This model has no embeddings here: {style.reason}. The operator can choose --pooling last or mean.",
                code="unsupported_model",
                param="model",
            )
        return SamplingPlan(
            n=1,
            seed=0,
            max_tokens=0,
            max_tokens_field=self.field,
            params=SamplingParams(max_tokens=0, pooling=style.pooling),
            rules=TextRules(),
            pooled_bytes=_NUMBER_BYTES * (style.hidden_size or _UNKNOWN_SIZE),
        )

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        """Return the tokens of the inputs. Errors: AdmissionError (400)."""
        texts = [one for one in self.inputs if isinstance(one, str)]
        codec, field = self.context.codec, self.field
        truncation = truncation_of(self.pooled.truncation, limits, 0)
        if texts:
            most = None if truncation is None else self.context.max_values
            return await self.context.in_worker(
                lambda: encode_texts(
                    codec, texts, limits, add_special_tokens=True, field=field, most_tokens=most, truncation=truncation
                )
            )
        tokens = truncated([one for one in self.inputs if isinstance(one, list)], truncation)
        await self.context.in_worker(lambda: check_tokens(tokens, limits, field))
        return tokens
