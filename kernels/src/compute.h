// What the kernels compute, once for each set of instructions. Tensors are float32, row by row, without gaps.
#pragma once

#include <cstddef>
#include <cstdint>

// Of images B, tokens N, heads H and a head's width W.
struct Heads {
  size_t images, tokens, heads, width;
};

// The factors of an update: next mean = kept_mean mean + new_mean grad, next square = kept_square square + new_square
// grad^2, next value = kept value - rate next mean / (sqrt(next square) + least).
struct AdamW {
  float kept_mean, new_mean, kept_square, new_square, kept, rate, least;
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
  // (rows, width), columns times `factors` if there are any -> bytes, and a scale for each row: its largest number
  // becomes `steps` of these, and 0 becomes `zero`
  void (*round_rows)(const float* entered, const float* factors, float steps, int zero, uint8_t* rounded, float* scales,
                     size_t rows, size_t width);
  // (rows, width): rows times their scales, plus `bias` (width) if there is one
  void (*scale_rows)(const float* entered, const float* scales, const float* bias, float* result, size_t rows,
                     size_t width);
  // of rows (rows, width) -> normalised ones, their means, and the reciprocals of their deviations
  void (*layer_norm)(const float* entered, const float* gamma, const float* beta, float epsilon, float* result,
                     float* mean, float* spread, size_t rows, size_t width);
  // adds the sums of columns of (rows, width) to sums (width)
  void (*column_sums)(const float* entered, float* sums, size_t rows, size_t width);
  // AdamW on `count` numbers: value, mean and square -> their next ones, which may lie in the same places
  void (*adamw)(const AdamW& by, const float* value, const float* grad, const float* mean, const float* square,
                float* next_value, float* next_mean, float* next_square, size_t count);
};

extern const Kernels plain_kernels;
#ifdef __x86_64__
extern const Kernels avx2_kernels, avx512_kernels;
#endif
