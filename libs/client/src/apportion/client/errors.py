"""What can go wrong between a publisher and its pool. Each error says what was expected, what was found, what to do.

A refusal is no error: it is an answer, with its numbers (``answers.Rejected``).
"""


class ClientError(Exception):
    """Something that the caller has to know; ``next_step`` says what to do about it."""

    def __init__(self, *, expected: str, found: str, next_step: str) -> None:
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(f"expected {expected}, found {found}. {next_step}")


class BusUnreachable(ClientError):
    """No server answered at the address."""


class NotLetIn(ClientError):
    """A server answered, and doesn't know our key, or our key may not have what was asked."""


class PoolNotFound(ClientError):
    """The server has no streams of such a pool."""


class RequestInvalid(ClientError):
    """What was given can't be sent at all; admission was not asked."""


class NotStored(ClientError):
    """The bus refused the wish: nothing was stored, and nothing will happen."""


class OutcomeUnknown(ClientError):
    """Nobody acknowledged the wish in time. It may be stored: the same id again is safe, and finds its answer."""

    def __init__(self, *, id: str, expected: str, found: str, next_step: str) -> None:  # noqa: A002 - CloudEvents' name
        self.id = id
        super().__init__(expected=expected, found=found, next_step=next_step)


class JobNotFound(ClientError):
    """No fact names such a job."""


class TimedOut(ClientError):
    """It has not come so far in the time given; it goes on without us."""
