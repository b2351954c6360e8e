import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import format_bytes, format_delta, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (4096, "4.00 KiB"),
        (1023 * 1024 + 600, "1.00 MiB"),
        (1000 << 20, "0.977 GiB"),
        (512 << 20, "512 MiB"),
        (1280 << 20, "1.25 GiB"),
        (22_528 << 20, "22.0 GiB"),
        (None, "unknown"),
        (-(1280 << 20), "−1.25 GiB"),
    ],
)
def test_a_size_has_three_significant_digits_and_a_binary_unit(nbytes: int | None, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_change_has_a_sign() -> None:
    assert [format_delta(n) for n in (512 << 20, -(1 << 30), 0, None)] == ["+512 MiB", "−1.00 GiB", "+0 B", "unknown"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 << 30), ("24 gb", 24 << 30), ("1.5g", 3 << 29), ("512MB", 512 << 20), ("100", 100), (7, 7)],
)
def test_a_size_is_read_in_powers_of_1024(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "24 potatoes", "-3GiB", "0", 0, -5, "1e9", "nan", True, "²GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(GpuMemError, match="write for example 24GiB"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read_back_within_its_digits(nbytes: int) -> None:
    assert format_bytes(0) == "0 B"
    if nbytes:
        assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)
