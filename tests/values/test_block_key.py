"""The announced part of block keys."""

import random

from tiercel.values.block_key import (
    ANNOUNCED_ONE_IN,
    PromptHeads,
    child_key,
    is_announced,
    key_head,
    namespace_key,
    prompt_heads,
)
from tiercel.values.request import pack_tokens


def test_the_heads_of_a_prompt_are_those_of_its_announced_blocks() -> None:
    rng, root = random.Random(0), namespace_key(b"model", b"tenant")
    prompt = pack_tokens(rng.randrange(50_000) for _ in range(16 * 40 + 5))
    key, expected = root, []
    for block in range(40):
        key = child_key(key, prompt[64 * block : 64 * (block + 1)])
        if is_announced(key):
            expected.append((key_head(key), 16 * (block + 1)))
    found = prompt_heads(root, prompt, 16)
    assert list(zip(found.heads, found.ends, strict=True)) == expected
    assert prompt_heads(root, prompt[:60], 16) == PromptHeads()


def test_one_key_in_eight_is_announced() -> None:
    keys = [child_key(namespace_key(b"", b""), bytes([number % 256, number // 256])) for number in range(8000)]
    assert abs(sum(map(is_announced, keys)) - 8000 / ANNOUNCED_ONE_IN) < 100
    assert len({key_head(key) % 256 for key in keys if is_announced(key)}) > 240
