// Numbers of a matrix in blocks (blocks.h), as float32.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "blocks.h"

extern "C" {

// Numbers [O, I] of a matrix of this form.
void outrider_widen_blocks(const void* matrix, int64_t form, int64_t num_channels, int64_t width, float* to,
                          int64_t num_threads) {
  of_blocks(form, matrix, [&](auto blocks) {
    const int64_t length = width / blocks->NUMBERS;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t o = 0; o < num_channels; o++) widen(blocks + o * length, width, to + o * width);
  });
}

// The operator outrider::widen_blocks, as compiled programs call it.
AOTITorchError aoti_torch_cpu_widen_blocks(AtenTensorHandle matrix, int64_t form, int64_t width, int64_t num_threads,
                                          AtenTensorHandle* result) {
  int64_t shape[2] = {0, width};
  const int64_t strides[2] = {width, 1};
  void *from, *to;
  aoti_torch_get_size(matrix, 0, &shape[0]);
  AOTITorchError error = aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(),
                                                  aoti_torch_device_type_cpu(), 0, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  aoti_torch_get_data_ptr(matrix, &from);
  aoti_torch_get_data_ptr(*result, &to);
  outrider_widen_blocks(from, form, shape[0], width, static_cast<float*>(to), num_threads);
  return AOTI_TORCH_SUCCESS;
}
}
