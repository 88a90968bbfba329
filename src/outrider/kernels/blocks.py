"""Forms of quantized weights in GGUF files: blocks of integers with scales (blocks.h has their layouts)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Form of blocks.

    Attributes:
        name: in GGUF.
        number: of the type in ggml.
        num_numbers: of a block.
        num_bytes: of a block.
        rounds: whether rows are rounded to 8 bits before they are multiplied with it (rounded_rows.h).
    """

    name: str
    number: int
    num_numbers: int
    num_bytes: int
    rounds: bool = False

    @property
    def product(self) -> int:
        """Number of the form for products (``Form`` in blocks.h)."""
        return self.number + 256 * self.rounds

    def width_of(self, num_bytes: int) -> int:
        """Numbers in so many bytes of a row."""
        return num_bytes // self.num_bytes * self.num_numbers


BLOCK_FORMS = {
    form.number: form
    for form in (
        BlockForm("Q4_0", 2, 32, 18),
        BlockForm("Q4_1", 3, 32, 20),
        BlockForm("Q5_0", 6, 32, 22),
        BlockForm("Q5_1", 7, 32, 24),
        BlockForm("Q8_0", 8, 32, 34),
        BlockForm("Q4_K", 12, 256, 144),
        BlockForm("Q5_K", 13, 256, 176),
        BlockForm("Q6_K", 14, 256, 210),
    )
}
