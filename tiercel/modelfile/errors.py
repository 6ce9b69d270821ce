"""The error of a file that cannot be served."""


class ModelFileError(Exception):
    """A file is broken or not supported. `code` is the kind of defect; the text names the file and the place."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
