"""The check of grammars: verdicts, the cache, and processes that are killed or too slow."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.processes import wait_gone
from tiercel.server.grammar.checker import GrammarChecker
from tiercel.server.grammar.constraint import (
    Constraint,
    choice_constraint,
    grammar_constraint,
    lark_constraint,
    object_constraint,
    regex_constraint,
    schema_constraint,
)
from tiercel.server.grammar.lark import Tag, any_of, literal, schema_part, special, tagged
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.tenant import DEFAULT_TENANT

VOCAB_SIZE = 1024
OVERLAPPING = {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}
COUNTED = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}


@asynccontextmanager
async def checker(folder: Path, **options: float | str) -> AsyncIterator[GrammarChecker]:
    opened = GrammarChecker(folder / "tokenizer.json", **options)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


def with_checker(folder: Path, test: Callable[[GrammarChecker], Awaitable[None]], **options: float | str) -> None:
    async def run() -> None:
        async with checker(folder, **options) as opened:
            await test(opened)

    asyncio.run(run())


async def refusal_of(opened: GrammarChecker, constraint: Constraint, tenant: TenantId = DEFAULT_TENANT) -> str:
    with pytest.raises(AdmissionError) as refused:
        await opened.checked_grammar(constraint, VOCAB_SIZE, tenant)
    assert (refused.value.status, refused.value.param) == (400, constraint.field.partition(".")[0])
    return refused.value.message


def test_the_first_check_starts_a_process_and_equal_ones_are_cached(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        assert opened.pids == []
        constraint = object_constraint("response_format")
        text = (await opened.checked_grammar(constraint, VOCAB_SIZE)).text
        assert text == constraint.text
        (pid,) = opened.pids
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        held = opened.cached_bytes
        assert (await opened.checked_grammar(object_constraint("guided_json"), VOCAB_SIZE)).text == text
        assert opened.cached_bytes == held > 0

    with_checker(model_folder, test)


def test_parts_of_grammars_are_accepted(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        city = schema_part("tools", schema, is_strict=True).text
        call = " ".join((literal('{"name": "weather", "arguments": '), city, literal("}")))
        text, rules = tagged([Tag("<call>", "<call>\n", call, "</call>"), Tag("<think>", "<think>", literal("no"))])
        special_text, special_rules = tagged([Tag("<think>", "<think>", call, is_special=True)], least=1, most=1)
        for constraint in (
            lark_constraint("tools", any_of([call, literal("none"), special("<think>")])),
            lark_constraint("tools", text, rules),
            lark_constraint("tools", special_text, special_rules),
            choice_constraint("guided_choice", ["yes", 'n"o\\', "\u0000\n", "🙂", "yes"]),
            regex_constraint("regex", r"\d{3}/\d{4}"),
            grammar_constraint("ebnf", 'root ::= "a" [0-9]+ | "b" root'),
        ):
            assert await opened.checked_grammar(constraint, VOCAB_SIZE), constraint

    with_checker(model_folder, test)


def test_grammars_that_no_engine_could_apply_are_refused(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        cases = [
            (schema_constraint("response_format", {"type": "string", "minLength": 3, "pattern": "^a$"}), "exclude"),
            (schema_constraint("response_format", OVERLAPPING), "response_format.items.oneOf: the grammar cannot be"),
            (schema_constraint("response_format", COUNTED), "response_format.minProperties: the grammar cannot be"),
            (regex_constraint("structured_outputs.regex", "(?=a)b"), "look-around"),
            (regex_constraint("structured_outputs.regex", "[^\\s\\S]"), "no output matches it"),
            (grammar_constraint("ebnf", "root ::= x"), "the rule 'x' is not defined"),
            (lark_constraint("tools", special("<nothing>")), "no special token '<nothing>'"),
        ]
        for constraint, words in cases:
            assert words in await refusal_of(opened, constraint)
        lenient = schema_constraint("response_format", {"type": "string", "not": {}}, is_strict=False)
        assert (await opened.checked_grammar(lenient, VOCAB_SIZE)).ignored == ("response_format.not",)
        for schema, name in ((OVERLAPPING, "items.oneOf"), (COUNTED, "minProperties")):
            lenient = schema_constraint("guided_json", schema, is_strict=False)
            assert (await opened.checked_grammar(lenient, VOCAB_SIZE)).ignored == (f"guided_json.{name}",)
        disjoint = schema_constraint("guided_json", {"oneOf": [{"type": "null"}, {"type": "string"}]}, is_strict=False)
        assert (await opened.checked_grammar(disjoint, VOCAB_SIZE)).ignored == ()
        assert len(opened.pids) == 1  # none of them costs a process

    with_checker(model_folder, test)


def test_a_check_that_takes_too_long_costs_its_own_request(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        await opened.checked_grammar(object_constraint("json"), VOCAB_SIZE)
        for pid in opened.pids:
            os.kill(pid, signal.SIGSTOP)  # as if it computed for ever
        message = await refusal_of(opened, regex_constraint("regex", "a"))
        assert "could not be compiled within 0.2 s" in message
        assert await opened.checked_grammar(regex_constraint("regex", "a"), VOCAB_SIZE)  # not kept

    with_checker(model_folder, test, limit_s=0.2)


def test_a_check_that_kills_its_process_is_refused(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        message = await refusal_of(opened, regex_constraint("regex", "b"))
        assert "the process that tried it ended" in message

    with_checker(model_folder, test, module="tests.server.workers.dying")


def test_a_check_whose_process_is_killed_is_tried_again(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        await opened.checked_grammar(object_constraint("json"), VOCAB_SIZE)
        (pid,) = opened.pids
        os.kill(pid, signal.SIGSTOP)  # as if it computed
        check = asyncio.create_task(opened.checked_grammar(regex_constraint("regex", "b"), VOCAB_SIZE))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        assert (await check).text

    with_checker(model_folder, test)


def test_equal_grammars_that_arrive_together_are_checked_once(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        constraint = object_constraint("json")
        first = asyncio.create_task(opened.checked_grammar(constraint, VOCAB_SIZE))
        others = [asyncio.create_task(opened.checked_grammar(constraint, VOCAB_SIZE)) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()  # the client of the first one has gone
        assert {checked.text for checked in await asyncio.gather(*others)} == {constraint.text}
        assert len(opened.pids) == 1

    with_checker(model_folder, test)


def test_a_check_that_nobody_waits_for_is_left_out(model_folder: Path) -> None:
    """So that the grammars of clients that have gone hold up no others."""

    async def test(opened: GrammarChecker) -> None:
        started = [opened.checked_grammar(regex_constraint("x", one), VOCAB_SIZE, TenantId(one)) for one in "ab"]
        kept = sum(512 + 4 * len(checked.text) for checked in await asyncio.gather(*started))
        assert len(opened.pids) == 2
        for pid in opened.pids:
            os.kill(pid, signal.SIGSTOP)  # as if both computed for ever
        first = [asyncio.create_task(refusal_of(opened, regex_constraint("x", one), TenantId(one))) for one in "cd"]
        await asyncio.sleep(0.1)
        left = asyncio.create_task(opened.checked_grammar(regex_constraint("x", "left"), VOCAB_SIZE))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asyncio.gather(*first)
        for number in range(3):
            kept += 512 + 4 * len((await opened.checked_grammar(regex_constraint("x", f"{number}"), VOCAB_SIZE)).text)
        assert opened.cached_bytes == kept

    with_checker(model_folder, test, limit_s=0.5)


def test_slow_grammars_of_one_tenant_hold_up_no_other(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        await opened.checked_grammar(object_constraint("json"), VOCAB_SIZE)
        (slow_pid,) = opened.pids
        os.kill(slow_pid, signal.SIGSTOP)  # as if it computed for ever
        slow = [asyncio.create_task(refusal_of(opened, regex_constraint("x", one))) for one in "abcdef"]
        await asyncio.sleep(0.05)
        assert await opened.checked_grammar(regex_constraint("x", "quick"), VOCAB_SIZE, TenantId("other"))
        assert len(opened.pids) == 2
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    with_checker(model_folder, test, limit_s=20.0)


def test_a_tokenizer_without_bytes_refuses_every_grammar(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    async def test(opened: GrammarChecker) -> None:
        assert "tokens of this model" in await refusal_of(opened, object_constraint("json"))

    with_checker(tmp_path, test)


def test_a_verdict_is_known_to_the_tenant_and_scope_that_paid_for_it_only(model_folder: Path) -> None:
    """So that the time of a request does not tell whether another tenant used the same schema."""

    async def test(opened: GrammarChecker) -> None:
        constraint = object_constraint("response_format")
        alice, bob = TenantId("alice"), TenantId("bob")
        owners = [(alice, b"a"), (bob, b"b"), (alice, b"a, of a salt"), (bob, b"a")]  # the last two: a group's scope
        for number, (tenant, scope) in enumerate(owners, start=1):
            for _ in range(2):
                await opened.checked_grammar(constraint, VOCAB_SIZE, tenant, scope)
                assert opened.num_checks == number
        together = [opened.checked_grammar(regex_constraint("x", "a"), VOCAB_SIZE, one) for one in (alice, bob, alice)]
        await asyncio.gather(*together)
        assert opened.num_checks == len(owners) + 2
        refused = regex_constraint("x", "[")
        for tenant in (alice, bob, alice):
            await refusal_of(opened, refused, tenant)
        assert opened.num_checks == len(owners) + 4

    with_checker(model_folder, test)


def test_a_thousand_grammars_of_one_tenant_leave_those_of_another(model_folder: Path) -> None:
    async def test(opened: GrammarChecker) -> None:
        quiet, busy = TenantId("quiet"), TenantId("busy")
        for number in range(4):
            await opened.checked_grammar(regex_constraint("x", f"q{number}"), VOCAB_SIZE, quiet)
        for number in range(40):
            await opened.checked_grammar(regex_constraint("x", f"b{number}"), VOCAB_SIZE, busy)
        before = opened.num_checks
        for number in range(4):
            await opened.checked_grammar(regex_constraint("x", f"q{number}"), VOCAB_SIZE, quiet)
        assert opened.num_checks == before
        assert opened.cached_bytes <= 8_000

    with_checker(model_folder, test, cache_bytes=8_000)


@pytest.mark.slow
def test_the_time_of_a_check_does_not_tell_what_another_tenant_has_used(model_folder: Path) -> None:
    """The first use of another tenant's grammars, against grammars that nobody has used, in 20 interleaved pairs."""
    alice, bob = TenantId("alice"), TenantId("bob")

    def heavy(number: int) -> Constraint:
        names = {f"p{number}x{one}": {"type": "string", "pattern": "^([a-z]{1,20}-){1,9}[0-9]$"} for one in range(30)}
        return schema_constraint("guided_json", {"type": "object", "properties": names, "additionalProperties": False})

    async def test(opened: GrammarChecker) -> None:
        async def time_s(number: int, tenant: TenantId) -> float:
            constraint, start_s = heavy(number), time.perf_counter()
            await opened.checked_grammar(constraint, VOCAB_SIZE, tenant)
            return time.perf_counter() - start_s

        for number in range(20):
            await time_s(number, alice)
        used: list[float] = []
        new: list[float] = []
        for number in range(20):
            used.append(await time_s(number, bob))
            new.append(await time_s(1000 + number, bob))
        assert statistics.median(new) - statistics.median(used) <= max(new) - min(new)
        assert statistics.median([await time_s(number, bob) for number in range(20)]) < min(new)  # a hit would show

    with_checker(model_folder, test, limit_s=20.0)
