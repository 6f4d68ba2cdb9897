"""Tracebacks of processes that end together, held back until it is known which one was the cause.

Where one is killed, the others end in tracebacks of whatever they were doing, of Python or of C++,
and none of it says what happened.
"""

import re
import sys
import threading
from typing import IO

_BEGINS = re.compile(
    rb"(Traceback \(most recent call last\):|Fatal Python error: |\*\*\* .*stack trace: \*\*\*"
    rb"|F\d{4} \d\d:\d\d:\d\d)"  # of C++, before it ends a process
)
_OF_OTHERS = b"JAX distributed service detected fatal errors"  # a process of any machine


class Errors:
    """Passes on what a process writes to stderr, until a traceback begins: from there it is held.

    Attributes:
      held: the lines from there on.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.held: list[bytes] = []
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                if self.held or _BEGINS.match(line):
                    self.held.append(line)
                else:
                    _write(line)

    def wait(self) -> None:
        """Until all is read of a process that has ended; not for ever, if it has a child."""
        self._reader.join(timeout=5)

    def are_of_others(self) -> bool:
        """Whether they say themselves that another process was the cause."""
        return any(_OF_OTHERS in line for line in self.held)

    def show(self) -> None:
        """All that was held."""
        _write(b"".join(self.held))

    def short(self) -> str:
        """The line that says most, or nothing: of Python the last one, of C++ the first."""
        lines = [x.decode(errors="replace").strip() for x in self.held if x.strip()]
        if not lines:
            return ""
        if lines[0].startswith("Traceback"):
            return lines[-1][:160]
        return re.sub(r"^F\d{4} .*?\] ", "", lines[0]).partition(". ")[0][:160]


def _write(content: bytes) -> None:
    sys.stderr.buffer.write(content)
    sys.stderr.buffer.flush()
