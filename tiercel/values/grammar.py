"""The limits within which grammars are compiled and applied, and the errors of requests that exceed them.

Both processes use the same limits, so that a grammar which the HTTP process has compiled is compiled by the engine too.
"""

from msgspec import Struct

GRAMMAR_FAILED = "the grammar of the request failed"
"""The beginning of `Finished.error` of a sequence whose grammar could not be compiled or applied."""

NOTHING_LEFT = "bad_words exclude every token that the other fields of the request allow here"
"""`Finished.error` of a sequence that can draw no token: its grammar, allowed_token_ids, bad_words and min_tokens
together leave none."""


class GrammarLimits(Struct, frozen=True, kw_only=True):
    """The arguments of `llguidance.LLParserLimits`. Exceeding one of them fails the request, and no other."""

    max_items_in_row: int = 2_500  # alternatives of the parser at one byte; 512 optional properties need 2,047
    initial_lexer_fuel: int = 1_000_000  # of compiling, about 20 ms
    step_lexer_fuel: int = 100_000  # of one mask, about 7 ms; half of llguidance's default
    step_max_items: int = 50_000  # parser items of one mask, about 2.5 ms
    max_lexer_states: int = 20_000  # of one sequence, 1 to 2 kB each; llguidance's default would be up to 500 MB
    max_grammar_size: int = 500_000  # symbols of all productions


GRAMMAR_LIMITS = GrammarLimits()
