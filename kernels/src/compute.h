// What the kernels compute, once for each set of instructions. Tensors are float32, row by row, without gaps.
#pragma once

#include <cstddef>
#include <cstdint>

// Of images B, tokens N, heads H and a head's width W.
struct Heads {
  size_t images, tokens, heads, width;
};

// A tile is a piece of a matrix in bfloat16, 32 rows of 16 columns, in the order in which processors multiply it: two
// numbers of a column, one below the other, are one word. Pairs of rows one after the other, or turned: columns.
constexpr size_t kTileRows = 32, kTileColumns = 16, kTileWords = 256;

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
  // Up to 32 rows of a matrix as tiles side by side, which lie `apart` words from each other; what is missing is 0.
  void (*pack)(const float* from, size_t rows, size_t columns, bool turned, uint32_t* tiles, size_t apart);
  // sums (32, 32) of transposed products: of two rows of turned tiles by two rows of tiles, `tiles` in each
  void (*tile_products)(const uint32_t* const left[2], const uint32_t* const right[2], size_t tiles, float* sums);
};

extern const Kernels plain_kernels;
#ifdef __x86_64__
extern const Kernels avx2_kernels, avx512_kernels;
void amx_pack(const float* from, size_t rows, size_t columns, bool turned, uint32_t* tiles, size_t apart);
void amx_tile_products(const uint32_t* const left[2], const uint32_t* const right[2], size_t tiles, float* sums);

// Products of integers with AMX. `inner` is a multiple of 64, `columns` of 32.
struct Integers {
  size_t rows, inner, columns;
  const uint8_t* left;      // (rows, inner), around 128
  const float* left_scale;  // (rows)
  const float* scale;       // of the weight's columns
  const float* bias;        // (columns), or null
  float* result;            // (rows, columns)
};
// 32 columns of a weight, (inner, columns) or, turned, (columns, inner), as tiles; sums: 128 times those of its columns
void amx_pack_weight(const int8_t* weight, size_t inner, size_t columns, bool turned, size_t first, uint32_t* tiles,
                     int32_t* sums);
// (left - 128) x weight, scaled: 32 rows, and as many columns as the tiles have
void amx_integer_products(const Integers& of, const uint32_t* tiles, const int32_t* sums, size_t row, size_t first,
                          size_t count);
#endif
