"""The scheduler's side of the vLLM connector: which prompts are loaded, which are stored, and whose blocks are held.

It decides from vLLM's requests and from answers that are already here; it waits for nothing, pins nothing and touches
no memory. A look-up's answer is a hint: pages may go before they are loaded, and the worker's side then reports which
blocks did not come. So each request loads once at most, and what fails is computed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbus.engines.link import as_column
from kvbus.engines.vllm_orders import NO_ORDERS, Load, Orders, Report, Store
from kvbus.engines.vllm_settings import PARAMS_KEY, StorePolicy, VllmSettings, Wishes
from kvbus.engines.worker_link import complain

FAILED_PAUSE_S = (1.0, 30.0)
"""First and longest pause in look-ups after loads of which nothing came: whatever is wrong there, it costs each request
a turn, and computing costs no more than it did without a cache."""


class Request(Protocol):
    """What is read of vLLM's own request."""

    @property
    def request_id(self) -> str:
        """Its name, under which everything about it is reported."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """Its prompt; None where that is no tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """How many tokens are computed before the coming step."""

    @property
    def num_preemptions(self) -> int:
        """How often its blocks were taken away."""


class Questions(Protocol):
    """`vllm_lookups.Lookups`, or what stands for it."""

    def put(self, key: str, ids: tuple[int, ...], salt: str) -> bool:
        """Put a question."""

    def take(self, key: str) -> int | None:
        """Return its answer, once it is there."""

    def drop(self, key: str) -> None:
        """Forget it."""

    def overdue(self, key: str) -> None:
        """Say that its answer was waited for as long as may be."""

    def forget(self) -> None:
        """Have the worker forget all names, without a step of vLLM's."""


@dataclass(slots=True)
class _Known:
    """One request, from its arrival until it has finished. `blocks` are its prompt's whole ones."""

    request: Request
    wishes: Wishes
    salt: str
    blocks: int
    may_load: bool
    may_store: bool
    asked_at: float | None = None
    found: int | None = None
    local_blocks: int = 0
    loaded_tokens: int = 0
    cached_tokens: int | None = None


class SchedulerSide:
    """See the module's head; all calls come on the thread that runs vLLM's scheduler."""

    def __init__(
        self, settings: VllmSettings, block_tokens: int, lookups: Questions, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._block = block_tokens
        self._lookups = lookups
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._to_store: dict[str, _Known] = {}
        self._storing: dict[str, tuple[Request, int]] = {}
        self._loading: dict[str, tuple[int, ...]] = {}
        self._sending: set[str] = set()
        self._loads: list[Load] = []
        self._held: list[str] = []
        self._left: list[str] = []
        self._wants_forget = False
        self._quiet_until = 0.0
        self._pause_s = FAILED_PAUSE_S[0]
        self.counts = {"asked": 0, "loads": 0, "stores": 0, "failed_loads": 0, "voided": 0, "untracked": 0}

    def __repr__(self) -> str:
        return f"<SchedulerSide known={len(self._known)} loading={len(self._loading)} storing={len(self._storing)}>"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is remembered of any request."""
        of_running = self._known or self._to_store or self._storing or self._loading
        return not (of_running or self._sending or self._held or self._left)

    @property
    def wants_step(self) -> bool:
        """Whether there is something to say that no request's step will carry: what is forgotten while vLLM is idle."""
        return self._wants_forget

    def arrived(self, request: Request) -> None:
        """A new request: ask at once, so that the answer is here when it is first scheduled."""
        known = self._known[request.request_id] = self._look_at(request)
        if known.may_store:
            self._to_store[request.request_id] = known
        if known.may_load:
            self._ask(known)

    def matched(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens to load beyond the local ones, whether they come later), or (None, False) for: ask again."""
        known = self._known.get(request.request_id)
        if known is None or not known.may_load:
            return 0, False
        known.local_blocks = local_tokens // self._block
        # The last prompt token is always computed: pages alone give no next token.
        usable = (len(request.prompt_token_ids or ()) - 1) // self._block
        if usable - known.local_blocks < self._settings.min_blocks:
            return 0, False
        found = self._found(known)
        if found is None:
            return None, False
        blocks = min(found, usable) - known.local_blocks
        if blocks < self._settings.min_blocks:
            return 0, False
        return blocks * self._block, True

    def allocated(self, request: Request, block_ids: Callable[[], Sequence[int]], external_tokens: int) -> None:
        """Blocks are there for what `matched` promised; called again, with 0, once they are filled."""
        known = self._known.get(request.request_id)
        if known is None or not external_tokens or not known.may_load:
            return
        known.may_load = False
        known.loaded_tokens = external_tokens
        first, count = known.local_blocks, external_tokens // self._block
        ids = self._column(request, first + count)
        where = tuple(block_ids()[first : first + count])
        self._loads.append(Load(request.request_id, ids, known.salt, first, where))
        self._loading[request.request_id] = where
        self._lookups.drop(request.request_id)
        self.counts["loads"] += 1

    def orders(self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int] | None]) -> Orders:
        """Return what the worker's side is to do with this step; `scheduled` says how many tokens each computes."""
        voided = self._voided() if self._storing or self._left else ()
        stores = self._stores(scheduled, block_ids_of) if self._to_store else ()
        if not (voided or stores or self._loads or self._held or self._wants_forget):
            return NO_ORDERS
        orders = Orders(tuple(self._loads), stores, voided, tuple(self._held), self._wants_forget)
        self._loads, self._held, self._wants_forget = [], [], False
        return orders

    def finished(self, request: Request) -> tuple[bool, dict[str, object] | None]:
        """Return (whether its blocks stay held until the copy out has ended, what the response says)."""
        request_id = request.request_id
        known = self._known.pop(request_id, None)
        self._to_store.pop(request_id, None)
        self._lookups.drop(request_id)
        storing = self._storing.pop(request_id, None)
        # One that was preempted has lost its blocks already: to hold them holds nothing, and the copy must not count.
        is_held = storing is not None and storing[1] == request.num_preemptions
        if storing is not None and not is_held:
            self._left.append(request_id)
        if is_held:
            self._held.append(request_id)
            self._sending.add(request_id)
        says: dict[str, object] | None = None
        if known is not None and known.wishes.given:
            says = {PARAMS_KEY: {"external_tokens": known.loaded_tokens}}
        return is_held, says

    def heard(self, report: Report) -> Report:
        """Take the worker's side's report; return what of it may go on to vLLM, which dies of an id it does not await.

        Look-ups pause after a load of which nothing came; that a part did not is ordinary, it was evicted meanwhile.
        """
        for request_id in report.stored:
            self._storing.pop(request_id, None)
        strange = (report.sent - self._sending) | (report.received - self._loading.keys())
        if strange:
            self.counts["untracked"] += len(strange)
            complain(f"a transfer ended that nobody awaits: {', '.join(sorted(strange)[:4])}")
        kept = Report(report.sent & self._sending, report.received & self._loading.keys(), report.failed_blocks)
        self._sending -= kept.sent
        for request_id in kept.received:
            self._judge_load(self._loading.pop(request_id), kept.failed_blocks)
        return kept

    def forget(self) -> None:
        """The weights change: everything that was stored is forgotten, at once and again behind the stores under way.

        What was found before is found no more, and a prompt of which a part stands in vLLM's blocks, computed or loaded
        with the weights from before, is not stored.
        """
        self._wants_forget = True
        self._lookups.forget()
        for request_id, known in self._known.items():
            if known.asked_at is not None:
                self._lookups.drop(request_id)
                known.found = 0
            if known.request.num_computed_tokens > 0 or request_id in self._loading:
                self._to_store.pop(request_id, None)

    # ------------------------------------------------------------------------------------------------------- inside

    def _look_at(self, request: Request) -> _Known:
        wishes = Wishes.of(getattr(request, "kv_transfer_params", None))
        blocks = len(request.prompt_token_ids or ()) // self._block
        is_plain = blocks > 0 and is_reusable(request)
        policy = self._settings.store
        # A mark means nothing to a worker's side that did not give it out, so a client gains nothing with one.
        stores = wishes.store is not False if policy is StorePolicy.EVERY else wishes.store is True
        if policy is StorePolicy.NONE and not wishes.mark:
            stores = False
        return _Known(
            request=request,
            wishes=wishes,
            salt=getattr(request, "cache_salt", None) or "",
            blocks=blocks,
            may_load=is_plain and wishes.reuse and not computes_whole_prompt(request),
            may_store=is_plain and stores,
        )

    def _ask(self, known: _Known) -> None:
        request = known.request
        known.asked_at = now = self._clock()
        ids = tuple(request.prompt_token_ids or ())[: known.blocks * self._block]
        if now < self._quiet_until or not self._lookups.put(request.request_id, ids, known.salt):
            known.found = 0
            return
        self.counts["asked"] += 1

    def _found(self, known: _Known) -> int | None:
        """Return how many blocks the pool has, None while that is not known and the wait is not over."""
        if known.asked_at is None:
            self._ask(known)
        if known.found is None:
            known.found = self._lookups.take(known.request.request_id)
        if known.found is None and self._clock() - (known.asked_at or 0.0) >= self._settings.lookup_budget_s:
            self._lookups.overdue(known.request.request_id)
            self._lookups.drop(known.request.request_id)
            known.found = 0
        return known.found

    def _stores(
        self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int] | None]
    ) -> tuple[Store, ...]:
        """Return the stores of prompts whose last whole block is computed with this step."""
        stores: list[Store] = []
        for request_id, known in tuple(self._to_store.items()):
            steps, request = scheduled.get(request_id, 0), known.request
            if steps and known.cached_tokens is None:
                known.cached_tokens = request.num_computed_tokens
            if not steps or request.num_computed_tokens + steps < known.blocks * self._block:
                continue
            del self._to_store[request_id]
            where = block_ids_of(request_id)
            if where is None or len(where) < known.blocks:
                continue
            if (known.found or 0) >= known.blocks and not known.wishes.mark:
                continue  # the pool had all of it a moment ago
            ids = self._column(request, known.blocks)
            is_none = self._settings.store is StorePolicy.NONE
            mark, cached, blocks = known.wishes.mark, known.cached_tokens or 0, tuple(where[: known.blocks])
            stores.append(Store(request_id, ids, known.salt, blocks, mark, is_none, cached))
            self._storing[request_id] = (request, request.num_preemptions)
        self.counts["stores"] += len(stores)
        return tuple(stores)

    def _voided(self) -> tuple[str, ...]:
        """Name the stores whose requests were preempted: their blocks are others' from this step on."""
        voided = tuple(
            request_id
            for request_id, (request, preemptions) in self._storing.items()
            if request.num_preemptions != preemptions
        )
        for request_id in voided:
            del self._storing[request_id]
        voided += tuple(self._left)
        self._left = []
        self.counts["voided"] += len(voided)
        return voided

    def _judge_load(self, block_ids: tuple[int, ...], failed_blocks: Collection[int]) -> None:
        if not all(block in failed_blocks for block in block_ids):
            self._pause_s = FAILED_PAUSE_S[0]
            return
        self.counts["failed_loads"] += 1
        self._quiet_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, FAILED_PAUSE_S[1])

    def _column(self, request: Request, blocks: int) -> bytes:
        return as_column(list((request.prompt_token_ids or ())[: blocks * self._block]))


def is_reusable(request: Request) -> bool:
    """Tell whether a prompt's token ids and salt say all that its KV depends on: no adapter, image or embedding does.

    Page names cover none of these, so such a prompt is neither looked for nor stored: it would be found wrongly.
    """
    strange = ("lora_request", "mm_features", "prompt_embeds", "pooling_params")
    return not any(_is_set(getattr(request, name, None)) for name in strange)


def computes_whole_prompt(request: Request) -> bool:
    """Tell whether a request needs its prompt computed, as one for the prompt's own log probabilities does."""
    if getattr(request, "skip_reading_prefix_cache", False):
        return True
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None


def _is_set(value: object) -> bool:
    return value is not None and not (isinstance(value, list | tuple) and not value)
