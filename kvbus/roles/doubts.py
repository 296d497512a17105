"""Pages of ours of which a reader says that they came with other bytes than their digests: a word, and no evidence.

Whether memory here, the way there, or memory there is at fault is not known from afar. So a reported page stays where
it is for as long as anybody has it: it is lent and pinned as before, and each reader compares for itself. Once nobody
does, it leaves the reuse index, and the next prompt computes its content anew; if its bytes are wrong here too, it also
stays out of use, as any spoiled page.

A report shows that it is about a page's present content by that content's digest, which only who was granted it knows.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

from kvbus.columns import from_column
from kvbus.dataplane.reader import BLOCKS_NAMED_MAX
from kvbus.events import ReaderKey, TransferStep
from kvbus.parts import PagesFound
from kvbus.pool.allocator import PageState
from kvbus.pool.digests import NONE, digest_of
from kvbus.roles.digesting import AT_ONCE_BYTES
from kvbus.roles.poolside import PoolSide
from kvbus.roles.recorder import Recorder

REPORTS_KNOWN_MAX = 4_096
"""Keys whose report was taken: as many as a reader repeats its word for until it is confirmed, seconds later."""

log = logging.getLogger(__name__)


class Doubts:
    """The reported pages of one pool that are still in its index; all of it belongs to the loop that owns the pool."""

    def __init__(self, pool: PoolSide, recorder: Recorder) -> None:
        self._pool = pool
        self._recorder = recorder
        self._digests = pool.memory.digests
        self._doubted: dict[int, int] = {}  # page → the digest of the content that is meant; at most all pages
        self._known: OrderedDict[ReaderKey, None] = OrderedDict()
        self._at_once = max(1, AT_ONCE_BYTES // pool.layout.page_bytes)

    def __repr__(self) -> str:
        return f"<Doubts pages={len(self._doubted)}>"

    def note(self, key: ReaderKey, found: PagesFound) -> None:
        """Take a reader's report, once, and tell of it in the transfer's story."""
        if key in self._known:
            return
        self._known[key] = None
        if len(self._known) > REPORTS_KNOWN_MAX:
            self._known.popitem(last=False)
        pages, digests = from_column(found.pages, 4), from_column(found.digests, 8)
        ours = {page: digest for page, digest in zip(pages, digests, strict=True) if self._is_about(page, digest)}
        self._doubted |= ours
        self._digests.reported += len(ours)
        self._digests.rewritten += found.changed
        text = _text(key, sorted(ours), found.changed, stale=len(set(pages)) - len(ours))
        log.warning("transfer %s: %s", key.transfer, text, extra={"transfer": key.transfer})
        self._recorder.event(
            TransferStep(transfer=key.transfer, request_hash=found.request_hash, step="reader_found", text=text)
        )
        self.drop()

    def drop(self) -> None:
        """Take those out of the index that nobody has; the engine's pins and fenced readers count as well.

        As many a call as may be hashed on the loop: each one's bytes are looked at, since nobody may have changed them.
        """
        if not self._doubted:
            return
        free = [page for page in self._doubted if self._is_free(page)]
        for page in free[: self._at_once]:
            digest = self._doubted.pop(page)
            if not self._is_about(page, digest):
                continue  # evicted or stored anew meanwhile: what was meant is gone
            self._pool.lender.quarantine((page,))
            if digest_of(self._pool.memory.page_bytes(page)) == digest:
                self._pool.lender.readmit((page,))
                self._digests.dropped += 1
            else:
                self._digests.spoiled += 1
                log.warning("page %d has changed after it was sealed: it is out of use, see pages_spoiled", page)

    def _is_about(self, page: int, digest: int) -> bool:
        """Whether a page has, under a name, the content of this digest."""
        allocator = self._pool.allocator
        if not 0 <= page < allocator.page_count or allocator.state(page) is not PageState.CACHED:
            return False
        return digest != NONE and self._digests.of((page,)) == (digest,)

    def _is_free(self, page: int) -> bool:
        allocator = self._pool.allocator
        return not (allocator.pins(page) or allocator.is_bound(page))


def _text(key: ReaderKey, pages: Sequence[int], changed: int, *, stale: int) -> str:
    parts: list[str] = []
    if pages:
        named = ", ".join(map(str, pages[:BLOCKS_NAMED_MAX]))
        more = f" and {len(pages) - BLOCKS_NAMED_MAX} more" if len(pages) > BLOCKS_NAMED_MAX else ""
        parts.append(f"{len(pages)} pages with other bytes than their digests: {named}{more}")
    if changed:
        parts.append(f"{changed} pages rewritten while it read them")
    if stale:
        parts.append(f"{stale} pages that hold something else by now")
    return f"{key.instance}/{key.member} found {'; '.join(parts) or 'nothing'}"
