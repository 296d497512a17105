"""vLLM's KV events, read: what a batch says of blocks, and where in its stream an engine's run stands.

A batch is msgpack: time, events, data-parallel rank; as an array, or as a map in newer versions. An event begins with
its kind. What is not known of a newer version is passed over; what makes no sense is a PeerError. Token ids end here:
they become names, and nothing that leaves this module holds one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvbus.blocks import BLOCKS_MAX, BlockChange, root_of
from kvbus.codec import unpack_any
from kvbus.errors import PeerError
from kvbus.names import page_names

PAYLOAD_MAX_BYTES = 64 << 20
"""One step of a large engine stores some thousand blocks; each brings its token ids, at most five bytes each."""

BLOCKS_KNOWN_MAX = 1 << 21
"""Blocks whose names are kept for those that follow on them: beyond it, 300 MB, new ones stay nameless."""

RECENT_MAX = 20_000
"""Batches by which a repeat is told from a restart: twice what vLLM keeps for replay."""

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
           "extra_keys", "group_idx")  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_BATCH = ("ts", "events", "data_parallel_rank")
_TEXT_MAX, _MEDIUM_MAX = 200, 32
_BLOCK_TOKENS_MAX = 1 << 20
"""Tokens of one block; engines have 16 to some hundred."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of the stream, not looked into yet."""

    sequence: int
    payload: bytes


@dataclass(slots=True)
class StreamPlace:
    """How far one run of an engine's stream was seen; `last` is -1 before its first batch."""

    last: int = -1
    _recent: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def knows(self, batch: Batch) -> bool:
        """Whether this very batch was seen; a restarted engine's has the same sequence and another payload."""
        return self._recent.get(batch.sequence) == hash(batch.payload)

    def note(self, batch: Batch) -> None:
        """Take note of a batch: everything up to it was seen, or told to be lost."""
        self.last = batch.sequence
        self._recent[batch.sequence] = hash(batch.payload)
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)


class BlockBook:
    """Turns the events of one engine into changes, and remembers which name each block has.

    Names are those of `kvbus.blocks.prompt_names` for the same model. A block whose parent is unknown, or that depends
    on more than its tokens and a LoRA, has none, and so have those that follow on it.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._names: dict[bytes, bytes] = {}
        self._places: dict[bytes, set[tuple[str, int]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def forget(self) -> None:
        """Begin anew: nothing is known of any block."""
        self._names.clear()
        self._places.clear()

    def changes(self, payload: bytes) -> tuple[int, list[BlockChange]]:
        """Return a batch's rank and changes; PeerError, and nothing is taken in, where it makes no sense."""
        document = _fields(unpack_any(payload, length_max_bytes=PAYLOAD_MAX_BYTES), _BATCH, "batch")
        events = document.get("events")
        if not isinstance(events, list):
            raise PeerError("a batch of KV events has no list of events", got=type(events).__name__)
        rank = document.get("data_parallel_rank")
        parsed = [parts for event in events if (parts := _parsed(event)) is not None]
        changes = [change for kind, fields in parsed for change in self._taken(kind, fields)]
        return (rank if isinstance(rank, int) and 0 <= rank < 2**16 else 0), changes

    # ------------------------------------------------------------------------------------------------------- inside

    def _taken(self, kind: str, fields: "_Fields") -> Iterator[BlockChange]:
        if kind == "AllBlocksCleared":
            self.forget()
            yield BlockChange(change="cleared", reason="the engine cleared its cache")
        elif kind == "BlockRemoved":
            yield from self._removed(fields)
        else:
            yield from self._stored(fields)

    def _stored(self, fields: "_Fields") -> Iterator[BlockChange]:
        names = self._names_of(fields)
        place = fields.medium, fields.group
        for hash_, name in zip(fields.hashes, names, strict=True):
            if hash_ in self._places or len(self._places) < BLOCKS_KNOWN_MAX:
                self._places.setdefault(hash_, set()).add(place)
                if name:
                    self._names[hash_] = name
        for at in range(0, len(fields.hashes), BLOCKS_MAX):
            yield BlockChange(
                change="stored",
                hashes=fields.hashes[at : at + BLOCKS_MAX],
                names=names[at : at + BLOCKS_MAX],
                parent=fields.hashes[at - 1] if at else fields.parent,
                block_tokens=fields.block_tokens,
                medium=fields.medium,
                group=fields.group,
                lora=fields.lora,
            )

    def _names_of(self, fields: "_Fields") -> tuple[bytes, ...]:
        nameless = (b"",) * len(fields.hashes)
        parent = self._names.get(fields.parent, b"") if fields.parent else self._root(fields.lora)
        if not parent or len(fields.tokens) != len(fields.hashes) * fields.block_tokens:
            return nameless
        try:
            names = page_names(parent, fields.tokens, fields.block_tokens)
        except (ValueError, TypeError):
            return nameless
        plain = fields.plain_blocks
        return (*names[:plain], *nameless[plain:])

    def _root(self, lora: str) -> bytes:
        return root_of(model=self._model, lora=lora)

    def _removed(self, fields: "_Fields") -> Iterator[BlockChange]:
        for hash_ in fields.hashes:
            places = self._places.get(hash_, set())
            places.discard((fields.medium, fields.group))
            if not places:
                self._places.pop(hash_, None)
                self._names.pop(hash_, None)
        for at in range(0, len(fields.hashes), BLOCKS_MAX):
            hashes = fields.hashes[at : at + BLOCKS_MAX]
            yield BlockChange(change="removed", hashes=hashes, medium=fields.medium, group=fields.group)


@dataclass(frozen=True, slots=True)
class _Fields:
    """What one event says, checked; `plain_blocks`: how many, from the first on, depend on tokens and LoRA alone."""

    hashes: tuple[bytes, ...]
    medium: str
    group: int
    parent: bytes = b""
    tokens: Sequence[int] = ()
    block_tokens: int = 0
    lora: str = ""
    plain_blocks: int = 0


def _parsed(event: object) -> tuple[str, _Fields] | None:
    """Return an event's kind and fields; None for a kind that this version does not know."""
    kind, rest = _kind_of(event)
    if kind == "AllBlocksCleared":
        return kind, _Fields((), "", 0)
    if kind == "BlockRemoved":
        given = _fields(rest, _REMOVED, kind)
        return kind, _Fields(_hashes(given), _medium(given), _group(given))
    if kind != "BlockStored":
        return None
    given = _fields(rest, _STORED, kind)
    hashes, lora = _hashes(given), _text(given.get("lora_name"))
    size = given.get("block_size")
    if not isinstance(size, int) or not 1 <= size <= _BLOCK_TOKENS_MAX:
        raise PeerError("a stored block has no block size that can be", got=repr(size)[:40])
    parent, tokens = given.get("parent_block_hash"), given.get("token_ids")
    return kind, _Fields(
        hashes=hashes,
        medium=_medium(given),
        group=_group(given),
        parent=b"" if parent is None else _hash(parent),
        tokens=tokens if isinstance(tokens, list) else (),
        block_tokens=size,
        lora=lora,
        plain_blocks=_plain_blocks(given.get("extra_keys"), lora, len(hashes)),
    )


def _kind_of(event: object) -> tuple[str, object]:
    if isinstance(event, list) and event and isinstance(event[0], str):
        return event[0], event[1:]
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return str(event["type"]), event
    raise PeerError("a KV event does not begin with its kind", got=type(event).__name__)


def _fields(given: object, names: tuple[str, ...], what: str) -> Mapping[str, object]:
    """Return fields by name, from an array (later ones may be left out, or be new) or from a map."""
    if isinstance(given, dict):
        return given
    if isinstance(given, list):
        return dict(zip(names, given, strict=False))
    raise PeerError(f"{what} is neither an array nor a map", got=type(given).__name__)


def _hashes(given: Mapping[str, object]) -> tuple[bytes, ...]:
    hashes = given.get("block_hashes")
    if not isinstance(hashes, list):
        raise PeerError("a KV event has no block hashes", got=type(hashes).__name__)
    return tuple(map(_hash, hashes))


def _hash(value: object) -> bytes:
    """A hash travels as bytes, or as the number that its last 64 bits are."""
    if isinstance(value, bytes) and 0 < len(value) <= 64:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return (value % 2**64).to_bytes(8, "big")
    raise PeerError("a block hash is neither bytes nor a number", got=type(value).__name__)


def _group(given: Mapping[str, object]) -> int:
    group = given.get("group_idx")
    return group if isinstance(group, int) and 0 <= group < 2**16 else 0


def _medium(given: Mapping[str, object]) -> str:
    return _text(given.get("medium"))[:_MEDIUM_MAX]


def _text(value: object) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""


def _plain_blocks(extra: object, lora: str, blocks: int) -> int:
    if not isinstance(extra, list):
        return blocks
    allowed = (None, [], [lora]) if lora else (None, [])
    return next((at for at, keys in enumerate(extra[:blocks]) if keys not in allowed), blocks)
