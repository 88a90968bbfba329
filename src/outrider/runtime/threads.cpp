// Whether the threads of a process are numbered by the library that starts them.
//
// Clang calls LLVM's OpenMP, and PyTorch for Linux brings GCC's. Both have omp_get_thread_num, and where both are in a
// process the first one answers, by which all threads of the other one have the number 0. Inductor gives the threads of a
// sum places of their own by this number, so that such sums would be wrong.

#include <omp.h>

#include <cstdint>

extern "C" int32_t outrider_threads_are_numbered() {
  int64_t threads = 0, numbers = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads, numbers)
  {
    threads++;
    numbers += omp_get_thread_num();
  }
  return numbers == threads * (threads - 1) / 2;
}
