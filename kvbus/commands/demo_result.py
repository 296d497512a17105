"""What the demo has seen: the document for programs, and the table for people."""

from dataclasses import dataclass, field

from rich.table import Table

from kvbus.commands.auditing import Audit
from kvbus.commands.auditing import Verdict as AuditVerdict
from kvbus.commands.rendering import event_document
from kvbus.events import Event


@dataclass(slots=True)
class Shown:
    """What the demo has seen; the JSON document is made of exactly this."""

    engine: str
    digests: str = "off"
    model: str = ""
    prompt_tokens: int = 0
    pages: int = 0
    length_bytes: int = 0
    ttft_cold_s: float = 0.0
    ttft_staged_s: float = 0.0
    transfer_s: float = 0.0
    stage_s: float = 0.0
    cold: tuple[int, ...] = ()
    staged: tuple[int, ...] = ()
    poisoned: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    blocks_left_out: int = 0
    """Blocks that were used before a page was changed, and not after."""
    transfer: str = ""
    audit: Audit | None = None
    events: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came."""
        return self.ttft_cold_s / self.ttft_staged_s if self.ttft_staged_s else 0.0

    @property
    def tokens_identical(self) -> bool:
        """Whether the staged pages gave the same answer as computing did."""
        return bool(self.cold) and self.cold == self.staged

    @property
    def poison_detected(self) -> bool:
        """Whether a changed page changed the answer, so that it is the staged pages that answer.

        With digests the change is noticed instead: the page is left out, and the answer stays what it was.
        """
        if self.digests != "off":
            return bool(self.poisoned) and self.poisoned == self.staged and self.blocks_left_out > 0
        return bool(self.poisoned) and self.poisoned != self.staged

    @property
    def poison_text(self) -> str:
        """What is expected of a changed page, in a few words."""
        return "a changed page changes the answer" if self.digests == "off" else "a changed page is computed instead"

    def expect(self, true: bool, fault: str) -> None:
        """Note a fault unless this holds."""
        if not true:
            self.faults.append(fault)

    def document(self) -> dict[str, object]:
        """Return the result for programs."""
        return {
            "engine": self.engine,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "pages": self.pages,
            "bytes": self.length_bytes,
            "ttft_cold_s": self.ttft_cold_s,
            "ttft_staged_s": self.ttft_staged_s,
            "speedup": self.speedup,
            "tokens_identical": self.tokens_identical,
            "poison_detected": self.poison_detected,
            "transfer_s": self.transfer_s,
            "facts": [event_document(event) for event in self.events],
            "ok": not self.faults,
        }


def result_table(shown: Shown) -> Table:
    """Return the result at a glance."""
    name = shown.engine if shown.model == shown.engine else f"{shown.engine} {shown.model}"
    table = Table(title=f"{name}: {shown.prompt_tokens} tokens, one thread, the same socket")
    table.add_column("")
    table.add_column("b computes (cold)", justify="right")
    table.add_column("b has staged pages", justify="right")
    table.add_row("time to first token", f"{shown.ttft_cold_s:.2f} s", f"{shown.ttft_staged_s:.3f} s")
    table.add_row("", "", f"[bold green]{shown.speedup:.1f} times sooner[/]")
    pages = f"{shown.pages} pages, {shown.length_bytes / 1e6:.1f} MB, {shown.transfer_s * 1e3:.0f} ms"
    table.add_row("moved ahead of time", "–", pages)
    table.add_row("stage, with a's prefill", "–", f"{shown.stage_s:.2f} s")
    table.add_row("tokens", _tokens(shown.cold), _tokens(shown.staged))
    table.add_row("same tokens", "", _mark(shown.tokens_identical))
    table.add_row(
        "page changed: other answer" if shown.digests == "off" else "page changed: computed",
        "",
        _mark(shown.poison_detected),
    )
    table.add_row("evicted: right again", "", _mark(shown.recomputed == shown.cold and bool(shown.cold)))
    if shown.audit is not None:
        clean = shown.audit.verdict is AuditVerdict.CLEAN
        verdict = "[green]clean[/]" if clean else f"[red]{shown.audit.verdict.value.upper()}[/]"
        table.add_row("audit of all facts", "", f"{shown.audit.leases} leases, {verdict}")
    return table


def _tokens(tokens: tuple[int, ...]) -> str:
    return " ".join(str(token) for token in tokens[:4]) + (" …" if len(tokens) > 4 else "")


def _mark(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[red]NO[/]"
