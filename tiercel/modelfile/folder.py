"""Unfold a GGUF file: the small files of a Hugging Face folder, written once, beside a link to the file."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.fields import MetadataFields
from tiercel.modelfile.header import read_header
from tiercel.modelfile.model_config import model_config
from tiercel.modelfile.tokenizer import read_tokenizer

SUFFIX = ".gguf"
"""The ending of the names of such files."""

LINKED_NAME = "model.gguf"
"""The name of the link to the file in the folder."""

_VERSION = 1  # of what is written; another one makes another folder


def unfold_model(path: Path, cache: Path) -> Path:
    """Return the folder of a file below `cache`, made if it is not there: configuration, tokenizer and a link.

    A file that has changed since gets another folder.

    Cost:   a second for a vocabulary of 150,000 tokens, once.
    Errors: ModelFileError naming the file, and the key or tensor that is not supported, or the folder that cannot be
            written.
    """
    path = path.absolute()
    folder = cache / _folder_name(path)
    if not (folder / LINKED_NAME).is_symlink():
        _write(folder, path, _contents(path))
    return folder


def check_unfolded(folder: Path) -> None:
    """Refuse a folder whose file has changed since it was made: its configuration may be that of another model.

    Errors: ModelFileError, also if the folder was not made by `unfold_model`.
    """
    linked = folder / LINKED_NAME
    path = linked.readlink() if linked.is_symlink() else linked
    if folder.name != _folder_name(path):
        reason = "is not the file that this folder was made of, or has changed since; serve the file itself"
        raise ModelFileError("model.changed", f"{path}: {reason}")


def _folder_name(path: Path) -> str:
    """Return the name of a file's folder: it changes with the place, the size and the time of the file."""
    try:
        status = path.stat()
    except OSError as exc:
        raise ModelFileError("model.unreadable", f"{path}: cannot be read: {exc.strerror}") from exc
    facts = f"{_VERSION} {path} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _contents(path: Path) -> Mapping[str, object]:
    """Return the object of each JSON file."""
    file = read_header(path)
    fields = MetadataFields(file)
    config, tokenizer = model_config(file), read_tokenizer(fields)
    ends = {"eos_token_id": list(tokenizer.ends)} if tokenizer.ends else {}
    start = {} if tokenizer.start is None else {"bos_token_id": tokenizer.start}
    return {
        "config.json": config | start | ends,
        "generation_config.json": start | ends,
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
    }


def _write(folder: Path, path: Path, contents: Mapping[str, object]) -> None:
    """Write beside the folder, then rename: a folder is whole, or it is not there."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            for name, content in contents.items():
                (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            (made / LINKED_NAME).symlink_to(path)
            _rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as exc:
        shown = f"the files of {path} cannot be written: {exc.strerror}; set XDG_CACHE_HOME to a folder for them"
        raise ModelFileError("model.cache", f"{folder.parent}: {shown}") from exc


def _rename(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not (folder / LINKED_NAME).is_symlink():  # else another process was faster
            raise
