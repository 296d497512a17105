"""A small process beside an embedded broker: when the command that started the broker has been killed, it ends it.

`python -m kvbus.commands.minder COMMAND_PID BROKER_PID`. It holds both as pidfds, so that it can never end another
process that got the same number. A command that ends in order stops its broker itself, and the minder goes with it.
"""

import os
import select
import signal
import sys

KILL_AFTER_MS = 5_000
"""The broker flushes its streams on the kind signal; what takes longer than this is stuck."""


def mind(command_pid: int, broker_pid: int) -> None:
    """Wait until either process has ended; if it was the command, end the broker."""
    command, broker = os.pidfd_open(command_pid), os.pidfd_open(broker_pid)
    if os.getppid() != command_pid:
        return  # it ended before we held it: the number may mean another process by now
    waiting = select.poll()
    waiting.register(command, select.POLLIN)
    waiting.register(broker, select.POLLIN)
    ended = {descriptor for descriptor, _ in waiting.poll()}
    if broker in ended:
        return
    signal.pidfd_send_signal(broker, signal.SIGTERM)
    waiting.unregister(command)
    if not waiting.poll(KILL_AFTER_MS):
        signal.pidfd_send_signal(broker, signal.SIGKILL)


if __name__ == "__main__":
    try:
        mind(int(sys.argv[1]), int(sys.argv[2]))
    except ProcessLookupError:
        sys.exit(0)  # one of them has ended already: there is nothing to mind
