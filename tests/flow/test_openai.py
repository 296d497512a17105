"""The official `openai` client and curl against `kvbus up`: what one instance computed, another answers from."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.flow.openai_clients import TURNS, Serving, serving, staged_answer_is_the_sources, story
from tests.flow.town import BLOCK
from tests.real_model import smollm2_folder


@pytest.fixture(scope="module")
def toy(folder: Path) -> Iterator[Serving]:
    folder.chmod(0o700)
    with serving(folder, "toy", {"work_rounds": 1}, "--transport", "memory") as one:
        yield one


# H28
def test_b_answers_from_pages_that_a_computed_and_says_the_same(toy: Serving) -> None:
    staged_answer_is_the_sources(toy)


def test_the_client_lists_models_and_each_name_reaches_its_instance(toy: Serving) -> None:
    client = toy.openai()
    assert [model.id for model in client.models.list()] == ["toy@a", "a", "toy@b", "b"]
    for name, who in (("a", "toy@a"), ("toy@b", "toy@b")):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="x", max_tokens=1).model == who
    assert toy.openai("b").completions.create(model="toy", prompt="x", max_tokens=1).model == "toy@b"


# H37
def test_a_hint_names_a_source_and_what_it_lacks_is_computed(toy: Serving) -> None:
    client, text = toy.openai(), story("the hint", 5)
    cold = client.completions.create(model="a", prompt=text, max_tokens=12)
    for source, blocks in (("nobody", 0), ("a", len(text) // BLOCK)):  # first a hint that leads nowhere
        hint = {"kv_transfer_params": {"kvbus": {"source": source}}, "cache_salt": "" if blocks else source}
        told = client.completions.create(model="b", prompt=text, max_tokens=12, extra_body=hint)
        assert told.choices[0].text == cold.choices[0].text
        assert told.usage is not None
        assert told.usage.prompt_tokens_details is not None
        assert told.usage.prompt_tokens_details.cached_tokens == blocks * BLOCK


def test_the_clients_errors_are_those_of_the_api(toy: Serving) -> None:
    client = toy.openai()
    with pytest.raises(openai.BadRequestError, match="name one of toy@a, toy@b") as several:
        client.completions.create(model="toy", prompt="x")
    assert several.value.code == "model_ambiguous"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as tools:
        client.chat.completions.create(
            model="a", messages=TURNS, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_says_on_b_what_it_said_on_a(folder: Path) -> None:
    state = folder / "smollm2"
    state.mkdir(mode=0o700)
    with serving(state, "transformers", {"folder": str(smollm2_folder())}) as one:
        staged_answer_is_the_sources(one)
