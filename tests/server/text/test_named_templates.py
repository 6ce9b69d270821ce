"""Chat templates by name, as transformers stores them: `tool_use` renders conversations with tools."""

import datetime
import json
import logging
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tiercel.server.text.chat_template import ChatOptions, ChatTemplate
from tiercel.server.text.template_frames import ChatMessage
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.text.tokenizer import TextCodec, load_text_codec

TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {}}}])
PLAIN, TOOL = "plain {{ messages[-1].content }}", "{{ tools | length }} tools {{ messages[-1].content }}"


def folder_of(tmp_path: Path, model_folder: Path, template: object = None, **files: str) -> TextCodec:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    config = {"bos_token": "<s>"} if template is None else {"bos_token": "<s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = tmp_path / f"{name.replace('__', '/')}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return load_text_codec(tmp_path)


def rendered(codec: TextCodec, *messages: ChatMessage, tools: str = "") -> str:
    assert codec.chat_template is not None
    source = TemplateRenderer(
        codec.chat_template, codec.named_specials, codec.tool_template, today=datetime.datetime.now
    )
    return ChatTemplate.open(source, codec).encode(messages, ChatOptions(tools=tools)).text


NAMED = [
    {"name": "rag", "template": "other"}, {"name": "tool_use", "template": TOOL},
    {"name": "default", "template": PLAIN},
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (NAMED, {}),
        ([*NAMED, {"name": "tool_use"}, {"name": 7}, 7], {}),
        (None, {"chat_template": PLAIN, "additional_chat_templates__tool_use": TOOL}),
        (None, {"chat_template": PLAIN, "chat_template_tool_use": TOOL, "additional_chat_templates__rag": "other"}),
        ("old", {"chat_template": PLAIN, "additional_chat_templates__tool_use": TOOL}),
        ([{"name": "default", "template": PLAIN}], {"additional_chat_templates__tool_use": TOOL}),
    ],
)
def test_the_template_for_tools_is_taken_when_there_are_tools(
    tmp_path: Path, model_folder: Path, template: object, files: dict[str, str]
) -> None:
    codec = folder_of(tmp_path, model_folder, template, **files)
    asked = ChatMessage("user", "hello")
    assert rendered(codec, asked) == "plain hello"
    assert rendered(codec, asked, tools=TOOLS) == "1 tools hello"
    assert codec.template_text is not None and PLAIN in codec.template_text and TOOL in codec.template_text


def test_a_template_for_tools_alone_renders_every_conversation(tmp_path: Path, model_folder: Path) -> None:
    template = TOOL.replace("tools | length", "(tools or []) | length")
    codec = folder_of(tmp_path, model_folder, [{"name": "tool_use", "template": template}])
    asked = ChatMessage("user", "hello")
    assert codec.template_text == template
    assert rendered(codec, asked, tools=TOOLS) == "1 tools hello"
    assert rendered(codec, asked) == "0 tools hello"


def test_transformers_takes_the_same(tmp_path: Path, model_folder: Path) -> None:
    for number, (template, files) in enumerate(
        [
            (NAMED, {}),
            (None, {"chat_template": PLAIN, "additional_chat_templates__tool_use": TOOL}),
            ("old", {"chat_template": PLAIN, "additional_chat_templates__tool_use": TOOL}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        codec = folder_of(folder, model_folder, template, **files)
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
        for tools in ("", TOOLS):
            turns = [{"role": "user", "content": "hello"}]
            expected = reference.apply_chat_template(turns, tools=json.loads(tools or "null"), tokenize=False)
            assert rendered(codec, ChatMessage("user", "hello"), tools=tools) == expected


def test_a_template_alone_renders_everything(tmp_path: Path, model_folder: Path) -> None:
    codec = folder_of(tmp_path, model_folder, PLAIN + "{{ tools }}")
    assert codec.tool_template is None
    assert rendered(codec, ChatMessage("user", "hello"), tools=TOOLS).startswith("plain hello[")


def test_a_prompt_with_two_bos_is_told_once(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codec = folder_of(tmp_path, model_folder, PLAIN)
    bos = codec.token_id("<s>")
    assert bos is not None
    with caplog.at_level(logging.WARNING):
        codec.warn_of_double_bos([[bos], [bos, 5], [], [5, bos, bos]])
        assert not caplog.records
        codec.warn_of_double_bos([[bos, bos, 5]])
        codec.warn_of_double_bos([[bos, bos, 5]])
    (said,) = caplog.records
    assert "BOS twice" in said.getMessage() and "add_special_tokens" in said.getMessage()
