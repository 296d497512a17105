"""The pieces that events and grants are made of: bounded scalars, prompts, reader keys, process identities."""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvbus.codec import pack
from kvbus.topics import escape
from kvbus.traceparent import TraceParent

REQUEST_LENGTH_MAX_BYTES = 768 << 10
"""Requests carry prompts: 128 k tokens as u32 are 512 KiB; 768 KiB stay under the broker's default 1 MiB."""


@lru_cache(maxsize=4_096)  # as `escape`, and pydantic calls this one without a frame
def _must_fit_a_subject(name: str) -> str:
    escape(name)  # a peer's name becomes a subject to answer on
    return name


Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_must_fit_a_subject)]
Epoch = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**16)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2_000)]
Url = Annotated[str, Field(min_length=1, max_length=512)]
"""A base URL under which HTTP clients know an instance; whoever names it as a source means that instance."""
RequestHash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
PrefixName = Annotated[bytes, Field(min_length=16, max_length=16)]
"""The page name of a prefix's last block."""
VerdictWord = Literal["accepted", "deduped", "skipped_busy", "refused"]
OnMiss = Literal["prefill", "partial", "fail"]


class Part(BaseModel):
    """A piece of an event: frozen, strict, blind to fields that a later minor version adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Body(Part):
    """The body of one kind of event; KIND is its name on the wire."""

    KIND: ClassVar[str]


class TracedBody(Body):
    """A body that carries its caller's W3C trace context, where there is one; it decides nothing."""

    traceparent: TraceParent = None


class Message(Part):
    """One turn of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Annotated[str, Field(max_length=REQUEST_LENGTH_MAX_BYTES)]


class Prompt(Part):
    """Exactly one of: `tokens` (u32 little-endian bytes), `text`, `messages`, which the destination's engine tokenizes;
    or `prefix`, the name of what its source holds: only the source knows the names before it, and nobody its tokens.
    """

    tokens: bytes | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, strict=False)
    prefix: PrefixName | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        values = self.__dict__
        given = [name for name in values if values[name] is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of tokens, text, messages, prefix; got {given or 'none'}")
        name = given[0]
        if not (value := values[name]):
            raise ValueError(f"{name} is empty: there is nothing to transfer")
        if name == "tokens" and len(value) % 4:
            raise ValueError("tokens must be u32 bytes, a multiple of 4 long")
        return self

    def canonical(self) -> bytes:
        """Return the bytes over which the request hash is taken; the kinds never collide."""
        document: dict[str, object] = {}
        if (tokens := self.tokens) is not None:
            document["tokens"] = tokens
        elif self.text is not None:
            document["text"] = self.text
        elif self.messages is not None:
            document["messages"] = [[message.role, message.content] for message in self.messages]
        elif self.prefix is not None:
            document["prefix"] = self.prefix
        return pack(document)


class FactDetailRow(Part):
    """A failure beside the columns."""

    ticket: Count
    failure: Annotated[str, Field(max_length=64)]
    text: Text
    peer: Annotated[str, Field(max_length=64)] = ""


class ReaderKey(Part):
    """Who will read, exactly: one lease serves one key, and repeats of a key get the same lease (P4, P18)."""

    instance: Name
    member: Name
    epoch: Epoch
    transfer: Annotated[str, Field(min_length=1, max_length=200)]
    attempt: Annotated[int, Field(ge=1, lt=2**31)]
    rank: Rank


class ProcessIdentity(Part):
    """A process such that its death can be proved on the same host: pid plus start time, boot and pid namespace."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    start_ticks: Count
    boot_id: Annotated[str, Field(max_length=64)]
    pid_namespace: Count


class PagesFound(Part):
    """What a reader found of pages that it was lent: a report, which is no evidence and ends no lease.

    `pages` (u32 column) came with other bytes than their `digests` in the grant (u64 column), which show what the
    report is about; `changed` counts pages that were rewritten while they were read.
    """

    request_hash: RequestHash
    pages: bytes = b""
    digests: bytes = b""
    changed: Count = 0

    @model_validator(mode="after")
    def _equal_length(self) -> Self:
        if len(self.pages) % 4 or len(self.digests) != 2 * len(self.pages):
            raise ValueError(f"{len(self.pages)} bytes of pages and {len(self.digests)} of digests: 4 and 8 for each")
        return self
