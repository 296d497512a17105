"""What tests with the official `openai` client share: `kvbus up` with a model behind its doors, and prompts."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvbus.engines.client import LocalClient
from tests.absent import absent
from tests.flow.command_line import Up, up
from tests.flow.town import BLOCK, OWED, REST_S
from tests.waiting import wait_until

SENTENCE = "The keeper of the lock wrote the level of the water into the book, and lit the lamp. "


@dataclass(slots=True)
class Serving:
    """A running `kvbus up`: its gateway, and clients of it."""

    running: Up
    url: str = field(init=False)

    def __post_init__(self) -> None:
        """Take the gateway's address."""
        self.url = str(self.running.document["http_url"])

    def openai(self, instance: str = "") -> OpenAI:
        """The official client, of the gateway or of one instance's own base URL."""
        below = f"/instances/{instance}" if instance else ""
        return OpenAI(base_url=f"{self.url}{below}/v1", api_key="none", timeout=250, max_retries=0)

    def async_openai(self) -> AsyncOpenAI:
        """The official client on an event loop."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=250, max_retries=0)

    def local(self, instance: str) -> LocalClient:
        """A client of an instance's worker, on this host."""
        sockets = self.running.document["sockets"]
        assert isinstance(sockets, dict)
        return LocalClient(Path(sockets[instance]))

    def ask(self, destination: str, source: str, **body: object) -> dict[str, Any]:
        """Ask for a transfer."""
        asked = {"source": source, **body}
        answered = httpx.post(f"{self.url}/instances/{destination}/v1/kv_transfer", json=asked, timeout=60)
        assert answered.status_code == 202, answered.text
        return dict(answered.json())

    def transfer(self, destination: str, source: str, **body: object) -> dict[str, Any]:
        """Ask for a transfer that is taken on, and return how it ended."""
        said = self.ask(destination, source, **body)
        assert said["status"] == "accepted", said
        place = f"{self.url}/instances/{destination}/v1/kv_transfer/{said['request_hash']}"
        told: dict[str, Any] = httpx.get(place, params={"wait_s": 30}, timeout=60).json()
        return told

    def stats(self, instance: str) -> dict[str, int]:
        """The published counters, which add up whenever they are looked at."""
        stats: dict[str, int] = httpx.get(f"{self.url}/instances/{instance}/v1/kv_transfer/stats", timeout=60).json()
        assert stats["fired"] == stats["transferred"] + stats["failed"] + stats["inflight"], stats
        return stats

    def at_rest(self) -> None:
        """Wait until nothing is lent, written, held back or owed at either instance: all of the pool is back."""
        for name in ("a", "b"):
            with self.local(name) as client:
                last: dict[str, object] = {}

                def idle(client: LocalClient = client, last: dict[str, object] = last) -> bool:
                    last.update(client.stats())
                    whole = int(str(last["pages_free"])) + int(str(last["pages_cached"])) == last["pages"]
                    return whole and not any(last[counter] for counter in OWED)

                wait_until(idle, REST_S, what=f"{name} is at rest: {last}")


@contextmanager
def serving(state: Path, engine: str, options: Mapping[str, object], *arguments: str) -> Iterator[Serving]:
    """A `kvbus up` of two instances with this engine, which is at rest when the block ends."""
    chosen = ("--engine", engine, "--engine-options", json.dumps(dict(options)))
    with up(state, *chosen, *arguments) as running:
        one = Serving(running)
        yield one
        one.at_rest()


def story(name: str, sentences: int) -> str:
    """A text that no other name shares the beginning of."""
    return f"Of {name}. " + SENTENCE * sentences


TURNS: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You keep the book of a lock, and answer in one sentence."},
    {"role": "user", "content": story("the lock", 6) + "What did the keeper light?"},
]


def staged_answer_is_the_sources(one: Serving) -> None:
    """One instance answers, its KV goes to b by curl, and b says the same from the pages that came."""
    client = one.openai()
    before = one.stats("b")
    cold = client.chat.completions.create(model="a", messages=TURNS, max_tokens=16)
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    said = curl(f"{one.url}/instances/b/v1/kv_transfer", {"source": "a", "messages": TURNS})
    assert (said["http_code"], said["status"]) == (202, "accepted")
    place = f"{one.url}/instances/b/v1/kv_transfer/{said['request_hash']}"
    told = httpx.get(place, params={"wait_s": 30}, timeout=60).json()
    assert told["status"] == "transferred", told
    assert told["prompt_tokens"] == cold.usage.prompt_tokens

    staged = client.chat.completions.create(model="b", messages=TURNS, max_tokens=16)
    assert staged.usage is not None
    assert staged.usage.prompt_tokens_details is not None
    whole_blocks = (staged.usage.prompt_tokens - 1) // BLOCK  # the last token is always computed
    assert staged.usage.prompt_tokens_details.cached_tokens == whole_blocks * BLOCK > 0
    assert told["pages"]["moved"] >= whole_blocks
    assert staged.choices[0].message.content == cold.choices[0].message.content
    streamed = client.chat.completions.create(model="b", messages=TURNS, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == cold.choices[0].message.content
    by_curl = curl(f"{one.url}/instances/b/v1/chat/completions", {"messages": TURNS, "max_tokens": 16})
    assert by_curl["choices"] == [choice.model_dump(exclude_unset=True) for choice in cold.choices]
    after = one.stats("b")
    assert (after["fired"], after["transferred"]) == (before["fired"] + 1, before["transferred"] + 1)
    one.at_rest()


def curl(url: str, body: object) -> dict[str, object]:
    """What curl gets for a JSON body, and the status as `http_code`."""
    command = ["curl", "--silent", "--max-time", "85", "--write-out", "\n%{http_code}", url, "--data", json.dumps(body)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    except FileNotFoundError:
        absent("curl is not installed")
    document, _, status = ran.stdout.rpartition("\n")
    return {**json.loads(document), "http_code": int(status)}
