"""Loading of tokenizers."""

import json
from pathlib import Path

import pytest

from tiercel.server.text.tokenizer import TextCodec, load_text_codec
from tiercel.values.errors import ConfigError


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        load_text_codec(tmp_path)


@pytest.mark.parametrize("broken", ["{", "{}", '{"version": "1.0"}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        load_text_codec(tmp_path)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_text_codec(tmp_path)


def test_the_template_comes_from_a_file_a_list_or_the_operator(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    assert load_text_codec(tmp_path).chat_template is None
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_text_codec(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_text_codec(tmp_path).chat_template == "J"
    (tmp_path / "mine.jinja").write_text("M")
    assert load_text_codec(tmp_path, str(tmp_path / "mine.jinja")).chat_template == "M"
    assert load_text_codec(tmp_path, "{{ messages }}").chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"absent\.jinja"):
        load_text_codec(tmp_path, str(tmp_path / "absent.jinja"))


def test_special_tokens_are_read_or_kept_as_text(codec: TextCodec) -> None:
    assert len(codec.encode("<|im_end|>", add_special_tokens=False)) == 1
    plain = codec.without({"<|im_end|>"}).encode("<|im_end|>")
    assert len(plain) > 1
    assert codec.decode(plain) == "<|im_end|>"


def test_added_tokens_may_be_marks_unless_they_are_words_or_white_space(codec: TextCodec) -> None:
    assert set(codec.vocabulary.added_marks.values()) == {400, 401}
    assert codec.vocabulary.specials == {0, 1, 2, 3}


def test_plain_text_keeps_added_words_under_their_own_ids(codec: TextCodec) -> None:
    text = "<think>covid19     "
    plain = codec.without({"<think>"}).encode(text)
    assert plain[-2:] == [402, 403]
    assert 400 not in plain
    assert codec.decode(plain) == text


def test_a_prompt_gets_a_bos_token_with_add_special_tokens(codec: TextCodec) -> None:
    with_bos = codec.encode("hello", add_special_tokens=True)
    assert with_bos[1:] == codec.encode("hello", add_special_tokens=False)
    assert codec.token_name(with_bos[0]) == "<s>"


def test_named_special_tokens_may_be_texts_or_objects(model_folder: Path) -> None:
    text = (model_folder / "tokenizer.json").read_text()
    codec = TextCodec(text, {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}, None)
    assert codec.named_specials == {"bos_token": "<s>", "eos_token": "</s>"}


def test_files_of_a_model_may_begin_with_a_byte_order_mark(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (model_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    codec = load_text_codec(tmp_path)
    assert codec.vocabulary.size == load_text_codec(model_folder).vocabulary.size
    assert codec.chat_template == "{{ messages[0].content }}"
