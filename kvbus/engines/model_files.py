"""A model folder on disk: what must be in it, its digest, and how one is made from a GGUF file.

The folder is the plain one that transformers and vLLM both load: config.json, model.safetensors in float32,
tokenizer.json and their companions. The converter is kvbus's own because the general route through
transformers takes six times as long, cannot be saved again, and loses SmolLM2's rule that every digit is a
token. gguf, safetensors and tokenizers are imported where they are used: whoever only asks for a digest needs
none of them.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbus.errors import ConfigError

Float32Array = npt.NDArray[np.float32]

Progress = Callable[[str, int, int], None]
"""Called with a stage, the position in it and its length (0: not known); the unit is the stage's own."""

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
SHARD_INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_NAME = "tokenizer.json"
DIGEST_NAME = "kvbus-digest.json"
GET_MODEL_HINT = "run scripts/get_model, or name a folder that holds a whole model"

# Large enough that the loop costs nothing beside hashing, small enough to keep no memory.
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 32
_SPECIAL_TOKEN = 3  # gguf's token type CONTROL

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def silent(_stage: str, _position: int, _length: int) -> None:
    """Report no progress."""


def model_parts(folder: Path) -> list[Path]:
    """Return config.json and the weights files of a whole model folder.

    ConfigError names the first file that is missing or unreadable. Pickled weights are not looked for:
    loading one runs whatever code is in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; {GET_MODEL_HINT}", folder=str(folder))
    read_json(_present(folder / CONFIG_NAME))
    _present(folder / TOKENIZER_NAME)
    index = folder / SHARD_INDEX_NAME
    if not index.is_file():
        return [folder / CONFIG_NAME, _present(folder / WEIGHTS_NAME)]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{index} has no weight_map with the names of the weights files; {GET_MODEL_HINT}")
    # Only the last part of a name: an index must not point outside of its folder.
    names = sorted({Path(str(name)).name for name in shards.values()})
    return [folder / CONFIG_NAME, *(_present(folder / name) for name in names)]


def folder_digest(folder: Path) -> str:
    """Return the hex digest of a model's config and weights: what two instances compare before they share KV.

    Equal digests mean that equal tokens give interchangeable KV. Hashing 538 MB at every start would cost
    seconds, so the result is kept beside the weights under what tells their very files from any others (`_stamp`);
    where the folder is read-only it is computed each time.
    """
    parts = model_parts(folder)
    key = {part.name: _stamp(part) for part in parts}
    kept = kept_json(folder / DIGEST_NAME)
    if kept.get("files") == key and isinstance(kept.get("digest"), str):
        return str(kept["digest"])
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # Name and length go in first, so that no two folders run together into the same bytes.
        state.update(f"{part.name}\0{part.stat().st_size}\0".encode())
        for block in read_blocks(part):
            state.update(block)
    digest = state.hexdigest()
    try:
        write_json(folder / DIGEST_NAME, {"digest": digest, "files": key})
    except OSError:
        return digest  # a folder that cannot be written only costs the time next time
    return digest


def _stamp(path: Path) -> list[int]:
    """Return what changes with a file's bytes, and in each copy of it.

    A size and a time of modification alone would not do: copies, images and package stores set that time as they like,
    and the kept digest is copied with the folder. The time of change and the inode are the kernel's.
    """
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in blocks of at most 1 MiB."""
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ConfigError says what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; {GET_MODEL_HINT}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object; {GET_MODEL_HINT}")
    return value


def kept_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that kvbus keeps for itself; empty if absent or torn, for it can be made again."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def convert_gguf(source: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the Llama model in a GGUF file as a float32 model folder.

    The weights are bit for bit those that transformers gets from the same file. All of them are in memory
    once (four bytes a parameter). ConfigError for another architecture or another tokenizer: a guess would
    load and then answer nonsense.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{source} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = llama_config(fields, tied=tied)
    write_json(folder / CONFIG_NAME, config)
    write_json(folder / "generation_config.json", generation_config(fields))
    write_tokenizer(fields, folder)
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    _write_weights(reader.tensors, config, folder / WEIGHTS_NAME, progress)


def llama_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the config.json that a GGUF header describes; tied: input and output embedding are one."""
    architecture = _field(fields, "general.architecture")
    if architecture != "llama":
        raise ConfigError(f"the GGUF file holds a {architecture!r} model, expected 'llama'")
    if _field(fields, "llama.rope.scaling.type", "none") != "none":
        raise ConfigError("the GGUF file scales its rotary positions; only plain ones can be converted")
    heads = int(_field(fields, "llama.attention.head_count"))
    hidden_size = int(_field(fields, "llama.embedding_length"))
    rope_theta = float(_field(fields, "llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": int(_field(fields, "tokenizer.ggml.bos_token_id")),
        "dtype": "float32",
        "eos_token_id": int(_field(fields, "tokenizer.ggml.eos_token_id")),
        "head_dim": int(_field(fields, "llama.rope.dimension_count", hidden_size // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(_field(fields, "llama.feed_forward_length")),
        "max_position_embeddings": int(_field(fields, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(_field(fields, "llama.block_count")),
        "num_key_value_heads": int(_field(fields, "llama.attention.head_count_kv", heads)),
        # The header holds a float32; its shortest spelling is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(_field(fields, "llama.attention.layer_norm_rms_epsilon")))),
        # Engines before and after transformers 5 read different spellings of the same base.
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(_field(fields, "tokenizer.ggml.tokens")),
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation_config.json: which token ends an answer."""
    eos = int(_field(fields, "tokenizer.ggml.eos_token_id"))
    return {
        "bos_token_id": int(_field(fields, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "pad_token_id": int(_field(fields, "tokenizer.ggml.padding_token_id", eos)),
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer_config.json, chat template included."""
    tokens = _field(fields, "tokenizer.ggml.tokens")
    eos = int(_field(fields, "tokenizer.ggml.eos_token_id"))
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "bos_token": tokens[int(_field(fields, "tokenizer.ggml.bos_token_id"))],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
        "model_max_length": int(_field(fields, "llama.context_length")),
        "pad_token": tokens[int(_field(fields, "tokenizer.ggml.padding_token_id", eos))],
        # The general class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it without the digits
        # rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[int(_field(fields, "tokenizer.ggml.unknown_token_id", eos))],
    }
    template = _field(fields, "tokenizer.chat_template", "")
    return config | ({"chat_template": template} if template else {})


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json: byte-level BPE behind SmolLM2's rule that every digit stands alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(fields, "tokenizer.ggml.model"), _field(fields, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"the GGUF file's tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens = _field(fields, "tokenizer.ggml.tokens")
    types = _field(fields, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / TOKENIZER_NAME))


def unpermute(weight: Float32Array, heads: int) -> Float32Array:
    """Return a query or key projection in the row order that transformers expects.

    weight is [heads * head_dim, inputs]. llama.cpp rotates neighbouring pairs of rows and therefore stores
    each head's two halves interleaved; transformers rotates one half against the other.
    """
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, inputs))


def tensor_name(name: str) -> str:
    """Return transformers' name of a GGUF tensor; ConfigError for one that a plain Llama does not have."""
    if name in _TENSOR_NAMES:
        return _TENSOR_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and block.isdecimal() and rest in _BLOCK_NAMES:
        return f"model.layers.{block}.{_BLOCK_NAMES[rest]}"
    raise ConfigError(f"the GGUF file holds a tensor {name!r} that a plain Llama model does not have")


def _write_weights(tensors: list[Any], config: Mapping[str, Any], path: Path, progress: Progress) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    weights: dict[str, Float32Array] = {}
    for position, tensor in enumerate(tensors):
        progress("convert", position, len(tensors))
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        suffix = tensor.name.partition(".")[2].partition(".")[2]
        weights[tensor_name(tensor.name)] = unpermute(weight, heads[suffix]) if suffix in heads else weight
    progress("convert", len(tensors), len(tensors))
    progress("write", 0, 0)
    save_file(weights, path, metadata={"format": "pt"})  # transformers refuses a file without this mark


def _field(fields: Mapping[str, Any], name: str, default: object = None) -> Any:  # noqa: ANN401 - a header's value
    value = fields.get(name, default)
    if value is None:
        raise ConfigError(f"the GGUF file's header has no field {name!r}; it is not a whole chat model")
    return value


def _present(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"model folder {path.parent} has no {path.name}; {GET_MODEL_HINT}")
    return path
