import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvbus.errors import ConfigError, PeerError
from tests.real_model import smollm2_folder
from tests.tiny_llama import EOS_ID, HEAD_DIM, KV_HEADS, LAYERS, MAX_TOKENS, VOCAB_SIZE, make_tiny_llama

# torch costs seconds and is an extra; everything below needs it.
pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvbus.engines.transformers_model import CausalModel, Float32Array, ForwardSpelling, ModelNumbers

BLOCK = 16
ANSWER = 24
TOP_EXPONENT_BIT = np.uint32(1 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return CausalModel.load(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(3, VOCAB_SIZE, length)]


def scattered(model: CausalModel, n_pages: int) -> list[Float32Array]:
    """Pages in a pool where no two neighbours lie side by side, as after some use."""
    pool = np.zeros((2 * n_pages + 1, *model.numbers.page_shape(BLOCK)), np.float32)
    return [pool[2 * (n_pages - i)] for i in range(n_pages)]


def answer(model: CausalModel, ids: list[int], pages: list[Float32Array] | None = None) -> list[int]:
    """The greedy answer, cold or resumed from pages."""
    if not pages:
        return list(model.generate(ids, None, 0, ANSWER, stop_at_eos=False))
    cache = model.import_pages(pages)
    return list(model.generate(ids, cache, len(pages) * BLOCK, ANSWER, stop_at_eos=False))


def exported(model: CausalModel, ids: list[int]) -> list[Float32Array]:
    """All whole pages of a prompt, computed cold."""
    cache = model.new_cache()
    model.prefill(ids, cache, start=0)
    n_pages = len(ids) // BLOCK
    pages = scattered(model, n_pages)
    if pages:
        model.export_pages(cache, 0, n_pages, BLOCK, pages)
    return pages


# --- moving KV


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 300])
def test_an_answer_resumed_from_pages_has_the_tokens_of_the_cold_one(model: CausalModel, length: int) -> None:
    ids = prompt(length, seed=length)
    pages = exported(model, ids)
    assert len(pages) == length // BLOCK
    assert answer(model, ids, pages) == answer(model, ids)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_prefix_of_the_pages_gives_the_same_answer(model: CausalModel, kept: int) -> None:
    ids = prompt(5 * BLOCK + 3)
    assert answer(model, ids, exported(model, ids)[:kept]) == answer(model, ids)


@pytest.mark.parametrize("poisoned", [0, 1, 3])
def test_one_flipped_exponent_bit_in_one_pages_values_changes_the_answer(model: CausalModel, poisoned: int) -> None:
    ids = prompt(4 * BLOCK + 5)
    pages = exported(model, ids)
    pages[poisoned][:, 1] = (pages[poisoned][:, 1].view(np.uint32) ^ TOP_EXPONENT_BIT).view(np.float32)
    assert answer(model, ids, pages) != answer(model, ids)


def test_pages_of_another_prompt_change_the_answer(model: CausalModel) -> None:
    ids = prompt(4 * BLOCK + 5, seed=1)
    assert answer(model, ids, exported(model, prompt(4 * BLOCK + 5, seed=2))) != answer(model, ids)


def test_exporting_in_two_steps_gives_the_bytes_of_one(model: CausalModel) -> None:
    cache = model.new_cache()
    model.prefill(prompt(6 * BLOCK), cache, start=0)
    at_once = np.zeros((6, *model.numbers.page_shape(BLOCK)), np.float32)
    in_steps = scattered(model, 6)
    model.export_pages(cache, 0, 6, BLOCK, at_once)
    model.export_pages(cache, 0, 2, BLOCK, in_steps[:2])
    model.export_pages(cache, 2, 4, BLOCK, in_steps[2:])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(at_once, in_steps, strict=True))


def test_a_prefix_computed_in_two_steps_gives_the_pages_of_one(model: CausalModel) -> None:
    ids = prompt(6 * BLOCK + 1)
    whole, cache = exported(model, ids), model.new_cache()
    pages = scattered(model, 6)
    model.prefill(ids[: 2 * BLOCK + 5], cache, start=0)
    model.export_pages(cache, 0, 2, BLOCK, pages[:2])
    model.prefill(ids, cache, start=2 * BLOCK + 5)
    model.export_pages(cache, 2, 4, BLOCK, pages[2:])
    # Matrices of another shape are summed in another order: equal up to rounding, and equal in what they
    # answer.
    assert all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(whole, pages, strict=True))
    assert answer(model, ids, pages) == answer(model, ids)


def test_a_page_holds_keys_then_values_of_each_layer_as_the_cache_does(model: CausalModel) -> None:
    cache = model.new_cache()
    model.prefill(prompt(3 * BLOCK), cache, start=0)
    pages = np.zeros((1, *model.numbers.page_shape(BLOCK)), np.float32)
    model.export_pages(cache, 1, 1, BLOCK, pages)
    layers: list[Any] = cache.layers
    for layer, held in enumerate(layers):
        block = slice(BLOCK, 2 * BLOCK)
        assert np.array_equal(pages[0, layer, 0], held.keys[0, :, block].numpy())
        assert np.array_equal(pages[0, layer, 1], held.values[0, :, block].numpy())


def test_imported_pages_may_be_released_at_once(model: CausalModel) -> None:
    ids = prompt(3 * BLOCK + 2)
    pages = exported(model, ids)
    cache = model.import_pages(pages)
    for page in pages:
        page[:] = np.nan
    assert list(model.generate(ids, cache, 3 * BLOCK, ANSWER, stop_at_eos=False)) == answer(model, ids)


def test_pages_can_be_imported_from_read_only_memory(model: CausalModel) -> None:
    ids = prompt(2 * BLOCK + 2)
    pages = exported(model, ids)
    for page in pages:
        page.flags.writeable = False
    assert answer(model, ids, pages) == answer(model, ids)


def test_the_prompts_pages_can_be_exported_between_the_first_token_and_the_second(model: CausalModel) -> None:
    ids, cache = prompt(2 * BLOCK + 2), model.new_cache()
    tokens = model.generate(ids, cache, 0, ANSWER, stop_at_eos=False)
    first = next(tokens)
    pages = scattered(model, 2)
    model.export_pages(cache, 0, 2, BLOCK, pages)
    assert [first, *tokens] == answer(model, ids, pages) == answer(model, ids)


def test_no_pages_make_an_empty_cache(model: CausalModel) -> None:
    assert model.cached_tokens(model.import_pages([])) == 0


@pytest.mark.parametrize(("first_page", "n_pages"), [(0, 3), (2, 1), (0, 0), (-1, 1)])
def test_a_partial_block_is_never_exported(model: CausalModel, first_page: int, n_pages: int) -> None:
    cache = model.new_cache()
    model.prefill(prompt(3 * BLOCK - 1), cache, start=0)
    with pytest.raises(ValueError, match="only whole pages"):
        model.export_pages(cache, first_page, n_pages, BLOCK, scattered(model, max(n_pages, 1)))


def test_pages_of_the_wrong_number_shape_or_kind_are_refused(model: CausalModel) -> None:
    cache = model.new_cache()
    model.prefill(prompt(2 * BLOCK), cache, start=0)
    good = np.zeros((2, *model.numbers.page_shape(BLOCK)), np.float32)
    with pytest.raises(ValueError, match="1 pages were given for 2"):
        model.export_pages(cache, 0, 2, BLOCK, good[:1])
    with pytest.raises(ValueError, match="page 0 is float32"):
        model.export_pages(cache, 0, 2, BLOCK, good[..., :8])
    read_only = good.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="page 0 is read-only"):
        model.export_pages(cache, 0, 2, BLOCK, read_only)
    with pytest.raises(ValueError, match="page 1 is float32"):
        model.import_pages([good[0], good[1, :1]])


# --- answers


def test_a_wholly_cached_prompt_still_computes_its_last_token(model: CausalModel) -> None:
    ids = prompt(2 * BLOCK)
    cache = model.import_pages(exported(model, ids))
    tokens = model.generate(ids, cache, 2 * BLOCK, ANSWER, stop_at_eos=False)
    assert model.cached_tokens(cache) == 2 * BLOCK - 1
    assert list(tokens) == answer(model, ids)


def test_what_the_cache_holds_beyond_the_prompt_is_dropped(model: CausalModel) -> None:
    longer = prompt(3 * BLOCK)
    ids = [*longer[: BLOCK + 3], *prompt(9, seed=9)]
    cache = model.import_pages(exported(model, longer))
    assert list(model.generate(ids, cache, BLOCK + 3, ANSWER, stop_at_eos=False)) == answer(model, ids)


def test_an_answer_ends_with_the_end_token_only_if_asked(model: CausalModel) -> None:
    assert model.eos_ids == {EOS_ID}
    ids, tokens = prompt_that_ends(model)
    end = tokens.index(EOS_ID)
    assert list(model.generate(ids, None, 0, ANSWER)) == tokens[: end + 1]
    assert len(tokens) == ANSWER
    assert end < ANSWER - 1


def prompt_that_ends(model: CausalModel) -> tuple[list[int], list[int]]:
    for seed in range(200):
        ids = prompt(8, seed)
        tokens = answer(model, ids)
        if EOS_ID in tokens[:-1]:
            return ids, tokens
    pytest.fail("no prompt of 200 made this model end its answer")


def test_an_answer_is_no_longer_than_asked_nor_than_the_model(model: CausalModel) -> None:
    ids = prompt(MAX_TOKENS - 2)
    assert len(list(model.generate(ids, None, 0, ANSWER, stop_at_eos=False))) == 3
    assert list(model.generate(prompt(5), None, 0, 0)) == []


def test_a_full_cache_takes_no_further_token(model: CausalModel) -> None:
    cache = model.new_cache()
    model.prefill(prompt(MAX_TOKENS), cache, start=0)
    with pytest.raises(ValueError, match="cache is full"):
        model.decode_step(5, cache)


def test_step_by_step_decoding_is_what_generate_does(model: CausalModel) -> None:
    ids, cache = prompt(20), model.new_cache()
    logits = model.prefill(ids, cache, start=0)
    tokens = []
    for _ in range(5):
        assert logits.shape == (VOCAB_SIZE,)
        tokens.append(int(logits.argmax()))
        logits = model.decode_step(tokens[-1], cache)
    assert tokens == answer(model, ids)[:5]


@pytest.mark.parametrize("ids", [[], [0, VOCAB_SIZE], [-1], [5] * (MAX_TOKENS + 1)])
def test_a_prompt_that_the_model_cannot_take_is_the_requesters_fault(model: CausalModel, ids: list[int]) -> None:
    with pytest.raises(PeerError, match=r"no tokens|out of range|at most"):
        model.generate(ids, None, 0, 1)
    with pytest.raises(PeerError):
        model.prefill(ids, model.new_cache(), start=0)


def test_a_start_that_contradicts_the_cache_is_refused(model: CausalModel) -> None:
    cache = model.new_cache()
    model.prefill(prompt(8), cache, start=0)
    with pytest.raises(ValueError, match="start is 4, but the cache holds 8"):
        model.prefill(prompt(12), cache, start=4)
    with pytest.raises(ValueError, match="keep at least one"):
        model.prefill(prompt(8), cache, start=8)
    with pytest.raises(ValueError, match="cached_tokens is 9"):
        model.generate(prompt(12), cache, 9, 1)


# --- text


def test_text_survives_the_tokenizer(model: CausalModel) -> None:
    text = "the lease of page 17 is settled; naïve \N{SNOWMAN}\n"
    assert model.decode(model.encode(text)) == text


def test_a_chat_ends_where_the_assistant_begins(model: CausalModel) -> None:
    ids = model.encode_chat([{"role": "user", "content": "hello"}])
    assert ids == model.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_that_the_template_refuses_is_the_requesters_fault(model: CausalModel) -> None:
    with pytest.raises(PeerError, match="chat template refused"):
        model.encode_chat([{"content": "no role"}])


# --- the folder


def test_the_numbers_are_measured_on_the_model(model: CausalModel) -> None:
    assert model.numbers == ModelNumbers(LAYERS, KV_HEADS, HEAD_DIM, "float32", VOCAB_SIZE, MAX_TOKENS)
    assert model.numbers.page_shape(32) == (LAYERS, 2, KV_HEADS, 32, HEAD_DIM)
    assert repr(model) == "<CausalModel tiny layers=2 kv_heads=1 head_dim=32>"


def test_equal_seeds_make_equal_models_and_others_do_not(model: CausalModel, tmp_path: Path) -> None:
    again = CausalModel.load(make_tiny_llama(tmp_path / "again"))
    other = CausalModel.load(make_tiny_llama(tmp_path / "other", seed=1))
    assert again.digest() == model.digest() != other.digest()
    assert answer(again, prompt(40)) == answer(model, prompt(40)) != answer(other, prompt(40))


def test_a_folder_without_a_chat_template_takes_no_chat(tmp_path: Path) -> None:
    made = make_tiny_llama(tmp_path / "plain")
    config = json.loads((made / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(PeerError, match="no chat template"):
        CausalModel.load(made).encode_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    made = make_tiny_llama(tmp_path / "model")
    (made / name).unlink()
    with pytest.raises(ConfigError, match=rf"no {name}.*scripts/get_model"):
        CausalModel.load(made)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_refused_with_what_to_run(tmp_path: Path, name: str) -> None:
    made = make_tiny_llama(tmp_path / "model")
    (made / name).write_bytes((made / name).read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"cannot be loaded.*scripts/get_model"):
        CausalModel.load(made)


def test_weights_that_lack_a_tensor_are_refused_rather_than_made_up(tmp_path: Path) -> None:
    made = make_tiny_llama(tmp_path / "model")
    weights = load_file(made / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors.*scripts/get_model"):
        CausalModel.load(made)


def test_a_model_with_a_sliding_window_is_refused(tmp_path: Path) -> None:
    made = make_tiny_llama(tmp_path / "model")
    config = json.loads((made / "config.json").read_text())
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (made / "config.json").write_text(json.dumps(config | mistral))
    with pytest.raises(ConfigError, match="full attention"):
        CausalModel.load(made)


# --- how forward is spelled


def forward_until_5_23(input_ids: object, past_key_values: object = None, logits_to_keep: int = 0) -> None:
    """What transformers up to 5.23 takes."""


def forward_of_both(input_ids: object, past_key_values: object = None, cache: object = None) -> None:
    """What a release in between could take; it warns about the old name."""


def test_the_cache_argument_is_chosen_by_signature(model: CausalModel) -> None:
    cache = model.new_cache()
    old = ForwardSpelling.of(forward_until_5_23)
    assert old.arguments(cache) == {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    assert ForwardSpelling.of(forward_of_both).arguments(cache) == {"cache": cache, "use_cache": True}


def test_a_forward_that_takes_no_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither cache nor past_key_values"):
        ForwardSpelling.of(prompt)


# --- the real model


@pytest.fixture(scope="module")
def smollm2() -> CausalModel:
    return CausalModel.load(smollm2_folder())


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_from_pages_as_it_does_cold(smollm2: CausalModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = smollm2.encode_chat(question)
    cold = answer(smollm2, ids)
    assert "Paris" in smollm2.decode(cold)
    assert answer(smollm2, ids, exported(smollm2, ids)) == cold


@pytest.mark.model
def test_smollm2_keeps_digits_apart(smollm2: CausalModel) -> None:
    assert len(smollm2.encode("1234567890")) == 10
