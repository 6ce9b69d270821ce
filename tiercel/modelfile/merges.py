"""The merges of a tokenizer of a GGUF file: listed in it, or computed from the scores of its tokens."""

from collections.abc import Collection, Mapping

from tiercel.modelfile.fields import MetadataFields

_MAX_SCORED = 128  # characters of a token with a score; the time to find its merges grows with their square


def listed_merges(fields: MetadataFields, key: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of a list of texts with a space between both. Errors: ModelFileError, also of unknown tokens."""
    merges: list[tuple[str, str]] = []
    for index, text in enumerate(fields.texts(key)):
        left, space, right = text.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise fields.wrong(key, f"entry {index:,} is {text!r:.80}: not two tokens that form a third")
        merges.append((left, right))
    return merges


def merges_by_score(
    fields: MetadataFields, key: str, ids: Mapping[str, int], usable: Collection[str]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form one of `usable`, in the order of the score of the token that they form.

    This is the order in which SentencePiece merges: https://arxiv.org/abs/1808.06226. Errors: ModelFileError.
    """
    scores = fields.numbers(key, len(ids))
    if scores is None:
        raise fields.wrong(key, "is missing: the order of merges is unknown")
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text in usable:
        if len(text) > _MAX_SCORED:
            raise fields.wrong(key, f"token {text!r:.80} has {len(text):,} characters, at most {_MAX_SCORED} are read")
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in ids and right in ids:
                found.append((-scores[ids[text]], ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(found)]
