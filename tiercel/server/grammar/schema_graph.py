"""JSON schemas as graphs of places, and the proof that a schema has an instance of finite length.

The proof is a least fixed point over all places that an instance depends on: a place *has an end* if its own keywords
and the places that it needs have one. A `$ref` that leads back to itself without an alternative has none. The proof is
linear in the size of the schema. It does not look into patterns, and not at two schemas that contradict each other
(`allOf`): `tiercel.server.grammar.proof` proves the grammar that the compiler makes of the schema.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import cast
from urllib.parse import unquote

from tiercel.server.grammar.end_proof import TYPE_MARK, EndProof
from tiercel.server.grammar.keywords import ACTING, TYPES, Place, copied_schema, fault_of, inner_schemas
from tiercel.server.grammar.pointer import joined, pointer

_ENDLESS = "the $ref leads back to itself, and every value under it would contain another one: no value has an end"
_IDENTIFIERS = ("$schema", "$id", "$anchor", "$dynamicAnchor")
MAX_POINTER_LETTERS = 64 * 1024  # of all places that a $ref names by an $anchor or an $id


class SchemaFaultError(Exception):
    """A schema that no output can follow; `place` is where, `message` is for the client."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place
        self.message = message


class SchemaGraph:
    """The places of a schema from which instances are made, and what each of them needs."""

    def __init__(self, schema: dict[str, object]) -> None:
        """`schema`: without nulls (`copied_schema`); it is changed by `resolve`."""
        self._schema = schema
        self._resources: dict[str, Place] = {"": ()}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._bases: dict[Place, str] = {}
        self._nodes: dict[Place, _Node] = {}
        self._schemas: set[Place] = set()  # all places of schemas, by keywords and by what a `$ref` names
        self._refs: dict[Place, Place] = {}  # the place of a `$ref` -> the place that it names

    @property
    def places(self) -> Iterator[tuple[Place, Mapping[str, object]]]:
        """The places that instances depend on, with their schemas; booleans left out."""
        for place, node in self._nodes.items():
            schema = node.schema
            if isinstance(schema, dict):
                yield place, cast(dict[str, object], schema)

    def resolve(self) -> None:
        """Find the place of every `$ref`, and write it as a pointer from the top.

        Identifiers are removed, so that the compiler of the grammar resolves each `$ref` as it was resolved here.
        Errors: SchemaFaultError for a `$ref` without a place, for values that a keyword cannot have, and if the
        pointers have more than `MAX_POINTER_LETTERS`: many short names may name one place that has a long pointer.
        """
        self._index((), self._schema, "")
        waiting: deque[Place] = deque([()])
        while waiting:
            place = waiting.popleft()
            if place in self._nodes:
                continue
            if place not in self._schemas:
                self._add_schema_elsewhere(place)
            schema = self._at(place)
            node = self._nodes[place] = _Node(schema)
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise SchemaFaultError(place, "a schema is an object or a boolean")
            entries = cast(dict[str, object], schema)
            for keyword, value in entries.items():
                if keyword in ACTING and (fault := fault_of(keyword, value)):
                    raise SchemaFaultError((*place, keyword), fault)
            reference = entries.get("$ref")
            if isinstance(reference, str):
                self._refs[place] = self._target(place, reference)
                waiting.append(self._refs[place])
            node.inner = {inner: (*place, *inner) for inner, _ in inner_schemas(entries, acting=True)}
            waiting.extend(node.inner.values())
        self._count_pointers()
        pointers: dict[Place, str] = {}
        for place, target in self._refs.items():
            entries = cast(dict[str, object], self._at(place))
            entries["$ref"] = pointers.get(target) or pointers.setdefault(target, pointer(target))
        for place in self._schemas:
            self._strip(self._at(place))

    def prove(self) -> None:
        """Prove that the schema has an instance. A `$ref` to a place without one becomes a schema without values.

        Call `resolve` first. Errors: SchemaFaultError with the place that has no end.
        """
        proof = EndProof()
        for place, node in self._nodes.items():
            _add_needs(proof, place, node, self._refs.get(place))
        proof.run()
        if not proof.has_end(()):
            raise self._dead_end(proof)
        for place, target in self._refs.items():
            if not proof.has_end(target):
                entries = cast(dict[str, object], self._at(place))
                del entries["$ref"]
                entries["enum"] = []  # and not `false` in its place, because a pointer may lead through it

    def _count_pointers(self) -> None:
        """Count the letters of the pointers that replace names, before they are written. Errors: SchemaFaultError."""
        letters = 0
        for place, target in self._refs.items():
            written = cast(str, cast(dict[str, object], self._at(place))["$ref"])
            if not written.startswith("#/") or self._base_of(place):
                letters += sum(len(str(step)) + 1 for step in target)
            if letters > MAX_POINTER_LETTERS:
                raise SchemaFaultError(
                    (*place, "$ref"),
                    f"all $ref of a schema together name places of at most {MAX_POINTER_LETTERS} letters by $anchor or"
                    " $id; use shorter names, or pointers such as #/$defs/name",
                )

    def _index(self, place: Place, schema: object, base: str) -> None:
        """Note the identifiers of a schema and of those within it."""
        self._schemas.add(place)
        if not isinstance(schema, dict):
            return
        entries = cast(dict[str, object], schema)
        identifier = entries.get("$id")
        if isinstance(identifier, str):
            own, fragment = joined(base, identifier)
            if fragment:  # an anchor in draft 6 and 7
                self._anchors.setdefault((base, fragment), place)
            elif own != base:
                base = own
                self._resources.setdefault(base, place)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := entries.get(name), str):
                self._anchors.setdefault((base, anchor), place)
        if base:
            self._bases[place] = base
        for inner, one in inner_schemas(entries):
            self._index((*place, *inner), one, base)

    def _add_schema_elsewhere(self, place: Place) -> None:
        """Take in a schema that no keyword holds, such as one in `components`, because a `$ref` names it."""
        value = self._at(place)
        if isinstance(value, dict):
            entries = cast(dict[str, object], value)
            made = copied_schema(entries)
            entries.clear()
            entries.update(made)
            self._index(place, entries, self._base_of(place))

    @staticmethod
    def _strip(schema: object) -> None:
        if isinstance(schema, dict):
            for name in _IDENTIFIERS:
                cast(dict[str, object], schema).pop(name, None)

    def _at(self, place: Place) -> object:
        value: object = self._schema
        for step in place:
            value = cast(dict[str | int, object], value)[step]
        return value

    def _target(self, place: Place, reference: str) -> Place:
        """Return the place that a `$ref` names. Errors: SchemaFaultError."""
        document, fragment = joined(self._base_of(place), reference)
        where = (*place, "$ref")
        start = self._resources.get(document)
        if start is None:
            raise SchemaFaultError(where, "the $ref leads out of the schema; other documents are not fetched")
        if fragment and not fragment.startswith("/"):
            named = self._anchors.get((document, unquote(fragment)))
            if named is None:
                raise SchemaFaultError(where, "the $ref names an $anchor that the schema does not have")
            return named
        steps, value = list(start), self._at(start)
        for step in fragment.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                steps.append(name)
                value = cast(dict[str, object], value)[name]
            elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(cast(list[object], value)):
                steps.append(int(name))
                value = cast(list[object], value)[int(name)]
            else:
                raise SchemaFaultError(where, "the $ref names a place that the schema does not have")
        return tuple(steps)

    def _base_of(self, place: Place) -> str:
        for length in range(len(place), -1, -1):
            if (base := self._bases.get(place[:length])) is not None:
                return base
        return ""

    def _dead_end(self, proof: EndProof) -> SchemaFaultError:
        """Return why there is no instance: follow what is missing from the top until it ends or repeats."""
        place: Place = ()
        trail: dict[Place, None] = {}
        while place not in trail:
            trail[place] = None
            if (fault := self._nodes[place].fault) is not None:
                return SchemaFaultError((*place, *fault[0]), fault[1])
            place = proof.missing_need(place)
        cycle = list(trail)[list(trail).index(place) :]
        return SchemaFaultError((*next(one for one in reversed(cycle) if one in self._refs), "$ref"), _ENDLESS)


class _Node:
    """One place: its schema, the places within it, and a fault of its own that leaves it without instances."""

    __slots__ = ("fault", "inner", "schema")

    def __init__(self, schema: object) -> None:
        self.schema = schema
        self.inner: dict[Place, Place] = {}
        self.fault: tuple[Place, str] | None = None


def _add_needs(proof: EndProof, place: Place, node: _Node, target: Place | None) -> None:
    given = node.schema
    if not isinstance(given, dict):
        if given is False:
            node.fault = ((), "the schema false has no values")
        proof.add(place, [] if given is True else [[]])
        return
    schema = cast(dict[str, object], given)
    needs: list[list[Place]] = []
    if target is not None:
        needs.append([target])
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema:
            inner = [(*place, keyword, number) for number in range(len(cast(list[object], schema[keyword])))]
            if keyword == "allOf":
                needs += [[one] for one in inner]
            else:
                needs.append(cast(list[Place], inner))
                if not inner:
                    node.fault = ((keyword,), "the list is empty, so there are no values")
    node.fault = node.fault or _fault_of_values(schema)
    if node.fault is None and "type" in schema:
        node.fault = _add_types(proof, place, node, schema, needs)
    proof.add(place, [*needs, []] if node.fault is not None else needs)


def _fault_of_values(schema: Mapping[str, object]) -> tuple[Place, str] | None:
    """Return why the values that a schema lists exclude each other."""
    enum = schema.get("enum")
    if not isinstance(enum, list):
        return _fault_of_type("const", [schema["const"]], schema) if "const" in schema else None
    values = cast(list[object], enum)
    if not values:
        return ("enum",), "the list is empty, so there are no values"
    if "const" in schema and not any(_is_same(one, schema["const"]) for one in values):
        return ("const",), "it is not one of the values of enum"
    return _fault_of_type("enum", values, schema)


def _fault_of_type(keyword: str, values: Sequence[object], schema: Mapping[str, object]) -> tuple[Place, str] | None:
    if "type" not in schema or any(_type_of(one) & set(_types_of(schema)) for one in values):
        return None
    return (keyword,), "no value has the type of the schema"


def _types_of(schema: Mapping[str, object]) -> list[str]:
    types = schema["type"]
    return [types] if isinstance(types, str) else cast(list[str], types)


def _type_of(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"number", "integer"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _add_types(
    proof: EndProof, place: Place, node: _Node, schema: Mapping[str, object], needs: list[list[Place]]
) -> tuple[Place, str] | None:
    """Add that one of the types of a schema has an instance. Return a fault if none of them can have one."""
    alternatives: list[Place] = []
    fault: tuple[Place, str] | None = None
    for name in _types_of(schema):
        type_needs: list[list[Place]] = []
        match name:
            case "object":
                why = _object_needs(place, schema, node, type_needs)
            case "array":
                why = _array_needs(place, schema, node, type_needs)
            case "string":
                why = _limits(schema, "minLength", "maxLength")
            case "number" | "integer":
                why = _limits(schema, "minimum", "maximum")
            case _:
                why = None
        if why is None:
            mark = (*place, name, TYPE_MARK)
            proof.add(mark, type_needs)
            alternatives.append(mark)
        fault = fault or why
    if alternatives:
        needs.append(alternatives)
        return None
    return fault or (("type",), f"must be one or several of {', '.join(TYPES)}")


def _limits(schema: Mapping[str, object], least: str, most: str) -> tuple[Place, str] | None:
    low, high = schema.get(least), schema.get(most)
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        return (least,), f"it is larger than {most}, so there are no values"
    return None


def _object_needs(
    place: Place, schema: Mapping[str, object], node: _Node, needs: list[list[Place]]
) -> tuple[Place, str] | None:
    """Add that each property that an object must have has an end."""
    if (fault := _limits(schema, "minProperties", "maxProperties")) is not None:
        return fault
    required = _required_names(schema)
    most = schema.get("maxProperties")
    if isinstance(most, int) and len(required) > most:
        return ("maxProperties",), f"{len(required)} properties are required, so there are no values"
    for name in required:
        inner = node.inner.get(("properties", name))
        if inner is None and not schema.get("patternProperties"):
            inner = node.inner.get(("additionalProperties",))
        if inner is not None:
            needs.append([inner])
    return None


def _required_names(schema: Mapping[str, object]) -> list[str]:
    """Return the names that an object must have, those included that `dependentRequired` adds."""
    names = dict.fromkeys(cast(list[str], schema.get("required", [])))
    added = schema.get("dependentRequired")
    if not isinstance(added, dict):
        return list(names)
    more = cast(dict[str, object], added)
    waiting = deque(names)
    while waiting:
        listed = more.get(waiting.popleft())
        for name in cast(list[object], listed) if isinstance(listed, list) else ():
            if isinstance(name, str) and name not in names:
                names[name] = None
                waiting.append(name)
    return list(names)


def _array_needs(
    place: Place, schema: Mapping[str, object], node: _Node, needs: list[list[Place]]
) -> tuple[Place, str] | None:
    """Add that each item that an array must have has an end."""
    if (fault := _limits(schema, "minItems", "maxItems")) is not None:
        return fault
    least = schema.get("minItems", 0)
    assert isinstance(least, int)
    listed = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    first = cast(list[object], schema.get(listed, []))
    needs += [[(*place, listed, number)] for number in range(min(least, len(first)))]
    rest = node.inner.get(("additionalItems",) if listed == "items" else ("items",))
    if least > len(first) and rest is not None:
        needs.append([rest])
    return None
