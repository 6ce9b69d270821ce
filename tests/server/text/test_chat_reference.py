"""Rendering compared with that of transformers, which is loaded by tests only."""

import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tiercel.server.text.chat_template import ChatOptions, ChatTemplate
from tiercel.server.text.template_frames import ChatMessage
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.text.tokenizer import TextCodec, load_text_codec

CHATS = [
    [("user", "hello world")],
    [
        ("system", "Be brief."),
        ("user", "  naïve 🙂 \n"),
        ("assistant", "one\n\n two"),
        ("user", "def f():\n\treturn 1"),
    ],
    [("user", "covid19 is     a word"), ("assistant", ""), ("user", "<|im_ think>")],
]
MODELS = {"tiny": None, "embedded": Path(__file__).parents[3] / "tiercel" / "embedded" / "model"}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, model_folder: Path) -> Path:
    return MODELS[request.param] or model_folder


def _ours(codec: TextCodec) -> ChatTemplate:
    assert codec.chat_template is not None
    renderer = TemplateRenderer(codec.chat_template, codec.named_specials, today=datetime.datetime.now)
    return ChatTemplate.open(renderer, codec)


@pytest.mark.parametrize("index", range(len(CHATS)))
@pytest.mark.parametrize("continues", [False, True])
def test_token_ids_equal_those_of_transformers(folder: Path, index: int, continues: bool) -> None:
    codec = load_text_codec(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **codec.named_specials)
    chat = CHATS[index]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat],
        chat_template=codec.chat_template,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tokenize=True,
        return_dict=False,
    )
    options = ChatOptions(add_generation_prompt=not continues, continue_final_message=continues)
    prompt = _ours(codec).encode([ChatMessage(role, content) for role, content in chat], options)
    assert prompt.tokens == expected
