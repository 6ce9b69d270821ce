"""LangChain's standard tests of chat models with ChatOpenAI; run by pytest in the environment `langchain`."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    """The standard tests. `supports_` flags are those of a model that reads text.

    Off, because the server reads no images, audio or PDF: supports_image_inputs, supports_image_urls,
    supports_image_tool_message, supports_pdf_inputs, supports_pdf_tool_message, supports_audio_inputs. Off, because
    they are of other APIs or of recorded traffic: supports_anthropic_inputs, enable_vcr_tests.
    """

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["TOUR_MODEL"],
            "base_url": f"{os.environ['TOUR_URL']}/v1",
            "api_key": os.environ["TOUR_KEY"],
            "stream_usage": True,
            "max_tokens": 200,
        }

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return os.environ["TOUR_OTHER_NAME"]

    @property
    def supports_model_override(self) -> bool:
        return True


class TestStructuredByFunction(TestChatOpenAI):
    """The tests of structured output by a function that the model must call, instead of a JSON schema."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
