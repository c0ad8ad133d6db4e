// Products of tiles in bfloat16 on processors with AMX.
#include <immintrin.h>

#include "compute.h"

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
