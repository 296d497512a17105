"""The other members of an instance, as one that runs a transfer meets them."""

from typing import Protocol


class TransferGroup(Protocol):
    """The other members of this instance, where it has several: a transfer is theirs as well."""

    @property
    def leads(self) -> bool:
        """Whether this member takes requests for the instance now."""

    async def open(self, transfer: str, give_up_at: float, *, wait_s: float) -> str:
        """Open a transfer over all members; return "" once this member's share has begun, or why it does not."""

    def cancel(self, transfer: str, text: str) -> bool:
        """Have every member stop its share of a transfer; False where this member cannot."""

    def leased(self, transfer: str, ticket: int) -> None:
        """The pages that are missing here are leased."""

    def nothing_missing(self, transfer: str, blocks: int) -> None:
        """Every block is here already."""

    def explain(self, transfer: str, reason: str) -> None:
        """Say why this member gives its share up, for whoever asked."""

    def refuse(self, transfer: str, reason: str) -> None:
        """Nothing of the transfer can be brought here."""

    def is_open(self, transfer: str) -> bool:
        """Whether this member's share in a transfer lives: no decision has ended it."""

    def may_give_up(self, transfer: str) -> bool:
        """Whether this member may abandon its lease by itself (P11)."""
