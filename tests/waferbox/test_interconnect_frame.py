import pytest
from hypothesis import given
from hypothesis import strategies as st

from waferbox.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


WITH_PAYLOAD = (FrameKind.HELLO, FrameKind.BYTES, FrameKind.COPY)


@given(st.sampled_from(FrameKind), U32, U32, U64, U64, U64, U64, st.binary(max_size=300), st.binary(max_size=70))
def test_what_was_packed_is_parsed(
    kind: FrameKind,
    group: int,
    memory: int,
    step: int,
    offset: int,
    length: int,
    total: int,
    payload: bytes,
    following: bytes,
) -> None:
    if kind in WITH_PAYLOAD:
        length = len(payload)
    else:
        payload = b""
    frame = Frame(kind, group, memory, step, offset, length, total)
    header = frame.header(payload)
    assert len(header) == HEADER_BYTES == 64
    found, rest = parse(header + payload + following)
    assert found == frame
    assert found.kind is kind
    assert bytes(rest) == payload


@pytest.mark.parametrize("kind", WITH_PAYLOAD)
def test_a_payload_that_is_cut_off_is_noticed(kind: FrameKind) -> None:
    with pytest.raises(FrameError, match="3 bytes of its payload of 4"):
        parse(Frame(kind, length=4).header(b"four") + b"fou")


@given(st.integers(0, HEADER_BYTES + 9), st.integers(1, 255))
def test_any_damaged_byte_is_noticed(position: int, flip: int) -> None:
    payload = b"0123456789"
    data = bytearray(Frame(FrameKind.BYTES, 1, 0, 2, 0, 10, 10).header(payload) + payload)
    data[position] ^= flip
    with pytest.raises(FrameError):
        parse(data)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        parse(data)


def test_a_kind_of_another_version_is_refused() -> None:
    with pytest.raises(FrameError, match="unknown kind 77"):
        parse(Frame(77).header())  # type: ignore[arg-type]  # no kind: that is the test
