"""The proof that a place of a schema has instances of finite length: a least fixed point over what each place needs."""

from collections import defaultdict, deque

from tiercel.server.grammar.keywords import Place

TYPE_MARK = "\0type"
"""The last step of the place of one type of a schema; no keyword is named so."""


class EndProof:
    """A least fixed point: a place has an end if each of its needs has one place or more with an end."""

    def __init__(self) -> None:
        self._needs: dict[Place, list[list[Place]]] = {}
        self._open: dict[Place, int] = {}
        self._users: defaultdict[Place, list[tuple[Place, int]]] = defaultdict(list)
        self._proved: set[Place] = set()

    def add(self, place: Place, needs: list[list[Place]]) -> None:
        """Add a place and its needs: of each list, one place or more must have an end."""
        self._needs[place] = needs
        self._open[place] = len(needs)
        for number, need in enumerate(needs):
            for one in need:
                self._users[one].append((place, number))

    def run(self) -> None:
        """Find all places that have an end. Cost: linear in the needs."""
        met: set[tuple[Place, int]] = set()
        ready = deque(place for place, count in self._open.items() if not count)
        while ready:
            place = ready.popleft()
            self._proved.add(place)
            for user in self._users[place]:
                if user not in met:
                    met.add(user)
                    self._open[user[0]] -= 1
                    if not self._open[user[0]]:
                        ready.append(user[0])

    def has_end(self, place: Place) -> bool:
        """Return whether a place was found to have an end."""
        return place in self._proved

    def missing_need(self, place: Place) -> Place:
        """Return a place without an end that another one needs; places of single types are looked through."""
        for need in self._needs[place]:
            if not any(one in self._proved for one in need):
                return self.missing_need(need[0]) if need[0][-1:] == (TYPE_MARK,) else need[0]
        raise AssertionError(place)
