// Products of tiles on processors that multiply bfloat16: with AVX-512, and with the tiles of AMX.
#include <immintrin.h>

#include "compute.h"

__attribute__((target("avx512f,avx512bf16"))) void avx512_tile_products(const uint32_t* const left[2],
                                                                        const uint32_t* const right[2], size_t tiles,
                                                                        float* sums) {
  constexpr size_t kDown = 8;
  for (size_t side = 0; side < 2; ++side)
    for (size_t first = 0; first < kTileColumns; first += kDown) {
      __m512 made[kDown][2];
#pragma GCC unroll 8
      for (size_t row = 0; row < kDown; ++row) made[row][0] = made[row][1] = _mm512_setzero_ps();
      for (size_t tile = 0; tile < tiles; ++tile) {
        const uint32_t* by = left[side] + tile * kTileWords + first * 16;
        const uint32_t *one = right[0] + tile * kTileWords, *other = right[1] + tile * kTileWords;
#pragma GCC unroll 2
        for (size_t pair = 0; pair < 16; ++pair) {
          const __m512bh columns = (__m512bh)_mm512_loadu_si512(one + pair * 16);
          const __m512bh further = (__m512bh)_mm512_loadu_si512(other + pair * 16);
#pragma GCC unroll 8
          for (size_t row = 0; row < kDown; ++row) {
            const __m512bh word = (__m512bh)_mm512_set1_epi32(int(by[row * 16 + pair]));
            made[row][0] = _mm512_dpbf16_ps(made[row][0], word, columns);
            made[row][1] = _mm512_dpbf16_ps(made[row][1], word, further);
          }
        }
      }
      float* to = sums + (side * 16 + first) * 32;
#pragma GCC unroll 8
      for (size_t row = 0; row < kDown; ++row, to += 32) {
        _mm512_storeu_ps(to, made[row][0]);
        _mm512_storeu_ps(to + 16, made[row][1]);
      }
    }
}

namespace {

struct Shape {  // of the eight tiles, as the processor reads it
  uint8_t palette = 1, first_row = 0, none[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  Shape() {
    for (size_t tile = 0; tile < 8; ++tile) row_bytes[tile] = 64, rows[tile] = 16;
  }
};

}  // namespace

__attribute__((target("amx-tile,amx-bf16"))) void amx_tile_products(const uint32_t* const left[2],
                                                                    const uint32_t* const right[2], size_t tiles,
                                                                    float* sums) {
  static const Shape shape;
  _tile_loadconfig(&shape);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (size_t tile = 0; tile < tiles; ++tile) {
    _tile_loadd(4, left[0] + tile * kTileWords, 64);
    _tile_loadd(6, right[0] + tile * kTileWords, 64);
    _tile_loadd(7, right[1] + tile * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left[1] + tile * kTileWords, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
  _tile_release();  // other code looks at what is set
}
