// What the kernels compute, once for each set of instructions. Tensors are float32, row by row, without gaps.
#pragma once

#include <cstddef>

// Of images B, tokens N, heads H and a head's width W.
struct Heads {
  size_t images, tokens, heads, width;
};

struct Kernels {
  // qkv (B, N, 3, H, W) -> out (B, N, H, W), of one image and head: softmax(scale q k^T) v
  void (*attention)(const Heads&, float scale, const float* qkv, float* out, size_t image, size_t head);
  // qkv and the gradient of what left, (B, N, H, W) -> d_qkv, (B, N, 3, H, W), of one image and head
  void (*attention_grad)(const Heads&, float scale, const float* qkv, const float* grad, float* d_qkv, size_t image,
                         size_t head);
  // the gradient of what entered GELU (with erf) in `count` places
  void (*gelu_grad)(const float* grad, const float* entered, float* result, size_t count);
  // Of rows (rows, width) that were normalised with these means and reciprocals of deviations: d_entered (rows, width).
  // sums (2, width): those of grad x normalised values and of grad, over these rows.
  void (*layer_norm_grad)(const float* grad, const float* entered, const float* mean, const float* spread,
                          const float* gamma, float* d_entered, float* sums, size_t rows, size_t width);
};

extern const Kernels plain_kernels;
#ifdef __x86_64__
extern const Kernels avx2_kernels, avx512_kernels;
#endif
