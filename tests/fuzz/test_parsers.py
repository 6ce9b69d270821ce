"""Every parser of bytes from outside: random inputs give a value or a documented error, in bounded time and memory.

`make test` parses some hundred inputs for each parser, from a fixed and from a new seed; `make test-long` a hundred
thousand. A failure prints the seed and the input; the input then goes to `corpus/<target>/`. For a longer run:
`python -m tests.fuzz.run TARGET --count N --seed S`. Bodies of HTTP requests: `tests/server/api/test_fuzz.py`.
"""

import pytest

from tests.fuzz import machine_bytes, operator_files, tenant_files
from tests.fuzz.target import Target
from tests.seeds import fresh_seeds

TARGETS = (*operator_files.TARGETS, *machine_bytes.TARGETS, *tenant_files.TARGETS)
QUICK, LONG = 300, 100_000
FEW = {"tokenizer": 15, "tokenizer_config": 30, "volume": 75}  # of the slow parsers


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.sampled(24)
def test_random_bytes_give_a_value_or_a_documented_error(target: Target, seed: int) -> None:
    target.run(seed, FEW.get(target.name, QUICK))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", fresh_seeds(1))
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_many_random_bytes_give_a_value_or_a_documented_error(target: Target, seed: int) -> None:
    target.run(seed, LONG * FEW.get(target.name, QUICK) // QUICK)
