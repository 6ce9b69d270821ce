"""The fields of all bodies and queries as the Markdown of docs/api.md, made from /openapi.json."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

Document = Mapping[str, Any]  # Any: a JSON document

BEGIN = "<!-- generated from /openapi.json -->"
END = "<!-- end of the generated part -->"


def field_reference(document: Document) -> str:
    """Return a section for each route with a body or a query: its fields, their values, and what they do."""
    return "\n".join([BEGIN, *_sections(document), "", END])


def _sections(document: Document) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    others_by_path = _other_paths(document)
    for path, operations in sorted(document["paths"].items()):
        if path not in others_by_path:
            continue
        for method, operation in sorted(operations.items()):
            names = list(_body_names(operation))
            query = [field for field in operation.get("parameters", ()) if field["in"] == "query"]
            if not names and not query:
                continue
            statuses = ", ".join(sorted(operation["responses"]))
            others = "".join(f", `{other}`" for other in others_by_path[path])
            yield f"\n### {method.upper()} {path}\n\nStatuses: {statuses}.{f' Also{others[1:]}.' if others else ''}\n"
            if query:
                yield "| in the query | values | effect |\n|---|---|---|"
                for field in query:
                    yield f"| `{field['name']}` | {_values(field['schema'], schemas)} | {field['description']} |"
            if not names:
                continue
            yield "| field | values | effect |\n|---|---|---|"
            fields = {name: field for schema in names for name, field in schemas[schema].get("properties", {}).items()}
            required = {name for schema in names for name in schemas[schema].get("required", ())}
            for name, field in sorted(fields.items()):
                mark = " (required)" if name in required else ""
                yield f"| `{name}`{mark} | {_values(field, schemas)} | {field.get('description', '')} |"


def _other_paths(document: Document) -> dict[str, list[str]]:
    """Return by path the other paths with the same bodies and answers, which are not in the result themselves."""
    paths_by_route: dict[str, list[str]] = {}
    for path, operations in sorted(
        document["paths"].items(), key=lambda entry: (not entry[0].startswith("/v1"), entry)
    ):
        bodies = {method: operation.get("requestBody") for method, operation in operations.items()}
        answers = {method: operation["responses"] for method, operation in operations.items()}
        paths_by_route.setdefault(repr((bodies, answers)) if any(bodies.values()) else path, []).append(path)
    return {path: others for path, *others in paths_by_route.values()}


def _body_names(operation: Document) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    for entry in content.values():
        for schema in entry["schema"].get("anyOf", [entry["schema"]]):
            if "$ref" in schema:
                yield _name(schema)


def _name(schema: Document) -> str:
    return cast(str, schema["$ref"]).rpartition("/")[2]


def _values(field: Document, schemas: Document, depth: int = 0) -> str:
    """Return the values of a field in words."""
    if "$ref" in field:
        return "object"
    if "anyOf" in field:
        kinds = [_values(kind, schemas, depth) for kind in field["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_values(field.get('items', {}), schemas, depth + 1)}{_count(field, 'Items')}"
    if kind == "object":
        return f"object{_count(field, 'Properties')}"
    if kind == "string":
        return f"text{_count(field, 'Length')}"
    return f"{kind}{_range(field)}"


def _count(field: Document, unit: str) -> str:
    most = field.get(f"max{unit}")
    return "" if most is None else f", at most {most}"


def _range(field: Document) -> str:
    least, above = field.get("minimum"), field.get("exclusiveMinimum")
    most = field.get("maximum")
    parts = [
        *([f"from {least}"] if least is not None else []),
        *([f"above {above}"] if above is not None else []),
        *([f"to {most}"] if most is not None else []),
    ]
    return f", {' '.join(parts)}" if parts else ""
