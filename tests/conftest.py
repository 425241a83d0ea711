"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background hands down an ignored SIGINT, and every program that a test starts would ignore Ctrl-C too.
signal.signal(signal.SIGINT, signal.default_int_handler)
