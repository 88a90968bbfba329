"""Native CPU engine: plans of model families, and forwards of them in one call of the C++ library."""
