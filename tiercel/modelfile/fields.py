"""Typed access to the metadata of a GGUF file."""

import math
from collections.abc import Collection

from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.header import ModelFile

_MAX_COUNT = 2**31 - 1


class MetadataFields:
    """The metadata of a file. Errors name the file and the key."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file

    def wrong(self, key: str, reason: str) -> ModelFileError:
        """Return the error of a key whose value is wrong or not supported."""
        return ModelFileError("model.field_wrong", f"{self._file.path}: metadata {key:.200}: {reason}")

    def has(self, key: str) -> bool:
        """Return whether the file has this key."""
        return key in self._file.metadata

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Errors: ModelFileError; without a default also if the key is missing."""
        value = self._file.metadata.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self.wrong(key, f"must be a string, not {value!r:.80}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = _MAX_COUNT) -> int:
        """Return a number from `least` to `most`; a list of equal numbers counts as one. Errors: ModelFileError."""
        value = self._file.metadata.get(key, default)
        if value is None:
            raise self._missing(key)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, tuple):
            raise self.wrong(key, "layers that differ in it are not supported")
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"must be from {least} to {most:,}, not {value!r:.80}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0. Errors: ModelFileError."""
        value = self._file.metadata.get(key, default)
        if value is None:
            raise self._missing(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, f"must be a number above 0, not {value!r:.80}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. Errors: ModelFileError."""
        value = self._file.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r:.80}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings. Errors: ModelFileError, also if the key is missing."""
        value = self._file.metadata.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
            raise self.wrong(key, "must be a list of strings with entries")
        return tuple(str(one) for one in value)

    def numbers(self, key: str, count: int) -> tuple[float, ...] | None:
        """Return a list of `count` finite numbers; None if the key is missing. Errors: ModelFileError."""
        value = self._file.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != count:
            raise self.wrong(key, f"must be a list of {count:,} numbers, one for each token")
        numbers = tuple(float(one) for one in value if not isinstance(one, str))
        if len(numbers) != count or not all(map(math.isfinite, numbers)):
            raise self.wrong(key, "must be a list of finite numbers")
        return numbers

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return one of several words. Errors: ModelFileError that lists them."""
        value = self.text(key, default)
        if value not in allowed:
            raise self.wrong(key, f"{value:.80} is not supported; known: {', '.join(allowed)}")
        return value

    def _missing(self, key: str) -> ModelFileError:
        return ModelFileError("model.field_missing", f"{self._file.path}: metadata {key} is missing")
