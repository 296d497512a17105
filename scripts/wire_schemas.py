"""The schemas and examples of docs/asyncapi.yaml: the models' own, as far as msgpack and AsyncAPI differ from JSON.

AsyncAPI speaks JSON Schema draft 7, and has no type for bytes: a column stands as a binary string, with what its bytes
mean beside it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic.json_schema import models_json_schema

from kvbus.events import KINDS, Header
from kvbus.parts import Body

Document = dict[str, object]

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a field of bytes holds: little-endian unsigned integers of a width, or, with width 1, plain bytes."""

    of: str
    width_bytes: int = 1

    @property
    def description(self) -> str:
        """One line for readers of the document."""
        if self.width_bytes == 1:
            return self.of
        return f"A column of u{8 * self.width_bytes}, little-endian: {self.of}."


BYTES = {
    ("Prompt", "tokens"): Bytes("token ids", 4),
    ("FactsSeen", "ticket"): Bytes("tickets", 8),
    ("FactsSeen", "rank"): Bytes("ranks", 2),
    ("FactsSeen", "bits"): Bytes("fact bits", 4),
    ("FactsSeen", "lo"): Bytes("first positions, in blocks", 4),
    ("FactsSeen", "hi"): Bytes("positions behind the last, in blocks", 4),
    ("LeaseGranted", "pages"): Bytes("page numbers", 4),
    ("LeaseGranted", "counters"): Bytes("generation counters, one a page", 8),
    ("HeldLeaseRow", "pages"): Bytes("page numbers", 4),
    ("HeldLeaseRow", "counters"): Bytes("generation counters, one a page", 8),
    ("EventsBatch", "events"): Bytes("An event, as it would stand in the stream by itself: a msgpack map."),
    ("LendRequested", "nonce"): Bytes("16 random bytes."),
    ("LendRequested", "names"): Bytes("Page names of 16 bytes each."),
    ("LendRequested", "tokens"): Bytes("token ids", 4),
    ("LendAnswered", "grant"): Bytes("A grant: a msgpack map of its own."),
    ("LendAnswered", "signature"): Bytes("Its Ed25519 signature, 64 bytes."),
    ("LeaseReleased", "nonce"): Bytes("16 random bytes."),
    ("PagesFound", "pages"): Bytes("page numbers", 4),
    ("PagesFound", "digests"): Bytes("digests of what the grant said of these pages, one a page", 8),
    ("InstanceRecord", "verify_key"): Bytes("The Ed25519 key that grants are checked with, 32 bytes."),
    ("PlanAnswered", "tokens"): Bytes("token ids", 4),
    ("Prompt", "prefix"): Bytes("The page name of a prefix's last block, 16 bytes."),
    ("PrefixRow", "name"): Bytes("The page name of a prefix's last block, 16 bytes."),
    ("PrefixAsked", "name"): Bytes("The page name of a prefix's last block, 16 bytes."),
    ("PrefixAnswered", "names"): Bytes("Page names of 16 bytes each, the prompt's first block first."),
    ("BlockChange", "hashes"): Bytes("The engine's own hash of one block; a number in big-endian order."),
    ("BlockChange", "names"): Bytes("One block's name: 16 bytes, or none."),
    ("BlockChange", "parent"): Bytes("The hash of the block before the first."),
}
"""Every field of bytes, by model and name; `schemas` refuses a field that is missing here, and one that is no more."""


def schemas() -> Document:
    """Return the schemas of the envelope, of each kind's body and of their parts; KeyError for bytes without words."""
    models = [(model, "validation") for model in (Header, *KINDS.values())]
    _, document = models_json_schema(models, ref_template=REFERENCE)  # type: ignore[arg-type] # its words are narrower
    found = {name: _Adapted(name).model(schema) for name, schema in sorted(document["$defs"].items())}
    unused = set(BYTES) - {(name, field) for name, schema in found.items() for field in _bytes_in(schema)}
    if unused:
        raise KeyError(f"no such fields of bytes: {sorted(unused)}")
    return cast("Document", found)


def payload(body: type[Body]) -> Document:
    """Return the schema of one kind's whole map: the envelope with its kind, and the body in `b`."""
    own = {
        "type": "object",
        "required": ["k", "b"],
        "properties": {"k": {"const": body.KIND}, "b": {"$ref": REFERENCE.format(model=body.__name__)}},
    }
    return {"allOf": [{"$ref": REFERENCE.format(model=Header.__name__)}, own]}


def examples(body: type[Body], golden: Path) -> list[Document]:
    """Return one example per golden file of a kind: what its bytes say."""
    return [
        {"name": path.stem.partition(".")[2] or body.KIND, "payload": _shown(path)}
        for path in sorted(golden.glob("*.json"))
        if path.stem.partition("_")[2].partition(".")[0] == body.KIND
    ]


def words(documented: object) -> str:
    """Return a docstring with its lines joined, paragraphs kept."""
    text = (documented.__doc__ or "").strip()
    paragraphs = ("\n".join(line.strip() for line in part.splitlines()) for part in text.split("\n\n"))
    return "\n\n".join(" ".join(part.split("\n")) for part in paragraphs)


def _shown(path: Path) -> Document:
    document = json.loads(path.read_text("utf-8"))
    return {**document["header"], "b": _plain(document["body"])}


def _plain(value: object) -> object:
    """Return a golden value with its bytes as plain hexadecimal digits."""
    if isinstance(value, dict):
        return value["hex"] if value.keys() == {"hex"} else {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _bytes_in(schema: object) -> Iterator[str]:
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return (name for name, one in properties.items() if _each(one).get("format") == "binary")


def _each(schema: Document) -> Document:
    """Return what an array holds, else the schema itself."""
    items = schema.get("items")
    return items if isinstance(items, dict) else schema


@dataclass(frozen=True, slots=True)
class _Adapted:
    """One model's schema, made into what AsyncAPI takes."""

    name: str

    def model(self, schema: Document) -> Document:
        """Return the model's schema without titles, with its docstring as one text."""
        adapted = cast("Document", self._any(schema))
        if "description" in schema:
            adapted["description"] = " ".join(str(schema["description"]).split())
        properties = cast("dict[str, Document]", adapted.get("properties", {}))
        for field, one in properties.items():
            if _each(one).get("format") == "binary":
                self._mark(field, _each(one))
        return adapted

    def _mark(self, field: str, schema: Document) -> None:
        """Say what a field's bytes mean; their bounds count bytes, and the characters of no text."""
        meant = BYTES.get((self.name, field))
        if meant is None:
            raise KeyError(f"{self.name}.{field} holds bytes: say in BYTES of what")
        schema["description"] = meant.description
        if meant.width_bytes > 1:
            schema["x-width-bytes"] = meant.width_bytes
        for bound in ("minLength", "maxLength"):
            if bound in schema:
                schema[f"x-{'min' if bound == 'minLength' else 'max'}-bytes"] = schema.pop(bound)

    def _any(self, value: object) -> object:
        if isinstance(value, list):
            return [self._any(item) for item in value]
        if not isinstance(value, dict):
            return value
        given = {key: item for key, item in value.items() if key != "title" or isinstance(item, dict)}
        if "prefixItems" in given:  # a tuple: draft 7 says so with a list of items
            given["items"], given["additionalItems"] = given.pop("prefixItems"), False
        choices = given.get("anyOf")
        if isinstance(choices, list) and {"type": "null"} in choices:  # what is None is left out of the map
            left = [choice for choice in choices if choice != {"type": "null"}]
            del given["anyOf"]
            given.pop("default", None)
            given |= left[0] if len(left) == 1 else {"anyOf": left}
        return {key: self._any(item) for key, item in given.items()}
