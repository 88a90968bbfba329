"""Rounding of lengths, so that few shapes occur."""


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
