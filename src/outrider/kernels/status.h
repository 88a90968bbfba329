// What functions tell Python (library.py). No exception crosses that border, nor the one of a region of several threads:
// what a region needs is allocated before it.
#pragma once

#include <cstdint>
#include <exception>

enum Status : int32_t { OUT_OF_RANGE, DONE, NO_MEMORY };
