"""Exit codes of the command, and the errors that carry them. Stable: scripts branch on these numbers.

What an error prints says what was expected, what was found, and what to do next.
"""

from enum import IntEnum, unique

import click


@unique
class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    """Wrong usage or configuration."""
    NOT_PLACED = 3
    """Accepted, and not as far as ``--wait`` asked within its time."""
    JOB_FAILED = 4
    """``--wait finished``: the job ended otherwise than in success."""
    NOT_FOUND = 5
    REFUSED = 6
    """Admission or the monitor refused the wish."""
    NOT_PERMITTED = 7
    BUS_UNREACHABLE = 8
    """Nobody answered; trying again may help."""
    INTEGRITY = 9
    """The log is not what was written, or a replay decided otherwise, or the demo's proof failed."""
    INTERRUPTED = 130
    TERMINATED = 143


class CommandFailed(click.ClickException):
    """A command that ends with a message and a code of ``Exit``."""

    def __init__(self, message: str, *, code: Exit = Exit.FAILURE, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = int(code)  # type: ignore[misc]  # click declares it on the class and reads it off the object
        self.hint = hint

    def format_message(self) -> str:
        """The message, and on a second line what to do."""
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


def code_of(error: BaseException) -> Exit:
    """The code with which an error of ours, of the runtime or of a service ends the command.

    An error says its own in ``exit_code`` where it has one; otherwise its kind decides.
    """
    said = getattr(error, "exit_code", None)
    if isinstance(said, int) and said in {int(code) for code in Exit}:
        return Exit(said)
    if type(error).__name__ in {"BusUnreachable", "NoRespondersError"} or isinstance(
        error, TimeoutError | ConnectionError
    ):
        return Exit.BUS_UNREACHABLE
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, PermissionError):
        return Exit.NOT_PERMITTED
    return Exit.FAILURE
