"""An engine's steps as the text of an answer: in pieces as they come, cut where a stop string begins."""

from collections.abc import AsyncGenerator, Sequence

from kvbus.engines.base import End
from kvbus.engines.calls import Generation
from kvbus.engines.desk import Refusal
from kvbus.engines.link import EngineError
from kvbus.gateway.answers import Problem
from kvbus.gateway.openai_told import Ended


async def spoken(generation: Generation, stops: Sequence[str]) -> AsyncGenerator[str | Ended, None]:
    """Yield an answer's text in pieces, then how it ended.

    Problem 400 where the engine refuses the prompt, 503 where it fails.
    """
    cutter = Cutter(stops)
    tokens = 0
    try:
        async for step in generation:
            if isinstance(step, Refusal):
                raise Problem(400, step.text)
            if isinstance(step, End):
                for piece in cutter.end(step.text):
                    yield piece
                yield _ended(step, tokens, is_cut=cutter.is_cut())
            elif not cutter.is_cut():
                tokens += 1
                if piece := cutter.push(step.text):
                    yield piece
                if cutter.is_cut():
                    generation.cancel()  # the engine's end still says what was cached
    except EngineError as error:
        raise Problem(503, str(error), retry_after_s=1) from error


def _ended(end: End, tokens: int, *, is_cut: bool) -> Ended:
    if end.reason == "cancelled" and not is_cut:
        raise Problem(503, "the engine was told to stop", retry_after_s=1)
    reason = "length" if end.reason == "length" and not is_cut else "stop"
    return Ended(reason, end.prompt_tokens, tokens, end.cached_tokens)


class Cutter:
    """Gives text on as it comes, less what may be the beginning of a stop string, and nothing from one on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._given = 0
        self._is_cut = False

    def is_cut(self) -> bool:
        """Whether a stop string was found."""
        return self._is_cut

    def push(self, text: str) -> str:
        """Take some text, and return what may be given on."""
        if self._is_cut:
            return ""
        self._held += text
        # The one that is whole first, and of two the longer: then it does not matter in which pieces the text came.
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._is_cut = True
            return self._give(min(found)[1])
        return self._give(len(self._held) - self._beginnings())

    def end(self, whole: str) -> list[str]:
        """Take the whole text, of which tokens may have held back the end, and return what is left to give."""
        if self._is_cut:
            return []
        seen = self._given + len(self._held)
        rest = self.push(whole[seen:])
        if not self._is_cut:
            rest += self._give(len(self._held))
        return [rest] if rest else []

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self._given += length
        return given

    def _beginnings(self) -> int:
        """Return how long the longest end of the held text is that a stop string begins with."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
