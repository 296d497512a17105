"""A tiny random Llama with its own tokenizer, made in a folder in a second: a real model without a download.

Its weights are drawn wide (standard deviation 0.5), so that its answers vary with the context: with the usual
0.02 a random model repeats one token whatever it reads, and a test of identical or of poisoned answers would
prove nothing.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
LAYERS = 2
HEADS = 2
KV_HEADS = 1
HEAD_DIM = 32
INTERMEDIATE_SIZE = 128
MAX_TOKENS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2

_WEIGHT_DEVIATION = 0.5
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Few words suffice: every byte is a token of its own, and merges only have to fill the vocabulary.
_WORDS = (
    "page lease bus token prompt cache block layer head value key ledger ticket holder lender grant "
    "reader writer server client engine worker member instance epoch round fact evidence settle return "
    "stage migrate replicate the a of to and is in that it was for on are as with his they at be this "
    "from have or by one had not but what all were when we there can an your which their said if do will "
    "each about how up out them then she many some these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know "
).split()


def make_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write the model's folder and return it; equal seeds give equal bytes, other seeds other weights."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _config())
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_ID})
    _write_tokenizer(folder)
    save_file(_weights(np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": EOS_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "initializer_range": _WEIGHT_DEVIATION,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB_SIZE,
    }


def _weights(random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE)}
    norms = ["model.norm.weight"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN_SIZE, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
        norms += [f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"]
    deviation = np.float32(_WEIGHT_DEVIATION)
    drawn = {name: random.standard_normal(shape, np.float32) * deviation for name, shape in shapes.items()}
    return drawn | {name: np.ones(HIDDEN_SIZE, np.float32) for name in norms}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 2, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the words gave {tokenizer.get_vocab_size()} tokens, expected {VOCAB_SIZE}")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "chat_template": _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": MAX_TOKENS,
            "pad_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<|endoftext|>",
        },
    )


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
