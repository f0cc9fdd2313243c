"""The signals with which schedulers stop a job, as the launcher and the ranks treat them."""

from __future__ import annotations

import signal

# Signals that the launcher forwards to its ranks.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# The exit codes of a program that has ended because of such a signal, but was not killed by it.
EXIT_CODES = frozenset(128 + number for number in FORWARDED)
# Two signals within this time are one request: a terminal and a scheduler also send them to the ranks.
SAME_SIGNAL_SECONDS = 1.0
# The time that a rank may take to stop, unless its config gives another.
STOP_SECONDS = 30.0
# The environment variable with the file in which a rank records another time for its launcher.
STOP_SECONDS_FILE = "ONEFOLD_STOP_SECONDS_FILE"
