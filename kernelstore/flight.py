"""Single flight: of all threads and processes that want one cold kernel, one compiles and the others wait for it.

Between processes a claim row decides (`kernelstore.db.claims`), between threads a dictionary. Nothing here can fail
the program: who cannot claim, or has waited too long, compiles alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from kernelstore.artifact import Artifact
from kernelstore.db.claims import Claim
from kernelstore.errors import CompileError, InvalidOption, KernelStoreError, UnsupportedArch
from kernelstore.keeping import Keeping
from kernelstore.key import Key

__all__ = ["Made", "single_flight"]

# Who compiles says so that often; most compiles are over before the first time.
_BEAT_S = 2.0

# Without a beat for so long by the waiter's own clock, the owner is stopped or gone: somebody else compiles.
_STALE_S = 10.0

# The longest wait of all, however the owner beats.
_MAX_WAIT_S = 600.0

# Between two looks at a claim, at first and at most: a look takes 20 us.
_POLL_S = 0.002
_MAX_POLL_S = 0.05

# How long the row of a failed compile stays for those that wait.
_LINGER_S = 1.0

# What the program is at fault for; others of the same request would meet it too.
_SHARED_ERRORS: dict[str, type[KernelStoreError]] = {
    error.__name__: error for error in (CompileError, InvalidOption, UnsupportedArch)
}

_logger = logging.getLogger("kernelstore.compiler")


@dataclasses.dataclass(slots=True)
class _Flight:
    """One thread's attempt, for the other threads of the process."""

    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    artifact: Artifact | None = None
    error: KernelStoreError | None = None


_flights: dict[tuple[str, Key], _Flight] = {}

Made = tuple[Artifact, bool]
"""An artifact, and whether it is for others too: where it is in doubt that it is what its key says, it is not."""


def single_flight(key: Key, keeping: Keeping, make: Callable[[Claim | None], Made]) -> Artifact:
    """Return the artifact with that key: made by this caller, or by the one that is at it already.

    Parameters
    ----------
    make : callable
        Compiles, stores, and gives the claim back; ``None`` for a claim means that there is none. Returns the artifact
        and whether it is for others too.

    Raises
    ------
    CompileError, UnsupportedArch, ToolchainError
        As `make` raises, or as it did for the one that was waited for.
    """
    store = keeping.store
    if store is None:
        return make(None)[0]
    place = str(store.path), key
    deadline = time.monotonic() + _MAX_WAIT_S
    while True:
        own = _Flight()
        flight = _flights.setdefault(place, own)
        if flight is own:
            return _lead(place, own, keeping, make)
        if not flight.ended.wait(max(0.0, deadline - time.monotonic())):
            return make(None)[0]
        if flight.error is not None:
            # Each thread gets its own: tracebacks are written into the object.
            raise copy.copy(flight.error)
        found = keeping.get(key) or flight.artifact
        if found is not None:
            return found


def _lead(place: tuple[str, Key], flight: _Flight, keeping: Keeping, make: Callable[[Claim | None], Made]) -> Artifact:
    try:
        artifact, is_for_all = _claim_or_wait(place[1], keeping, make)
        flight.artifact = artifact if is_for_all else None
    except tuple(_SHARED_ERRORS.values()) as error:
        flight.error = error
        raise
    else:
        return artifact
    finally:
        # On any other end, such as a KeyboardInterrupt, one of those that wait leads next.
        _flights.pop(place, None)
        flight.ended.set()


def _claim_or_wait(key: Key, keeping: Keeping, make: Callable[[Claim | None], Made]) -> Made:
    deadline = time.monotonic() + _MAX_WAIT_S
    dead: bytes | None = None
    while time.monotonic() < deadline:
        claim = keeping.claim(key, dead)
        if claim is None:
            break
        if claim.state == "won":
            return _own(claim, keeping, make)
        if claim.state == "running":
            _logger.info("waiting for %s, which compiles %s", claim.owner, key)
            claim = _end_of(claim, keeping, deadline)
        if claim.state == "dead":
            dead = claim.nonce
            continue
        found = keeping.get(key) if claim.state in ("stored", "gone") else None
        if found is not None:
            return found, True
        if claim.state == "failed" and (error := _error_of(claim)):
            raise error
        if claim.state != "gone":
            break
    # The store cannot tell, the other's was not stored or cannot be read, or it takes too long.
    return make(None)


def _own(claim: Claim, keeping: Keeping, make: Callable[[Claim | None], Made]) -> Made:
    try:
        with _beating(claim, keeping):
            return make(claim)
    except tuple(_SHARED_ERRORS.values()) as error:
        keeping.end_claim(claim, "failed", _text_of(error))
        # Those that wait look many times within this; nobody else shall find it.
        later = threading.Timer(_LINGER_S, keeping.end_claim, (claim,))
        later.daemon = True
        later.start()
        raise
    except BaseException:
        keeping.end_claim(claim)
        raise


def _end_of(claim: Claim, keeping: Keeping, deadline: float) -> Claim:
    """Wait for the end of another one's compile.

    Returns
    -------
    Claim
        As its row ended; or with the state ``"gone"``: given back, with the artifact in the same transaction, or taken
        over; ``"dead"``: its owner ended or stopped; ``"running"`` at the deadline.
    """
    poll_s, beat, seen = _POLL_S, claim.beat, time.monotonic()
    while True:
        time.sleep(poll_s)
        poll_s = min(_MAX_POLL_S, 1.5 * poll_s)
        now = time.monotonic()
        row = keeping.look_at_claim(claim.key)
        if row is None or row.nonce != claim.nonce:
            return dataclasses.replace(claim, state="gone")
        if row.state != "running" or now >= deadline:
            return row
        if row.beat != beat:
            beat, seen = row.beat, now
        if now - seen > _STALE_S or row.is_gone():
            _logger.info("%s ended or stopped while it compiled %s", claim.owner, claim.key)
            return dataclasses.replace(row, state="dead")


@contextlib.contextmanager
def _beating(claim: Claim, keeping: Keeping) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            if not keeping.beat(claim):
                return

    thread = threading.Thread(target=beat, name="kernelstore-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _text_of(error: KernelStoreError) -> str:
    return json.dumps({"error": type(error).__name__, "message": error.message, "fields": error.fields}, default=str)


def _error_of(claim: Claim) -> KernelStoreError | None:
    """Return the error that another process met; ``None`` where its row does not tell."""
    try:
        told = json.loads(claim.log or "")
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in told["fields"].items()}
        return _SHARED_ERRORS[told["error"]](str(told["message"]), **fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# The threads that lead are the parent's.
os.register_at_fork(after_in_child=_flights.clear)
