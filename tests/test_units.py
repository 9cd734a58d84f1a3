import pytest

from penstock.units import GB, TFLOP, GiB, KiB, MiB, TiB, format_bytes, format_seconds


def test_binary_units_are_powers_of_1024_and_decimal_ones_of_1000() -> None:
    assert (KiB, MiB, GiB, TiB) == (1024, 1024**2, 1024**3, 1024**4)
    assert (GB, TFLOP) == (1_000_000_000, 1_000_000_000_000)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12.3 * 1024**2, "12.3 MiB"),
        (-3 * 1024**3 // 2, "-1.50 GiB"),
        (123 * 1024**4, "123 TiB"),
    ],
)
def test_size_has_a_binary_unit_and_three_digits(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-9, "5.00 ns"),
        (2e-6, "2.00 us"),
        (0.0123, "12.3 ms"),
        (-0.5, "-500 ms"),
        (1, "1.00 s"),
        (119, "119 s"),
        (120, "2.00 min"),
        (float("inf"), "inf min"),
    ],
)
def test_duration_has_a_fitting_unit_and_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
