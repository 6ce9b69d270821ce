"""`tiercel engine`: what is missing or wrong is named before anything is started."""

from pathlib import Path

import pytest

from tiercel.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--listen is missing"),
        (["--listen", "8100"], "--listen 8100: expected HOST:PORT"),
        (["--listen", "127.0.0.1:0"], "--engine-secret-file is missing"),
        (
            ["--listen", "127.0.0.1:0", "--engine-secret-file", "absent"],
            "--engine-secret-file absent: there is no such",
        ),
        (["--listen", "0.0.0.0:0", "--engine-secret-file", "SECRET"], "--listen 0.0.0.0 can be reached from other"),
        (["--listen", "127.0.0.1:0", "--engine-certfile", "SECRET"], "--engine-keyfile is missing"),
        (
            ["--listen", "127.0.0.1:0", "--engine-secret-file", "SECRET", "--engines", "static:127.0.0.1:1"],
            "--engines has no effect on an engine",
        ),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    assert main(["engine", *(str(secret) if word == "SECRET" else word for word in words)]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "static:127.0.0.1:1"], "--engines needs --engine-secret-file"),
        (["--engines", "static:10.0.0.1:1", "--engine-secret-file", "SECRET"], "10.0.0.1:1 is on another machine"),
        (["--engines", "dns:engines", "--engine-secret-file", "SECRET"], "engines:8100 is on another machine"),
        (
            ["--engines", "static:127.0.0.1:1", "--engine-secret-file", "SECRET", "--takeover"],
            "--takeover beside --engines",
        ),
        (["--engines", "nowhere"], "--engines nowhere: expected static:HOST:PORT"),
    ],
)
def test_wrong_flags_of_a_front_are_named(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    assert main(["serve", *(str(secret) if word == "SECRET" else word for word in words)]) == 2
    assert message in capfd.readouterr().err
