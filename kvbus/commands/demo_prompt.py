"""The demo's prompts: a duty log of any length that never repeats itself, and a question about it.

Written by a small formula rather than shipped as text, so that the demo can fit any tokenizer to about a thousand
tokens and the warm-up prompt shares no block with the measured one.
"""

from kvbus.engines.client import LocalClient

PROMPT_TOKENS = 1_000
PLACES = ("north gate", "boiler house", "east pump", "weir", "tool shed", "lock chamber", "signal cabin", "quay")
DEEDS = (
    "checked the gauge",
    "oiled the hinge",
    "noted a slow leak",
    "changed a lamp",
    "cleared some reeds",
    "met a barge",
)
NAMES = ("Ada", "Bram", "Chen", "Dora", "Emil", "Fatou", "Goran")


def log_prompt(lines: int, *, day: int) -> str:
    """Return a log of so many lines for one day, and a question."""
    head = f"Duty log of the canal works, day {day}.\n"
    body = "".join(_line(day, number) for number in range(lines))
    return head + body + "Question: what should the next shift look at first, and why?\nAnswer:"


def fitting_prompt(client: LocalClient, *, day: int) -> tuple[int, ...]:
    """Return the token ids of a log of about PROMPT_TOKENS tokens, whatever the tokenizer."""
    lines = 10
    ids = client.tokenize(text=log_prompt(lines, day=day))
    per_line = max(1.0, (len(ids) - len(client.tokenize(text=log_prompt(0, day=day)))) / lines)
    lines += max(0, round((PROMPT_TOKENS - len(ids)) / per_line))
    return client.tokenize(text=log_prompt(lines, day=day))


def _line(day: int, number: int) -> str:
    minute = 6 * 60 + 7 * number + day
    mixed = (number * 2654435761 + day * 40503) >> 3
    who, where, what = NAMES[mixed % 7], PLACES[mixed // 7 % 8], DEEDS[mixed // 56 % 6]
    return f"{minute // 60 % 24:02d}:{minute % 60:02d} {who} went to the {where} and {what}; level {mixed % 97} cm.\n"
