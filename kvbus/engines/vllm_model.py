"""What a vLLM instance is, in kvbus's words: its model's digest, and the layout of its pages.

A canonical layout is the same that the transformers engine states for the same folder, so the two exchange pages. An
opaque one names everything that decides how vLLM's kernels pack a block, and fits equal instances only.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.engines.base import Description
from kvbus.engines.model_files import folder_digest
from kvbus.engines.rope import require_known_rope
from kvbus.engines.vllm_settings import PageForm
from kvbus.errors import ConfigError
from kvbus.pool.layout import PageLayout

Foreign = Any
# vLLM's own settings, of which only what the tested releases have is read; nothing here imports vLLM.

KNOWN_PACKINGS = (("cpu", "vec", "float32", "float32"),)
"""Platform, packing, and the types of cache and model of which the conversion was compared with another engine's cache,
bit for bit."""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What vLLM says of itself. `changes` names settings that change the KV of the same weights, none as a rule.

    `dtype` is the type of the cache's elements, which says little of their meaning: all kinds of FP8 are bytes. That
    stands in `cache_dtype`, vLLM's own word for it, and what they were rounded from in `model_dtype`.
    """

    version: str
    platform: str
    packing: str
    dtype: str
    cache_dtype: str
    model_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    model: str
    model_name: str
    vocab_size: int
    tokens_max: int
    changes: tuple[str, ...] = ()


def only_spec(vllm_config: Foreign, kv_cache_config: Foreign) -> Foreign:
    """Return the one cache spec of a model; ConfigError says in words what the connector does not do."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute" or transfer.kv_role != "kv_both":
        raise ConfigError(
            "kvbus's connector loads and stores, and what does not come has to be computed: set kv_role to kv_both and "
            "kv_load_failure_policy to recompute in --kv-transfer-config (store: none keeps it from storing)",
            kv_role=transfer.kv_role,
            kv_load_failure_policy=transfer.kv_load_failure_policy,
        )
    if parallel.tensor_parallel_size != 1 or parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            "kvbus's connector serves one rank: start vLLM with tensor and pipeline parallel size 1",
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
        )
    # vLLM sets the size back to one in each replica of a dense model, and leaves its index.
    replicas = {name: getattr(parallel, f"data_parallel_{name}", 0) or 0 for name in ("size", "rank", "index")}
    if replicas["size"] > 1 or replicas["rank"] > 0 or replicas["index"] > 0:
        raise ConfigError(
            "kvbus's connector serves one engine: start vLLM without data parallelism, and instead one server for each "
            "replica, with an instance of kvbus beside each",
            **replicas,
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("kvbus's connector moves one model's KV: start vLLM without speculative decoding")
    require_known_rope(vllm_config.model_config.hf_text_config)
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(
            "kvbus's connector moves the KV of full attention in one group of layers; this model's caches are of "
            f"other kinds ({', '.join(kinds) or 'none'}): run it without the connector"
        )
    if getattr(groups[0].kv_cache_spec, "sliding_window", None):
        raise ConfigError("this model's attention sees a window only, whose blocks vLLM drops: run it without kvbus")
    return groups[0].kv_cache_spec


def changes_of(vllm_config: Foreign) -> tuple[str, ...]:
    """Name the settings by which the same folder gives other KV."""
    model, load = vllm_config.model_config, vllm_config.load_config
    changes = [f"quantization={model.quantization}"] if model.quantization else []
    if model.hf_overrides:
        changes.append(f"overrides={model.hf_overrides!r}")
    if str(load.load_format) == "dummy":
        changes.append(f"dummy seed={model.seed}")
    return tuple(changes)


def describe(facts: VllmFacts, *, folder: str, form: PageForm) -> Description:
    """Return what this engine tells its worker; ConfigError where the model's files cannot be named or read."""
    layout = layout_of(facts, model_digest(facts, folder), form)
    layout.require_valid()
    return Description(
        "vllm", facts.version, facts.model_name, layout.model_digest, layout, facts.vocab_size, facts.tokens_max
    )


def is_canonical(facts: VllmFacts, form: PageForm) -> bool:
    """Tell which form pages take; ConfigError where the canonical one was demanded and the packing is not known."""
    known = (facts.platform, facts.packing, facts.dtype, facts.model_dtype) in KNOWN_PACKINGS
    if form is PageForm.CANONICAL and not known:
        raise ConfigError(
            f"canonical pages were asked for, and how {facts.platform} packs {facts.dtype} of {facts.model_dtype} with "
            f"{facts.packing!r} is not known: set pages to auto or opaque, or run with --dtype float32"
        )
    return known and form is not PageForm.OPAQUE


def layout_of(facts: VllmFacts, digest: str, form: PageForm) -> PageLayout:
    """Return the layout of this instance's pages."""
    if is_canonical(facts, form):
        return PageLayout(
            "kv", facts.layers, facts.kv_heads, facts.block_tokens, facts.head_dim, facts.dtype, 0, 1, digest
        )
    kernels = (facts.version, facts.platform, facts.packing)
    packed = _digest("opaque", digest, *kernels, facts.cache_dtype, facts.model_dtype)
    head_dim = 2 * facts.head_dim
    return PageLayout("opaque", facts.layers, facts.kv_heads, facts.block_tokens, head_dim, facts.dtype, 0, 1, packed)


def model_digest(facts: VllmFacts, folder: str) -> str:
    """Return the digest of a model's config and weights, and of the settings that change what they compute."""
    named = Path(folder or facts.model)
    if not named.is_dir():
        raise ConfigError(
            f"the model {facts.model!r} is no local folder, so its weights cannot be told from others: start vLLM with "
            "the folder, or name it as model_folder in kv_connector_extra_config"
        )
    digest = folder_digest(named)
    return _digest("changed", digest, *facts.changes) if facts.changes else digest


def _digest(*parts: str) -> str:
    state = hashlib.blake2b(digest_size=32, person=b"kvbus-vllm")
    for part in parts:
        state.update(len(part.encode()).to_bytes(4, "little"))
        state.update(part.encode())
    return state.hexdigest()
