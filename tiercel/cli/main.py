"""The `tiercel` command: one file per verb. Every expected failure is one line and an exit code.

0 = success; 1 = failure while running; 2 = a flag, a variable, the settings file or the model folder is wrong. If the
reader of standard output has ended, as that of `tiercel --help | head -1`, the code is 1 without a line.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from tiercel import __version__
from tiercel.cli.arguments import translate
from tiercel.cli.bench import bench_app, bench_words
from tiercel.cli.calibrate import calibrate
from tiercel.cli.chat import chat
from tiercel.cli.check import check
from tiercel.cli.collect_env import collect_env
from tiercel.cli.config import config_app
from tiercel.cli.console import fail, warn
from tiercel.cli.drain import drain
from tiercel.cli.engine import ENGINE_FLAGS, engine
from tiercel.cli.flags import COMMON, Run, help_listing, make_command, with_settings
from tiercel.cli.kv import kv_app
from tiercel.cli.plan import plan_command
from tiercel.cli.repeated_flags import refuse, watch_repeats
from tiercel.cli.run_batch import RUN_BATCH_FLAGS, run_batch
from tiercel.cli.serve import serve
from tiercel.cli.simulate import simulate_command
from tiercel.cli.tenants import tenants_app
from tiercel.system.process_limits import blame, show_memory_limits
from tiercel.system.standard_streams import drop_output, output_stream, prepare_streams
from tiercel.values.errors import ConfigError, OutputError, TiercelError

_FLAGGED = ("serve", "engine", "check", "calibrate", "show", "throughput", "latency", "run-batch")
_NESTED = (["config", "show"], ["bench", "throughput"], ["bench", "latency"])  # verbs of two words
_SWITCHES = ("--json", "--changed")  # of `config show`, beside the flags of `serve`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    prepare_streams()
    try:
        code = _run(words)
        output_stream().flush()
        return code
    except ConfigError as exc:
        fail(exc.message)
        return 2
    except typer.TyperException as exc:
        verb = _verb(words)
        fail(f"{exc.format_message()} (see {' '.join(['tiercel', *(verb if verb[-1] in _FLAGGED else []), '--help'])})")
        return exc.exit_code
    except OutputError as exc:
        drop_output()
        if exc.message:
            fail(exc.message)
        return 1
    except TiercelError as exc:
        fail(str(exc))
        return 1
    except OSError as exc:
        fail(f"{exc.filename or words[0]}: {blame(exc)}")
        return 1
    except (MemoryError, ImportError, RuntimeError) as exc:  # of a module that cannot be mapped, of a thread
        if not show_memory_limits():
            raise
        fail(blame(exc))
        return 1
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    listing = COMMON
    warnings: list[str] = []
    if words[0] == "bench":
        words = ["bench", *bench_words(words[1:], warnings)]
    verb = _verb(words)
    if verb[-1] in _FLAGGED:
        own = [word for word in words[1:] if word in _SWITCHES and verb[-1] == "show"]
        plain, listing = help_listing([word for word in words[len(verb) :] if word not in own])
        words = [*verb, *own, *translate(plain, warnings)]
    for line in warnings:
        warn(line)
    command = get_command(build_app(listing, words[0]))
    # Launchers append flags of vLLM to those that they have, as the entry point of the image does: the last one counts.
    is_last_used = verb[-1] in _FLAGGED or verb[0] == "bench"
    watch_repeats(command, (lambda line: warn(f"{line}: the last one is used")) if is_last_used else refuse)
    outcome = command.main(args=words, prog_name="tiercel", standalone_mode=False)
    return outcome if isinstance(outcome, int) else 0


def _verb(words: list[str]) -> list[str]:
    """Return the one or two words that name the verb."""
    return words[:2] if words[:2] in _NESTED else words[:1]


def build_app(listing: str, verb: str | None = None) -> typer.Typer:
    """Return the program with all verbs. With `verb`, the others have no flags of settings, which saves time."""

    def add(run: Run, own: Sequence[inspect.Parameter] = ()) -> None:
        name = run.__name__.replace("_", "-")
        app.command(name)(with_settings(run, listing, own=own) if verb in (None, name) else make_command(run, ()))

    app = typer.Typer(
        help="Serve language models to many tenants over the OpenAI API.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    add(serve)
    add(engine, ENGINE_FLAGS)
    add(check)
    add(calibrate)
    add(run_batch, RUN_BATCH_FLAGS)
    app.command()(chat)
    app.command()(drain)
    app.command()(collect_env)
    app.command()(plan_command())
    app.command()(simulate_command())
    app.add_typer(config_app(listing, has_flags=verb in (None, "config")), name="config")
    app.add_typer(tenants_app(), name="tenants")
    app.add_typer(bench_app(listing, has_flags=verb in (None, "bench")), name="bench")
    app.add_typer(kv_app(), name="kv")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tiercel {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Serve language models to many tenants over the OpenAI API."""
