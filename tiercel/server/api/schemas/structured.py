"""The fields that constrain an output, in the spellings of OpenAI, vLLM and SGLang."""

from typing import Annotated, Literal

from msgspec import Struct
from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation

from tiercel.server.api.schemas.fields import Fields, Flag
from tiercel.server.grammar.constraint import MAX_GRAMMAR_LETTERS, MAX_REGEX_LETTERS

# Their values are checked by `structured`, which knows the limits: a union would be described by all its branches.
SchemaOrText = Annotated[
    SkipValidation[str | dict[str, object]] | None, Field(description="A JSON schema, as an object or as JSON text.")
]
Choices = Annotated[SkipValidation[list[str]] | None, Field(description="The output is one of these texts.")]
# Lengths that the document shows are checked by `structured`, too.
Pattern = Annotated[
    Annotated[str, Field(json_schema_extra={"maxLength": MAX_REGEX_LETTERS})] | None,
    Field(description="A regular expression, in the syntax of Rust's regex, that matches the whole output."),
]
GrammarText = Annotated[
    Annotated[str, Field(json_schema_extra={"maxLength": MAX_GRAMMAR_LETTERS})] | None,
    Field(description="A grammar of the output, in Lark's syntax or GBNF."),
]
Whitespace = Annotated[
    str | None, Field(description="A regular expression for white space between two tokens of a JSON output.")
]


class SchemaPaths(Struct, frozen=True):
    """The places of schemas in a body, for errors and for the header that names what does not act."""

    response_format: str = "response_format.json_schema.schema"
    parameters: str = "tools.{}.function.parameters"  # of the tool with this number


CHAT_PATHS = SchemaPaths()


class JsonSchemaFormat(Fields):
    """The schema of a `response_format`."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    strict: Annotated[
        Flag | None,
        Field(description="Refuse a schema with keywords that cannot be enforced, instead of ignoring the keywords."),
    ] = None


class ResponseFormat(Fields):
    """The form of the output. JSON should also be asked for in the messages: the model is not told the form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields):
    """The constraint of an output, as vLLM spells it: exactly one of json, json_object, regex, choice and grammar."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_: Annotated[SchemaOrText, Field(alias="json")] = None
    json_object: Flag | None = None
    regex: Pattern = None
    choice: Choices = None
    grammar: GrammarText = None
    whitespace_pattern: Whitespace = None
    disable_any_whitespace: Flag | None = None
    disable_fallback: Annotated[Flag | None, Field(description="Ignored: there is one compiler of grammars.")] = None


class StructuredFields(Fields):
    """The fields that constrain an output. At most one of them may name a constraint."""

    _schema_paths: SchemaPaths = PrivateAttr(default=CHAT_PATHS)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: Pattern = None
    guided_choice: Choices = None
    guided_grammar: GrammarText = None
    guided_whitespace_pattern: Whitespace = None
    guided_decoding_backend: Annotated[
        SkipValidation[object], Field(description="Ignored: there is one compiler of grammars.")
    ] = None
    regex: Pattern = None
    json_schema: SchemaOrText = None
    ebnf: GrammarText = None

    @property
    def may_constrain(self) -> bool:
        """Whether a field is set from which a grammar may have to be made."""
        named = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice)
        others = (self.guided_grammar, self.regex, self.json_schema, self.ebnf)
        return any(field is not None for field in (*named, *others))

    @property
    def schema_paths(self) -> SchemaPaths:
        """The places of schemas in the body, in the words of its API."""
        return self._schema_paths

    def name_schemas(self, paths: SchemaPaths) -> None:
        """Note that the body came in by another API, which has its schemas elsewhere."""
        self._schema_paths = paths
