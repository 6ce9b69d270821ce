"""The settings of answers: templates, sampling defaults, log-probabilities, streams. See `settings.py`."""

from typing import Annotated, Literal

from tiercel.settings.control import ControlSettings
from tiercel.settings.groups import ANSWERS
from tiercel.settings.option import Option
from tiercel.settings.readers import OVERRIDABLE, read_sampling
from tiercel.values.request import MAX_LOOKUP_TOKENS


class AnswerSettings(ControlSettings, frozen=True, kw_only=True):
    """The templates, sampling defaults and limits of answers, and how streams are sent."""

    chat_template: Annotated[
        str | None, Option(ANSWERS, "Chat template, as a file or as text; default: the model's.", "FILE", is_rare=True)
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "json"],
        Option(
            ANSWERS,
            "Format of the model's tool calls; auto = the chat template's, none = no calls.",
            "FORMAT",
            is_rare=True,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "qwen3", "deepseek_r1"],
        Option(
            ANSWERS,
            "Format of the model's thoughts; auto = <think> if the chat template removes it, none = they are content.",
            "FORMAT",
            is_rare=True,
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Option(
            ANSWERS,
            "Source of the sampling defaults: auto (the model's), vllm, tiercel or a folder.",
            "SOURCE",
            is_rare=True,
        ),
    ] = "auto"  # vllm and tiercel mean neutral defaults
    override_generation_config: Annotated[
        dict[str, float],
        Option(
            ANSWERS,
            "Sampling defaults that override the model's.",
            "JSON",
            read=read_sampling,
            expects=f"a JSON object of numbers with keys from {', '.join(OVERRIDABLE)}",
            is_rare=True,
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it
    max_logprobs: Annotated[
        int,
        Option(
            ANSWERS,
            "Maximum log-probabilities per token; -1: the whole vocabulary.",
            "N",
            is_rare=True,
            within=(-1, 1_048_576),
            is_live=True,
        ),
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool,
        Option(
            ANSWERS, "Write tokens in log-probabilities as token_id:N for every request.", is_rare=True, is_live=True
        ),
    ] = False  # a request may ask for it with the field of this name
    prompt_lookup_num_tokens: Annotated[
        int,
        Option(
            ANSWERS,
            "Tokens proposed at once from earlier text of a sequence, if a request does not say; 0: none.",
            "TOKENS",
            is_rare=True,
            within=(0, MAX_LOOKUP_TOKENS),
            is_live=True,
        ),
    ] = 0
    tokenizer_info_endpoint: Annotated[bool, Option(ANSWERS, "Serve /tokenizer_info.", is_rare=True)] = False
    pooling: Annotated[
        Literal["auto", "last", "mean"],
        Option(ANSWERS, "Pooling of embeddings; auto: the model's, else last.", "HOW", is_rare=True),
    ] = "auto"
    stream_interval: Annotated[
        int, Option(ANSWERS, "Tokens per chunk of a stream.", "TOKENS", is_rare=True, within=(1, 65_536), is_live=True)
    ] = 1  # the first chunk has one token
    enable_force_include_usage: Annotated[
        bool, Option(ANSWERS, "Report usage on every event of every stream.", is_rare=True, is_live=True)
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Option(ANSWERS, "Report cached tokens in the usage.", is_rare=True, is_live=True)
    ] = True
