"""Detection of stop strings."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.server.text.stop import StopScanner

letters = st.text("ab🙂", max_size=20)
stops = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4)


def _scan(stop_texts: list[str], chunks: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    scanner = StopScanner(stop_texts, include_stop=include)
    shown: list[str] = []
    for chunk in chunks:
        step = scanner.feed(chunk)
        shown.append(step.text)
        if step.found is not None:
            return "".join(shown), step.found, shown
    shown.append(scanner.flush())
    return "".join(shown), None, shown


def _reference(stop_texts: list[str], text: str) -> tuple[str, str | None]:
    """Return the first position at which the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stop_texts if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops, st.lists(letters, max_size=8))
@settings(max_examples=300)
def test_the_result_does_not_depend_on_the_cuts_between_chunks(stop_texts: list[str], chunks: list[str]) -> None:
    text, found, _ = _scan(stop_texts, chunks)
    assert (text, found) == _reference(stop_texts, "".join(chunks))


@given(stops, letters)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(stop_texts: list[str], text: str) -> None:
    scanner = StopScanner(stop_texts, include_stop=False)
    step = scanner.feed(text)
    if step.found is None:
        held = text[len(step.text) :]
        assert held == "" or any(stop.startswith(held) for stop in stop_texts)


def test_a_stop_string_over_three_chunks_is_found() -> None:
    assert _scan(["<end>"], ["text<e", "n", "d>more"])[:2] == ("text", "<end>")


def test_include_stop_keeps_the_stop_string_in_the_text() -> None:
    assert _scan(["END"], ["one EN", "D two"], include=True)[:2] == ("one END", "END")


def test_a_beginning_that_does_not_become_a_stop_string_is_returned() -> None:
    assert _scan(["abc"], ["ab", "d"])[2] == ["", "abd", ""]
    assert _scan(["abc"], ["xab"])[2] == ["x", "ab"]


def test_nothing_stops_before_min_tokens() -> None:
    scanner = StopScanner(["x"], include_stop=False)
    assert scanner.feed("x", may_stop=False).text == "x"
    assert scanner.feed("yx").found == "x"


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopScanner([], include_stop=False).feed("text").text == "text"
