"""What every kind promises. A new kind is tested by being there, once `tests.kinds_samples` has a sample of it."""

from __future__ import annotations

import random
import time

import kinds_samples
import pytest

from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.errors import KernelStoreError, PayloadRejected
from kernelstore.kinds import Kind

KINDS = plugins.names("kinds")

# None of these is of any kind (C42).
RUBBISH = {
    "nothing": b"",
    "text": b"hello",
    "a path": b"/tmp/kernel.cubin\0",
    "a lone NUL": b"\0",
    "zeros": bytes(4096),
    "gzip": bytes.fromhex("1f8b0800000000000003") + bytes(60),
    "an ELF file of the host": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0\x3e\0" + bytes(200),
    "CUDA C++": b'extern "C" __global__ void k() {}\n',
    "an ELF magic": b"\x7fELF\x02\x01",
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return kinds_samples.load_kind(request.param)


@pytest.fixture
def payload(kind: Kind) -> bytes:
    return kind.normalise(kinds_samples.sample(kind.name)[0])


@pytest.fixture
def arch(kind: Kind) -> str:
    return kinds_samples.sample(kind.name)[1]


def test_a_kind_has_the_name_it_is_found_by(kind: Kind) -> None:
    assert plugins.load("kinds", kind.name) is kind
    assert kind.suffix.startswith(".")


def test_a_kind_knows_its_own_bytes(kind: Kind, payload: bytes) -> None:
    assert kind.recognises(payload)


def test_no_other_kind_takes_them(kind: Kind, payload: bytes, arch: str) -> None:
    for name in set(KINDS) - {kind.name}:
        other = kinds_samples.load_kind(name)

        assert not other.recognises(payload)
        with pytest.raises(PayloadRejected):
            other.check(payload, str(other.arch_of(Arch.parse(arch))))
        with pytest.raises(PayloadRejected):
            other.describe(payload)


@pytest.mark.parametrize("what", RUBBISH)
def test_rubbish_is_refused(kind: Kind, what: str) -> None:
    rubbish = RUBBISH[what]

    assert not kind.recognises(rubbish)
    for refuse in (lambda: kind.check(rubbish, "sm_90"), lambda: kind.describe(rubbish)):
        with pytest.raises(PayloadRejected) as error:
            refuse()
        assert error.value.kind == kind.name
        assert error.value.reason


def test_a_payload_passes_for_its_arch(kind: Kind, payload: bytes, arch: str) -> None:
    kind.check(payload, arch)


@pytest.mark.parametrize("other", ["sm_75", "sm_121", "compute_75", "compute_121a"])
def test_a_payload_fails_for_an_arch_that_it_is_not_for(kind: Kind, payload: bytes, other: str) -> None:
    if kind.name == "ltoir":
        # It does not tell its arch, and is refused only where it is given a real one.
        other = str(Arch.parse(other).as_real())

    with pytest.raises(PayloadRejected, match=other):
        kind.check(payload, other)


def test_an_arch_is_real_or_virtual_by_kind(kind: Kind, arch: str) -> None:
    assert str(kind.arch_of(Arch.parse(arch))) == arch
    assert kind.arch_of(Arch.parse("sm_100f")) == kind.arch_of(Arch.parse("compute_100f"))


def test_a_description_tells_the_arch_that_check_takes(kind: Kind, payload: bytes, arch: str) -> None:
    description = kind.describe(payload)

    assert description.arch in (None, arch)
    assert {symbol.what for symbol in description.symbols} <= {"kernel", "variable"}
    assert len({symbol.lowered_name for symbol in description.symbols}) == len(description.symbols)


def test_normalising_twice_changes_nothing(kind: Kind, payload: bytes) -> None:
    assert kind.normalise(payload) == payload
    kind.describe(payload)


def test_text_is_text(kind: Kind, payload: bytes) -> None:
    if kind.is_text:
        assert payload.decode().isprintable() or "\n" in payload.decode()
    else:
        assert b"\0" in payload[:-1]


def test_a_check_costs_microseconds(kind: Kind, payload: bytes, arch: str) -> None:
    """It is part of every put. Measured 10 to 30 us; the bound leaves room for a busy machine."""
    best = min(_seconds(kind, payload, arch) for _ in range(50))

    assert best < 500e-6


def test_a_payload_cut_off_does_not_pass(kind: Kind, payload: bytes, arch: str) -> None:
    # LTO-IR is scrambled and does not tell its size.
    ends = (1, 20) if kind.name == "ltoir" else (1, 20, len(payload) // 2, len(payload) - 1)
    for end in ends:
        with pytest.raises(PayloadRejected):
            kind.check(payload[:end], arch)


def test_a_payload_cut_off_anywhere_raises_nothing_else(kind: Kind, payload: bytes, arch: str) -> None:
    for end in {*range(min(len(payload), 600)), *range(0, len(payload), 97)}:
        _read(kind, payload[:end], arch)


def test_a_damaged_payload_raises_nothing_else(kind: Kind, payload: bytes, arch: str) -> None:
    """2,000 mutations: bytes set to extreme values, words overwritten, pieces copied over others."""
    rng = random.Random(190)
    for _ in range(2000):
        damaged = bytearray(payload)
        for _ in range(rng.randint(1, 8)):
            _damage(damaged, rng)
        started = time.perf_counter()
        _read(kind, bytes(damaged), arch)
        assert time.perf_counter() - started < 5


def _damage(payload: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(payload))
    # The head decides most of what is read, so half of the damage goes there.
    at = at if rng.random() < 0.5 else rng.randrange(min(len(payload), 128))
    choice = rng.randrange(4)
    if choice == 0:
        payload[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif choice == 1:
        size = rng.choice((2, 4, 8))
        number = rng.choice((0, 1, len(payload), 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)) % 2 ** (8 * size)
        payload[at : at + size] = number.to_bytes(size, "little")
    elif choice == 2:
        source = rng.randrange(len(payload))
        size = rng.randrange(200)
        payload[at : at + size] = payload[source : source + size]
    else:
        del payload[at : at + rng.randrange(20)]
        payload.extend(b"\0")


def _read(kind: Kind, payload: bytes, arch: str) -> None:
    for read in (lambda: kind.check(payload, arch), lambda: kind.describe(kind.normalise(payload))):
        try:
            read()
        except KernelStoreError as error:
            assert isinstance(error, PayloadRejected)  # noqa: PT017


def _seconds(kind: Kind, payload: bytes, arch: str) -> float:
    started = time.perf_counter()
    kind.check(payload, arch)
    return time.perf_counter() - started
