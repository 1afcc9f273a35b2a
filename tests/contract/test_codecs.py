"""What every codec promises. A new codec is tested by being there."""

from __future__ import annotations

import contextlib
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import kinds_samples
import pytest

from kernelstore import plugins
from kernelstore.codecs import Codec
from kernelstore.errors import PayloadCorrupt

PAYLOADS = {
    "nothing": b"",
    "one byte": b"x",
    "zeros": bytes(300_000),
    "noise": random.Random(1).randbytes(100_000),
    "a megabyte": random.Random(2).randbytes(2**19) * 2,
    "text": b"mov.u32 %r1, %tid.x;\n" * 5000,
}


@pytest.fixture(params=plugins.names("codecs"))
def codec(request: pytest.FixtureRequest) -> Codec:
    plugin: Codec = plugins.load("codecs", request.param)
    return plugin


@pytest.fixture
def blob(codec: Codec) -> bytes:
    return codec.encode(kinds_samples.cubin())


def test_a_codec_has_the_name_it_is_found_by(codec: Codec) -> None:
    assert plugins.load("codecs", codec.name) is codec


@pytest.mark.parametrize("what", PAYLOADS)
def test_a_payload_comes_back_as_it_was(codec: Codec, what: str) -> None:
    payload = PAYLOADS[what]

    assert codec.decode(codec.encode(payload), len(payload)) == payload


def test_a_cubin_comes_back_as_it_was(codec: Codec, blob: bytes) -> None:
    assert codec.decode(blob, len(kinds_samples.cubin())) == kinds_samples.cubin()


def test_equal_payloads_give_equal_blobs(codec: Codec, blob: bytes) -> None:
    assert codec.encode(bytes(bytearray(kinds_samples.cubin()))) == blob


def test_a_blob_of_another_buffer_type_decodes(codec: Codec, blob: bytes) -> None:
    """sqlite3 gives bytes, incremental reads give other buffers."""
    assert bytes(codec.decode(bytes(memoryview(blob)), len(kinds_samples.cubin()))) == kinds_samples.cubin()


@pytest.mark.parametrize("off", [-(2**63), -1000, -1, 1, 1000, 2**20, 2**30, 2**31 - 1, 2**31, 2**32, 2**63])
def test_another_size_is_corrupt(codec: Codec, blob: bytes, off: int) -> None:
    """A damaged or forged row; 2**32 more is the same number to a C int (F40)."""
    with pytest.raises(PayloadCorrupt) as error:
        codec.decode(blob, len(kinds_samples.cubin()) + off)

    assert error.value.codec == codec.name


@pytest.mark.parametrize("size_bytes", [-(2**31), -1, 0])
def test_a_size_below_one_is_corrupt(codec: Codec, blob: bytes, size_bytes: int) -> None:
    with pytest.raises(PayloadCorrupt):
        codec.decode(blob, size_bytes)


@pytest.mark.parametrize("keep", [0, 1, 10, 0.5, -1])
def test_a_cut_blob_is_corrupt(codec: Codec, blob: bytes, keep: float) -> None:
    """C74."""
    kept = blob[: int(len(blob) * keep)] if isinstance(keep, float) else blob[:keep]

    with pytest.raises(PayloadCorrupt):
        codec.decode(kept, len(kinds_samples.cubin()))


def test_bytes_after_the_end_are_corrupt(codec: Codec, blob: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        codec.decode(blob + b"\0\0\0\0", len(kinds_samples.cubin()))


@pytest.mark.parametrize("claimed", [24_000, 2**30, 2**40])
def test_a_size_that_lies_costs_no_memory(codec: Codec, claimed: int) -> None:
    """A bomb of 30 MB in a row that tells 24,000 bytes, and a row of 10 bytes that tells a gigabyte (F39)."""
    bomb = codec.encode(bytes(30_000_000)) if claimed == 24_000 else codec.encode(b"0123456789")
    tracemalloc.start()
    before = _resident_bytes()

    with pytest.raises(PayloadCorrupt):
        codec.decode(bomb, claimed)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert _resident_bytes() - before < 16 * 2**20


@pytest.mark.parametrize(("size_bytes", "claimed"), [(100_000_000, 24_000), (100_000_000, 10**8 - 1), (10, 2**30)])
def test_a_size_that_lies_costs_no_address_space(
    codec: Codec, tmp_path: Path, run_python: Callable[..., str], size_bytes: int, claimed: int
) -> None:
    """Also none that is freed again, or that a library takes by itself: 16 MB beyond the size fail."""
    path = tmp_path / "blob"
    path.write_bytes(codec.encode(bytes(size_bytes)))

    printed = run_python(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from kernelstore import plugins\n"
        "from kernelstore.errors import PayloadCorrupt\n"
        "codec = plugins.load('codecs', sys.argv[1])\n"
        "blob, claimed = Path(sys.argv[2]).read_bytes(), int(sys.argv[3])\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + min(claimed, 10**8) + 2**24\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n"
        "    codec.decode(blob, claimed)\n"
        "except PayloadCorrupt as error:\n"
        "    print('corrupt')\n",
        codec.name,
        path,
        claimed,
    )

    assert printed == "corrupt\n"


def test_damage_is_found_or_keeps_the_size(codec: Codec, blob: bytes) -> None:
    """A flipped bit can decode to wrong bytes (C73, F22): the row's checksum is what finds it, before decoding."""
    size_bytes = len(kinds_samples.cubin())
    rng = random.Random(20)
    for _ in range(500):
        damaged = bytearray(blob)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(PayloadCorrupt):
            assert len(codec.decode(bytes(damaged), size_bytes)) == size_bytes


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
