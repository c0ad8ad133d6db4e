// Products on processors with AMX, of bfloat16 and of integers, and how tiles are made for them.
#include <immintrin.h>

#include "compute.h"

namespace {

struct Shape {  // of all eight tiles, as the processor reads it
  uint8_t palette = 1, first_row = 0, none[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  Shape() {
    for (size_t tile = 0; tile < 8; ++tile) row_bytes[tile] = 64, rows[tile] = 16;
  }
};

#define ROUNDS __attribute__((target("avx512f,avx512bw,avx512bf16")))

ROUNDS inline __m512i lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

// Two rows of up to 16 numbers as words; a row that is not there is null.
ROUNDS inline __m512i words_of(const float* upper, const float* lower, __mmask16 columns) {
  const __m512 none = _mm512_setzero_ps();
  const __m512 first = upper ? _mm512_maskz_loadu_ps(columns, upper) : none;
  const __m512 second = lower ? _mm512_maskz_loadu_ps(columns, lower) : none;
  // of the 32 rounded numbers, those of the upper row first: 0 and 16, 1 and 17, ...
  const __m512i order = _mm512_or_si512(lanes(), _mm512_slli_epi32(_mm512_add_epi32(lanes(), _mm512_set1_epi32(16)), 16));
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// 16 rows of 16 words become columns: places whose numbers differ in one bit are exchanged, bit by bit.
ROUNDS inline void turn(uint32_t* tile) {
  __m512i rows[16];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) rows[row] = _mm512_loadu_si512(tile + row * 16);
#pragma GCC unroll 4
  for (int distance = 8; distance; distance /= 2) {
    const __mmask16 further = _mm512_test_epi32_mask(lanes(), _mm512_set1_epi32(distance));
    const __m512i step = _mm512_set1_epi32(distance), all = _mm512_set1_epi32(16);
    const __m512i low = _mm512_mask_add_epi32(lanes(), further, lanes(), _mm512_sub_epi32(all, step));
    const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lanes(), step), further, lanes(), all);
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) {
      if (row & distance) continue;
      const __m512i upper = rows[row], lower = rows[row + distance];
      rows[row] = _mm512_permutex2var_epi32(upper, low, lower);
      rows[row + distance] = _mm512_permutex2var_epi32(upper, high, lower);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) _mm512_storeu_si512(tile + row * 16, rows[row]);
}

}  // namespace

ROUNDS void amx_pack(const float* from, size_t rows, size_t columns, bool turned, uint32_t* tiles, size_t apart) {
  for (size_t row = 0; row < kTileRows; row += 2) {
    const float* upper = row < rows ? from + row * columns : nullptr;
    const float* lower = row + 1 < rows ? from + (row + 1) * columns : nullptr;
    uint32_t* words = tiles + row / 2 * kTileColumns;
    for (size_t column = 0; column < columns; column += kTileColumns, words += apart) {
      const size_t left = columns - column;
      const __mmask16 there = left < kTileColumns ? (1u << left) - 1 : 0xffff;
      _mm512_storeu_si512(words, words_of(upper ? upper + column : nullptr, lower ? lower + column : nullptr, there));
    }
  }
  for (size_t column = 0; turned && column < columns; column += kTileColumns, tiles += apart) turn(tiles);
}

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

#define INTEGERS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vnni,amx-tile,amx-int8")))

INTEGERS void amx_pack_weight(const int8_t* weight, size_t inner, size_t columns, bool turned, size_t first,
                              uint32_t* tiles, int32_t* sums) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (size_t half = 0; half < 2; ++half, first += kTileColumns) {
    __m512i sum = _mm512_setzero_si512();
    for (size_t step = 0; step < inner; step += 64, tiles += kTileWords) {
      for (size_t row = 0; row < 16; ++row) {
        if (turned) {
          _mm512_storeu_si512(tiles + row * 16, _mm512_loadu_si512(weight + (first + row) * inner + step));
          continue;
        }
        // four numbers of a column, one below the other, are one word
        const int8_t* from = weight + (step + row * 4) * columns + first;
        const __m128i a = _mm_loadu_si128((const __m128i*)from), b = _mm_loadu_si128((const __m128i*)(from + columns));
        const __m128i c = _mm_loadu_si128((const __m128i*)(from + 2 * columns));
        const __m128i d = _mm_loadu_si128((const __m128i*)(from + 3 * columns));
        const __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
        const __m128i more_ab = _mm_unpackhi_epi8(a, b), more_cd = _mm_unpackhi_epi8(c, d);
        __m128i* to = (__m128i*)(tiles + row * 16);
        _mm_storeu_si128(to, _mm_unpacklo_epi16(ab, cd));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(ab, cd));
        _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(more_ab, more_cd));
        _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(more_ab, more_cd));
      }
      if (turned) turn(tiles);
      for (size_t row = 0; row < 16; ++row) sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(tiles + row * 16));
    }
    _mm512_storeu_si512(sums + half * 16, _mm512_slli_epi32(sum, 7));
  }
}

INTEGERS void amx_integer_products(const Integers& of, const uint32_t* tiles, const int32_t* sums, size_t row,
                                   size_t first, size_t count) {
  static const Shape shape;
  _tile_loadconfig(&shape);
  const size_t steps = of.inner / 64;
  alignas(64) int32_t made[32 * 32];
  const uint8_t* left = of.left + row * of.inner;
  for (size_t end = first + count; first < end; first += 32) {
    const uint32_t* right = tiles + first / 16 * steps * kTileWords;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t step = 0; step < steps; ++step) {
      _tile_loadd(4, left + step * 64, of.inner);
      _tile_loadd(6, right + step * kTileWords, 64);
      _tile_loadd(7, right + (steps + step) * kTileWords, 64);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_loadd(5, left + 16 * of.inner + step * 64, of.inner);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, made, 128);
    _tile_stored(1, made + 16, 128);
    _tile_stored(2, made + 16 * 32, 128);
    _tile_stored(3, made + 16 * 32 + 16, 128);
    for (size_t half = 0; half < 32; half += 16) {
      const __m512i zero = _mm512_loadu_si512(sums + first + half);
      const __m512 scale = _mm512_loadu_ps(of.scale + first + half);
      const __m512 bias = of.bias ? _mm512_loadu_ps(of.bias + first + half) : _mm512_setzero_ps();
      for (size_t down = 0; down < 32; ++down) {
        const __m512i whole = _mm512_sub_epi32(_mm512_load_si512(made + down * 32 + half), zero);
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale);
        const __m512 own = _mm512_set1_ps(of.left_scale[row + down]);
        _mm512_storeu_ps(of.result + (row + down) * of.columns + first + half, _mm512_fmadd_ps(scaled, own, bias));
      }
    }
  }
  _tile_release();
}
