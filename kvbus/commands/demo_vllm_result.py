"""What the vLLM demo has seen: the document for programs, and the table for people."""

from dataclasses import asdict, dataclass, field
from statistics import median

from rich.table import Table

SPEEDUP_MIN = 8.0
"""Below this the demo has not shown its point; half a prefill of a thousand tokens would still pass at two."""
EXTERNAL_MIN = 960
"""Of about 1,000 tokens: 31 whole blocks are 992, and vLLM computes at least the prompt's last token itself."""


@dataclass(slots=True)
class VllmShown:
    """The numbers and answers of one run; the JSON document is made of exactly this."""

    engine: str
    prompt_tokens: int = 0
    start_s: float = 0.0
    ttfts_cold_s: list[float] = field(default_factory=list)
    ttfts_staged_s: list[float] = field(default_factory=list)
    stage_s: float = 0.0
    move_s: float = 0.0
    pages: int = 0
    length_bytes: int = 0
    external_tokens: int = 0
    cold: tuple[int, ...] = ()
    cold_text: str = ""
    staged: tuple[int, ...] = ()
    poison_refused: tuple[int, ...] = ()
    poison_refused_blocks: int = 0
    """Blocks that the pool no longer gives after the engine was refused one."""
    poison_taken: tuple[int, ...] = ()
    poison_taken_text: str = ""
    killed: tuple[int, ...] = ()
    killed_outcome: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def ttft_cold_s(self) -> float:
        """The median time to the first token where b computes."""
        return median(self.ttfts_cold_s) if self.ttfts_cold_s else 0.0

    @property
    def ttft_staged_s(self) -> float:
        """The median time to the first token where b has staged pages."""
        return median(self.ttfts_staged_s) if self.ttfts_staged_s else 0.0

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came."""
        return self.ttft_cold_s / self.ttft_staged_s if self.ttft_staged_s else 0.0

    def expect(self, true: bool, fault: str) -> None:
        """Note a fault unless this holds."""
        if not true:
            self.faults.append(fault)

    def judge(self) -> None:
        """Hold what was seen against what the demo is to show."""
        same = bool(self.cold) and self.cold == self.staged
        self.expect(same, "the staged answer has the same tokens as the cold one")
        self.expect(self.speedup >= SPEEDUP_MIN, f"the first token comes at least {SPEEDUP_MIN:g} times sooner")
        enough = self.external_tokens >= EXTERNAL_MIN
        self.expect(
            enough, f"b itself reports at least {EXTERNAL_MIN} external tokens (it says {self.external_tokens})"
        )
        refused = self.poison_refused == self.cold and self.poison_refused_blocks > 0
        self.expect(refused, "with digests a changed page is refused and computed instead, with the same tokens")
        self.expect(self.poison_taken != self.cold, "without digests a changed page changes the answer")
        self.expect(self.killed == self.cold, "after a was killed in the middle, b computes the same tokens")

    def document(self) -> dict[str, object]:
        """Return the result for programs."""
        medians = {"ttft_cold_s": self.ttft_cold_s, "ttft_staged_s": self.ttft_staged_s, "speedup": self.speedup}
        return {**asdict(self), **medians, "ok": not self.faults}


def vllm_table(shown: VllmShown) -> Table:
    """Return the result at a glance."""
    table = Table(title=f"{shown.engine}: {shown.prompt_tokens} tokens, one core for each server")
    table.add_column("")
    table.add_column("b computes (cold)", justify="right")
    table.add_column("b has staged pages", justify="right")
    table.add_row("time to first token, median", f"{shown.ttft_cold_s:.2f} s", f"{shown.ttft_staged_s:.3f} s")
    table.add_row("", "", f"[bold green]{shown.speedup:.1f} times sooner[/]")
    moved = f"{shown.pages} pages, {shown.length_bytes / 1e6:.1f} MB, {shown.move_s * 1e3:.0f} ms"
    table.add_row("both servers started in", "", f"{shown.start_s:.0f} s")
    table.add_row("moved ahead of time", "–", moved)
    table.add_row("stage, with a's prefill", "–", f"{shown.stage_s:.2f} s")
    table.add_row("external tokens, says b", "0", str(shown.external_tokens))
    table.add_row("tokens", _tokens(shown.cold), _tokens(shown.staged))
    table.add_row("same tokens", "", _mark(bool(shown.cold) and shown.cold == shown.staged))
    table.add_row("page changed, digests on", "refused, computed: same", _mark(shown.poison_refused == shown.cold))
    table.add_row("page changed, digests off", "taken: other text", _mark(shown.poison_taken != shown.cold))
    table.add_row("a killed while pages move", f"{shown.killed_outcome}: same", _mark(shown.killed == shown.cold))
    return table


def _tokens(tokens: tuple[int, ...]) -> str:
    return " ".join(str(token) for token in tokens[:4]) + (" …" if len(tokens) > 4 else "")


def _mark(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[red]NO[/]"
