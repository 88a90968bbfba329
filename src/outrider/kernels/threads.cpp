// Checks that OpenMP's thread numbers come from the library that starts the threads.
//
// Clang links LLVM's OpenMP, and PyTorch for Linux ships GCC's. Both export omp_get_thread_num; with both in a process
// the first one answers, so all threads of the other one get the number 0. Kernels that share work by this number would
// be wrong, and the threads of the two would wait for one another's processors.

#include <cstdint>
#include <thread>

extern "C" int omp_get_thread_num();  // Apple's compiler has no omp.h

extern "C" int32_t outrider_threads_are_numbered() {
  static const bool are_numbered = [] {
    int64_t threads = 0, numbers = 0;
    // In a temporary thread. GCC's OpenMP keeps the helpers of each thread that ever had some, and once there are more
    // of them than processors, all of them sleep instead of spinning: rounds took up to three times as long.
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
