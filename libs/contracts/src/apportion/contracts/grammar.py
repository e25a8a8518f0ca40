"""Whether the names that nearly every request holds match their grammars, looked at in the quickest way.

The decoder knows one way to check a grammar, which costs it more than all the rest of a request. Here is no verdict:
where a look says no, ``diagnosis`` looks at every text of the request, and says which one is wrong.
"""

import functools
import re
from typing import Final

from apportion.contracts.events import JobRequested
from apportion.contracts.fields import LABEL, NAME

KNOWN_MAX: Final = 1024
"""Queues, variables and keys that are remembered as good or bad; a publisher uses few."""

_matches_name = re.compile(NAME).match
_matches_label = re.compile(LABEL).match


@functools.lru_cache(maxsize=KNOWN_MAX)
def _is_queue(text: str) -> bool:
    return _matches_name(text) is not None


@functools.lru_cache(maxsize=KNOWN_MAX)
def _is_key(text: str) -> bool:
    return _matches_label(text) is not None


@functools.lru_cache(maxsize=KNOWN_MAX)
def _is_variable(text: str) -> bool:
    return text.isascii() and text.isidentifier()  # ENV_NAME, in two words


def names_match(request: JobRequested) -> bool:
    """True where the request's queue, name, variables and keys all match; False asks for a closer look.

    Their lengths were checked by the decoder.
    """
    if not _is_queue(request.queue) or (request.job_id is not None and not _matches_name(request.job_id)):
        return False
    for name in request.workload.env:
        if not _is_variable(name):
            return False
    for name in request.labels:
        if not _is_key(name):
            return False
    for name in request.annotations:
        if not _is_key(name):
            return False
    return request.placement is None  # it may hold keys, too
