"""What the scheduler's side of the connector tells the worker's side with each step, and hears back from it.

The two sides live in two processes and share nothing else. All of it is plain data: block ids of vLLM's, token ids as
columns, and request ids exactly as vLLM's scheduler knows them.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """Copy cached pages into vLLM's blocks: block `first_block` of the prompt into block_ids[0], and so on.

    `ids` is the column of the token ids up to the last block that is wanted.
    """

    request_id: str
    ids: bytes
    salt: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Copy a computed prompt's whole blocks out into pages, from block 0 on, as far as the pool lacks them.

    `mark` is how one of our own calls finds its prompt; with `needs_mark` a mark that nobody expects stores nothing.
    """

    request_id: str
    ids: bytes
    salt: str
    block_ids: tuple[int, ...]
    mark: str = ""
    needs_mark: bool = False
    cached_tokens: int = 0
    """How many of the prompt's tokens were there before its first step: found in vLLM's own cache, or loaded."""


@dataclass(frozen=True, slots=True)
class Orders:
    """One step's orders.

    `voided` names requests whose blocks go to others with this step: what is copied out of them counts no more. `held`
    names finished requests whose blocks stay theirs until the worker's side has said that the copy out has ended.
    `forget`: from here on the same tokens make other bytes (other weights), so nothing stored may be found again.
    """

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    voided: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    forget: bool = False


NO_ORDERS = Orders()


@dataclass(slots=True)
class Report:
    """What the worker's side says after a step; each id stands in one report, once.

    `failed_blocks` are vLLM's ids of blocks that did not come. `stored` are requests whose copy out has ended.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
