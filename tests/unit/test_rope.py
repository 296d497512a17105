"""Which rotary positions are taken: those by which a key depends on its token's place alone, in both engines alike."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbus.engines.rope import KNOWN_ROPES, require_known_rope, rope_types
from kvbus.errors import ConfigError
from tests.absent import absent
from tests.tiny_llama import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_DEADLINE_S = 240.0
"""Importing vLLM takes ten seconds alone."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
COMPARED = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}
COMPARE = """
import json, sys, torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
differs = {}
with set_current_vllm_config(VllmConfig()):
    for name, extra in json.loads(sys.argv[1]).items():
        parameters = {"rope_type": name, "rope_theta": 10000.0, **extra}
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=parameters
        )
        ours = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
        theirs = get_rope(32, 2048, rope_parameters=parameters, dtype=torch.float32).cos_sin_cache[:2048]
        pairs = zip(ours, theirs.chunk(2, dim=-1))
        differs[name] = max(float((mine[0, :, :16] - yours).abs().max()) for mine, yours in pairs)
print(json.dumps(differs))
"""


def config(rope: object = None, **other: object) -> SimpleNamespace:
    return SimpleNamespace(model_type="llama", rope_parameters=rope, **other)


def test_kinds_that_no_length_changes_are_taken_also_where_none_is_named() -> None:
    for kind in KNOWN_ROPES:
        require_known_rope(config({"rope_type": kind}))
        require_known_rope(SimpleNamespace(rope_scaling={"type": kind}))
    require_known_rope(SimpleNamespace())
    require_known_rope(config({"full_attention": {"rope_type": "yarn"}, "other": {"rope_theta": 1.0}}))


@pytest.mark.contract("37")
@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        (config(LONGROPE), "longrope"),
        (config(DYNAMIC), "dynamic"),
        (SimpleNamespace(rope_scaling={"type": "su"}), "su"),
        (config({"full_attention": {"rope_type": "default"}, "sliding_attention": DYNAMIC}), "dynamic"),
        (config({"rope_type": "default", "use_fope": True}), "fope"),
        (config({"rope_type": "default"}, dual_chunk_attention_config={"chunk_size": 64}), "dual_chunk"),
    ],
)
def test_kinds_that_depend_on_a_length_are_refused_by_name_with_those_that_are_taken(
    stated: SimpleNamespace, kind: str
) -> None:
    assert kind in rope_types(stated)
    with pytest.raises(ConfigError, match=f"type {kind}, .*default, linear, llama3, yarn"):
        require_known_rope(stated)


@pytest.mark.contract("37")
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_transformers_engine_loads_no_model_whose_keys_depend_on_the_length_of_a_prompt(
    tmp_path: Path, rope: dict[str, object]
) -> None:
    pytest.importorskip("torch")
    from kvbus.engines.transformers_model import CausalModel

    folder = make_tiny_llama(tmp_path / "tiny")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"rope_parameters": rope}))
    with pytest.raises(ConfigError, match=f"type {rope['rope_type']}, .*use another model"):
        CausalModel.load(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_and_transformers_rotate_by_the_same_numbers_for_each_kind_that_is_taken() -> None:
    if not VLLM.exists():
        absent("no vLLM here: make vllm installs it into .venv-vllm", excused="KVBUS_WITHOUT_VLLM")
    assert tuple(COMPARED) == KNOWN_ROPES
    ended = subprocess.run(
        [str(VLLM), "-c", COMPARE, json.dumps(COMPARED)],
        capture_output=True,
        text=True,
        timeout=VLLM_DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    differs = json.loads(ended.stdout.splitlines()[-1])
    assert set(differs) == set(KNOWN_ROPES)
    assert max(differs.values()) < 1e-3, differs  # the last bits of angles of some thousands
