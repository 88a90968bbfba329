// Whether the threads of a process are numbered by the library that starts them.
//
// Clang calls LLVM's OpenMP, and PyTorch for Linux brings GCC's. Both have omp_get_thread_num, and where both are in a
// process the first one answers, so all threads of the other one get the number 0. Inductor gives the threads of a sum
// places of their own by this number, so that such sums would be wrong.

#include <omp.h>

#include <cstdint>
#include <thread>

extern "C" int32_t outrider_threads_are_numbered() {
  static const bool are_numbered = [] {
    int64_t threads = 0, numbers = 0;
    // In a thread that ends. GCC's OpenMP keeps the helpers of each thread that ever had some, and as soon as there are
    // more of them than processors, all of them sleep where they would wait: rounds took up to three times as long.
    std::thread([&] {
#pragma omp parallel num_threads(2) reduction(+ : threads, numbers)
      {
        threads++;
        numbers += omp_get_thread_num();
      }
    }).join();
    return numbers == threads * (threads - 1) / 2;
  }();
  return are_numbered;
}
