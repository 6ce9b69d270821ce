"""The bodies of /v1/embeddings, /v1/score and /v1/rerank."""

from typing import Annotated, Literal

from pydantic import Field, SkipValidation

from tiercel.server.api.schemas.fields import Flag, Integer, Word
from tiercel.server.api.schemas.sampling import Timeout
from tiercel.server.api.schemas.truncation import TruncationFields

MAX_INPUTS = 2048
"""Maximum number of inputs of one request, as of OpenAI. Two lists of texts fit an empty queue of the default size."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class PooledFields(TruncationFields):
    """The fields that the routes over pooled states share."""

    model: Annotated[str | None, Field(description="A name of this server's model.")] = None
    user: Annotated[str | None, Field(description="Ignored: the key decides whose request it is.")] = None
    priority: Annotated[
        Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None,
        Field(description="A lower number goes first, within the bands of the tenant."),
    ] = None
    cache_salt: Annotated[Word | None, Field(description="Only requests with the same salt share cached prefixes.")] = (
        None
    )
    timeout: Timeout | None = None

    @property
    def truncation(self) -> TruncationFields:
        """The truncation of the texts."""
        return self


class EmbeddingFields(PooledFields):
    """The body of /v1/embeddings."""

    input: Annotated[
        SkipValidation[str | list[str] | list[int] | list[list[int]]],
        Field(description=f"A text or a list of token ids, or a list of up to {MAX_INPUTS} of either."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="base64: little-endian float32. The default is float.")
    ] = None
    dimensions: Annotated[
        Annotated[Integer, Field(ge=1)] | None,
        Field(description="Keep the first numbers of each vector and normalise it again. The default is all."),
    ] = None


class ScoreFields(PooledFields):
    """The body of /v1/score: `text_1` is one text, or as many as `text_2`."""

    text_1: Annotated[str | Texts, Field(description="The first text of each pair, or one for all pairs.")]
    text_2: Annotated[str | Texts, Field(description="The second text of each pair.")]


class RerankFields(PooledFields):
    """The body of /v1/rerank."""

    query: Annotated[str, Field(description="The text to which the documents are compared.")]
    documents: Annotated[Texts, Field(description="The texts to be ordered.")]
    top_n: Annotated[
        Annotated[Integer, Field(ge=0)] | None, Field(description="Number of results; 0, the default: all.")
    ] = None
    return_documents: Annotated[
        Flag | None, Field(description="Whether results have the text of their document. The default is true.")
    ] = None


class TextRerankFields(PooledFields):
    """The body of /rerank in the form of TEI."""

    query: Annotated[str, Field(description="The text to which the texts are compared.")]
    texts: Annotated[Texts, Field(description="The texts to be ordered.")]
    raw_scores: Annotated[
        Flag | None, Field(description="true: scores are cosines. Otherwise the sigmoid function is applied to them.")
    ] = None
    return_text: Annotated[Flag | None, Field(description="Whether results have their text. The default is false.")] = (
        None
    )
    truncate: Annotated[
        Flag | None, Field(description="Whether a text that is too long is truncated. The default is false.")
    ] = None
    truncation_direction: Annotated[
        Literal["left", "right", "Left", "Right"] | None,
        Field(description="The side from which `truncate` removes tokens. The default is right."),
    ] = None

    @property
    def truncation(self) -> TruncationFields:
        """The truncation of the texts."""
        if not self.truncate or self.truncate_prompt_tokens is not None:
            return self
        side: Literal["left", "right"] = "left" if self.truncation_direction in ("left", "Left") else "right"
        return TruncationFields(truncate_prompt_tokens=-1, truncation_side=side)
