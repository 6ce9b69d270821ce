"""A small model folder (tokenizer only) for tests of the HTTP process."""

import json
from pathlib import Path

import pytest

from tests.server.builders import build_byte_level, build_sentencepiece
from tests.server.harness import TEMPLATE
from tiercel.server.text.tokenizer import TextCodec, load_text_codec


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_byte_level().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    return load_text_codec(model_folder)


@pytest.fixture(scope="session")
def sentencepiece_codec() -> TextCodec:
    return TextCodec(build_sentencepiece().to_str(), {}, None)
