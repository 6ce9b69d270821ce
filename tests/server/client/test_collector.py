"""The mailbox of a sequence's tokens."""

import asyncio

from tiercel.server.client.collector import Mailbox, StreamEnd, portion_tokens
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, TokenLogprobs


def test_a_slow_reader_gets_all_tokens_in_one_delivery() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        for token in range(100):
            mailbox.put_token(token % 2, token)
        mailbox.put_finished(1, _finished())
        news = await mailbox.take()
        assert isinstance(news, tuple)
        assert [(delivery.choice, len(delivery.tokens)) for delivery in news] == [(0, 50), (1, 50)]
        assert news[1].finished is not None

    asyncio.run(test())


def test_a_mailbox_overflows_at_its_limit_and_not_before() -> None:
    mailbox = Mailbox(limit_bytes=400)
    with mailbox.sending():
        for token in range(100):
            mailbox.put_token(0, token)
        assert not mailbox.overflow.is_set()
        mailbox.put_logprobs(0, TokenLogprobs(SeqId(1), 1, -1.0, 1, (1,), (-1.0,)))
        assert mailbox.overflow.is_set()


def test_a_mailbox_does_not_overflow_while_nothing_is_being_sent() -> None:
    async def test() -> None:
        mailbox = Mailbox(limit_bytes=400)
        for token in range(1000):
            mailbox.put_token(0, token)
        await mailbox.take()
        with mailbox.sending():
            mailbox.put_token(0, 1)
        assert not mailbox.overflow.is_set()

    asyncio.run(test())


def test_reading_empties_a_mailbox() -> None:
    async def test() -> None:
        mailbox = Mailbox(limit_bytes=400)
        for _ in range(10):
            with mailbox.sending():
                for token in range(90):
                    mailbox.put_token(0, token)
            await mailbox.take()
        assert not mailbox.overflow.is_set()

    asyncio.run(test())


def test_a_wake_calls_the_reader_and_otherwise_the_waiting_task() -> None:
    async def test() -> None:
        mailbox, calls = Mailbox(), list[str]()
        with mailbox.read_by(lambda: calls.append("read")):
            mailbox.put_token(0, 5)
            assert calls == []
            mailbox.wake()
        assert calls == ["read"]
        mailbox.wake()
        assert len(await mailbox.take()) == 1  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        mailbox.wake()  # without anything to read
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.put_token(0, 6)
        mailbox.wake()
        assert len(await waiting) == 1  # type: ignore[arg-type]

    asyncio.run(test())


def test_a_sink_is_offered_every_token_but_the_last_and_none_behind_an_unread_one() -> None:
    mailbox, taken = Mailbox(), list[int]()

    def sink(token: int) -> bool:
        taken.append(token)
        return token != 7

    with mailbox.read_by(lambda: None):
        mailbox.sink = sink
        assert not mailbox.put_token(0, 6)
        assert mailbox.put_token(0, 7)  # not taken
        assert mailbox.put_token(0, 8)
        unread = mailbox.read()
        assert isinstance(unread, tuple)
        assert list(unread[0].tokens) == [7, 8]
        assert mailbox.put_token(0, 9, is_last=True)
        assert taken == [6, 7]
    assert mailbox.sink is None


def _finished() -> Finished:
    return Finished(seq=SeqId(1), reason=FinishReason.LENGTH, num_prompt=1, num_outputs=1, num_cached=0)


def test_a_portion_has_a_limited_number_of_tokens_and_nothing_is_lost() -> None:
    mailbox = Mailbox(portion=7)
    for token in range(60):
        choice = token % 3
        mailbox.put_token(choice, token)
        mailbox.put_logprobs(choice, TokenLogprobs(SeqId(1), token, -0.5, 1, (1, 2), (-1.0, -2.0)))
    mailbox.put_finished(1, _finished())
    mailbox.put_end(StreamEnd("over", "over"))
    tokens: dict[int, list[int]] = {}
    ended: list[int] = []
    while isinstance(portion := mailbox.read(), tuple):
        assert 1 <= sum(len(delivery.tokens) for delivery in portion) <= 7
        for delivery in portion:
            assert delivery.choice not in ended
            assert len(delivery.logprobs) == len(delivery.tokens)
            tokens.setdefault(delivery.choice, []).extend(delivery.tokens)
            if delivery.finished is not None:
                ended.append(delivery.choice)
    assert tokens == {choice: list(range(choice, 60, 3)) for choice in range(3)}
    assert (ended, mailbox.unread_bytes) == ([1], 0)


def test_the_end_of_a_choice_comes_with_its_last_token() -> None:
    """A stop token is hidden by whoever reads both."""
    mailbox = Mailbox(portion=5)
    for token in range(10):
        mailbox.put_token(0, token)
    mailbox.put_finished(0, _finished())
    first, second = mailbox.read(), mailbox.read()
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert [(len(one[0].tokens), one[0].finished is not None) for one in (first, second)] == [(5, False), (5, True)]


def test_portions_are_smaller_with_more_log_probabilities() -> None:
    assert portion_tokens(None) > portion_tokens(0) > portion_tokens(20) >= 8
    assert portion_tokens(10_000) == 1
