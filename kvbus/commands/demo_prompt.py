"""The demo's prompts: a duty log of any length that never repeats itself, and a question about it.

Written by a small formula rather than shipped as text, so that the demo can fit any tokenizer to about a thousand
tokens and the warm-up prompt shares no block with the measured one.
"""

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


def _line(day: int, number: int) -> str:
    minute = 6 * 60 + 7 * number + day
    mixed = (number * 2654435761 + day * 40503) >> 3
    who, where, what = NAMES[mixed % 7], PLACES[mixed // 7 % 8], DEEDS[mixed // 56 % 6]
    return f"{minute // 60 % 24:02d}:{minute % 60:02d} {who} went to the {where} and {what}; level {mixed % 97} cm.\n"
