"""The route that a client probably meant when it asked for one that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_PATH = 120  # characters that are compared and repeated; the comparison takes the product of the lengths
_LIKENESS = 0.6


def nearest_route(path: str, routes: Iterable[str]) -> str | None:
    """Return the route that is most like a path; None if no route is.

    Parameters of routes stand for the part of the path at the same place.
    """
    parts = path[:_MAX_PATH].rstrip("/").split("/")
    route_by_filled = {_filled(route, parts): route for route in routes}
    found = get_close_matches("/".join(parts), route_by_filled, 1, _LIKENESS)
    return route_by_filled[found[0]] if found else None


def shown(path: str) -> str:
    """Return a path as an error repeats it: printable, and not longer than `_MAX_PATH` characters."""
    cut = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def _filled(route: str, parts: list[str]) -> str:
    """Return a route with the parts of a path in place of its parameters."""
    names = route.split("/")
    return "/".join(
        parts[place] if name.startswith("{") and place < len(parts) else name for place, name in enumerate(names)
    )
