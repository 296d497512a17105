"""The connector that vLLM loads: `kv_connector_module_path: kvbus.engines.vllm`, `kv_connector: KvbusConnector`.

vLLM makes two objects of the class, one beside its scheduler and one in the process that holds the KV, and carries
plain data from the first to the second and back with each step. All that is decided stands in modules that import no
vLLM (`vllm_scheduler`, `vllm_worker`, `vllm_mover`); here their words become vLLM's. Nothing here waits.

Loads are asynchronous always: a request whose pages are on their way is parked, and what does not come is computed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from kvbus.engines.vllm_jobs import Jobs
from kvbus.engines.vllm_link import WorkerAttachment
from kvbus.engines.vllm_lookups import Lookups
from kvbus.engines.vllm_model import VllmFacts, changes_of, describe, is_canonical, only_spec
from kvbus.engines.vllm_mover import Mover
from kvbus.engines.vllm_orders import NO_ORDERS, Orders, Report
from kvbus.engines.vllm_pages import CanonicalCopier, OpaqueCopier, in_layer_order
from kvbus.engines.vllm_scheduler import SchedulerSide
from kvbus.engines.vllm_server import Server
from kvbus.engines.vllm_settings import VllmSettings, check_version
from kvbus.engines.vllm_worker import WorkerSide
from kvbus.errors import ConfigError

Foreign = Any
# vLLM's own types change with its releases; the connector touches only what the tested ones have.


@dataclass
class KvbusMetadata(KVConnectorMetadata):  # type: ignore[misc] # vLLM's types are not there to check
    """One step's orders, on their way to the worker's side."""

    orders: Orders = NO_ORDERS


@dataclass
class KvbusWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM's types are not there to check
    """Stores that have ended while their requests run, on their way to the scheduler's side."""

    stored: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvbusWorkerMetadata":
        """Return both together; there is one worker, so vLLM has no cause to ask."""
        return KvbusWorkerMetadata(self.stored | getattr(other, "stored", set()))


class KvbusConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM's types are not there to check
    """See the module's head. Each hook is called for one of the two roles only, and uses that role's part only."""

    def __init__(self, vllm_config: Foreign, role: KVConnectorRole, kv_cache_config: Foreign) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = VllmSettings.from_plain(self._kv_transfer_config.kv_connector_extra_config)
        check_version(vllm_version, allow_untested=settings.allow_untested_version)
        spec = only_spec(vllm_config, kv_cache_config)
        self._settings = settings
        self._scheduling: SchedulerSide | None = None
        self._lookups: Lookups | None = None
        self._working: WorkerSide | None = None
        self._attachment: WorkerAttachment | None = None
        self._report: Report | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._lookups = Lookups(settings.socket)
            self._lookups.start()
            self._scheduling = SchedulerSide(settings, spec.block_size, self._lookups, time.monotonic)

    @property
    def requires_kv_delivery(self) -> bool:
        """Stores are best effort: what a preemption costs is a later miss."""
        return False

    # The scheduler's side -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Foreign) -> None:
        """Look at a request as it comes."""
        self._scheduler().arrived(request)

    def get_num_new_matched_tokens(self, request: Foreign, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond the local ones, or None for: ask again."""
        return self._scheduler().matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Foreign, blocks: Foreign, num_external_tokens: int) -> None:
        """Note which blocks are to be filled."""
        self._scheduler().allocated(request, lambda: blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Foreign) -> KvbusMetadata:
        """Return this step's orders."""
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> Sequence[int] | None:
            groups = state.get_block_ids(request_id)
            return None if groups is None else groups[0]

        return KvbusMetadata(self._scheduler().orders(scheduler_output.num_scheduled_tokens, block_ids_of))

    def update_connector_output(self, connector_output: Foreign) -> None:
        """Hear what has ended, and keep from vLLM what it does not await."""
        told = connector_output.kv_connector_worker_meta
        sent, received = connector_output.finished_sending, connector_output.finished_recving
        if not (sent or received or told):
            return
        stored = told.stored if isinstance(told, KvbusWorkerMetadata) else set()
        failed = connector_output.invalid_block_ids
        kept = self._scheduler().heard(Report(set(sent or ()), set(received or ()), set(failed or ()), stored))
        connector_output.finished_sending = kept.sent
        connector_output.finished_recving = kept.received

    def request_finished(self, request: Foreign, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a finished request's blocks stay its own until they are copied out."""
        del block_ids
        return self._scheduler().finished(request)

    def request_finished_all_groups(
        self, request: Foreign, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say the same for a model with one group of caches; others were refused at the start."""
        del block_ids
        return self._scheduler().finished(request)

    def reset_cache(self) -> bool | None:
        """The weights may change: nothing that was stored is found from here on."""
        self._scheduler().forget()
        return True

    def has_pending_push_work(self) -> bool:
        """Have an idle engine make one step where that step has to carry what is to be forgotten."""
        return self._scheduling is not None and self._scheduling.wants_step

    # The worker's side ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Begin: the memory is there."""
        settings = self._settings
        if places := sorted({cache.device.type for cache in kv_caches.values()} - {"cpu"}):
            raise ConfigError(
                f"this vLLM keeps its KV on {', '.join(places)}, and kvbus's connector copies the host's memory only: "
                "run vLLM's CPU build, or run it without the connector"
            )
        facts = facts_of(self._vllm_config, self._kv_cache_config)
        about = describe(facts, folder=settings.model_folder, form=settings.pages)
        form = CanonicalCopier if is_canonical(facts, settings.pages) else OpaqueCopier
        caches = [cache.view(torch.uint8).numpy() for cache in in_layer_order(kv_caches)]
        mover = Mover(form(caches, about.layout))
        jobs = Jobs(about, Server(settings.server, about.model), mover)
        self._working = WorkerSide(mover)
        self._attachment = WorkerAttachment(settings.socket, about, mover, jobs.serve)
        self._attachment.start()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks change hands before this step's forward pass."""
        orders = _orders(kv_connector_metadata)
        if orders.voided:
            self._worker().before_forward(orders)

    def start_load_kv(self, forward_context: Foreign, **kwargs: object) -> None:
        """Begin this step's loads."""
        del forward_context, kwargs
        orders = _orders(self._connector_metadata)
        if orders is not NO_ORDERS:
            self._worker().begin_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a parked request is in no forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Foreign, **kwargs: object) -> None:
        """Do nothing: whole prompts are stored, behind the pass that completes them."""

    def wait_for_save(self) -> None:
        """Begin this step's stores."""
        orders = _orders(self._connector_metadata)
        if orders is not NO_ORDERS:
            self._worker().begin_stores(orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Say what has ended, each once; vLLM asks for failed blocks and for what was stored right behind this."""
        del finished_req_ids
        report = self._report = None if self._working is None else self._working.report()
        return (None, None) if report is None else (report.sent, report.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that did not come, in the same step in which their load is said to have ended."""
        return set() if self._report is None else self._report.failed_blocks

    def build_connector_worker_meta(self) -> KvbusWorkerMetadata | None:
        """Tell the scheduler's side which stores have ended."""
        report = self._report
        return KvbusWorkerMetadata(report.stored) if report is not None and report.stored else None

    def shutdown(self) -> None:
        """Let go; what the kvbus worker lent to this process comes back with its end."""
        if self._lookups is not None:
            self._lookups.stop()
        if self._attachment is not None:
            self._attachment.stop()

    def _scheduler(self) -> SchedulerSide:
        if self._scheduling is None:
            raise ConfigError("a call for the scheduler's side came to the worker's")
        return self._scheduling

    def _worker(self) -> WorkerSide:
        if self._working is None:
            raise ConfigError(
                "a call for the worker's side came before its memory was registered, or to the scheduler's"
            )
        return self._working


def _orders(metadata: KVConnectorMetadata | None) -> Orders:
    return metadata.orders if isinstance(metadata, KvbusMetadata) and metadata.orders != NO_ORDERS else NO_ORDERS


def facts_of(vllm_config: Foreign, kv_cache_config: Foreign) -> VllmFacts:
    """Return what vLLM says of this instance."""
    group = kv_cache_config.kv_cache_groups[0]
    spec, model, cache_dtype = group.kv_cache_spec, vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    names = model.served_model_name
    name = names[0] if isinstance(names, list) else names
    return VllmFacts(
        version=vllm_version,
        platform=current_platform.device_type,
        packing=_packing(spec, model.dtype, cache_dtype),
        dtype=str(spec.dtype).removeprefix("torch."),
        cache_dtype=cache_dtype,
        model_dtype=str(model.dtype).removeprefix("torch."),
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_tokens=spec.block_size,
        model=str(model.model),
        model_name=str(name or model.model),
        vocab_size=int(model.get_vocab_size()),
        tokens_max=int(model.max_model_len),
        changes=changes_of(vllm_config),
    )


def _packing(spec: Foreign, model_dtype: torch.dtype, cache_dtype: str) -> str:
    """Return how the CPU kernels pack a block, as they choose it themselves; another platform's is not known.

    They choose by the model's type, not by the cache's.
    """
    if current_platform.device_type != "cpu":
        return "unknown"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(model_dtype, spec.block_size, spec.head_size, cache_dtype))
