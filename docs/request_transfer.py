"""Ask instance b to take a prompt's KV from instance a, and await what comes of it. Start `kvbus up` first."""

from kvbus.publisher import transfer_and_wait

verdict, outcome = transfer_and_wait(source="a", destination="b", prompt="The quick brown fox jumps. " * 40)
print(verdict)
print(outcome)
