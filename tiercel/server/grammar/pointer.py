"""Places of a schema as texts: what a `$ref` names, the pointer that leads to a place, and places for people."""

from urllib.parse import quote, urldefrag, urljoin

from tiercel.server.grammar.keywords import Place

_MAX_SHOWN = 200  # letters of a place in a message
_MAX_NAME = 64  # of them for its last step


def joined(base: str, reference: str) -> tuple[str, str]:
    """Return the document and the fragment that a reference names, relative to a base."""
    if reference.startswith("#"):
        return base, reference[1:]
    try:
        document, fragment = urldefrag(urljoin(base, reference) if base else reference)
    except ValueError:  # an address that cannot be read is the address of no document
        return "\0", ""
    return document, fragment


def pointer(place: Place) -> str:
    """Return a place as a `$ref` that leads to it from the top of the schema."""
    return "#" + "".join("/" + quote(str(step).replace("~", "~0").replace("/", "~1"), safe="$") for step in place)


def shown(path: str, place: Place) -> str:
    """Return a place in a field as errors and headers show it, such as `guided_json.properties.a`.

    The last step stays whole; of the others, the middle is left out beyond 200 letters.
    """
    steps = [path, *("".join(letter if letter.isprintable() else "?" for letter in str(step)) for step in place)]
    whole = ".".join(steps)
    if len(whole) <= _MAX_SHOWN:
        return whole
    end = f"....{steps[-1][-_MAX_NAME:]}"
    return whole[: _MAX_SHOWN - len(end)] + end
