// The kernels, for vectors of LANES floats. Compiled once for each set of instructions; NAME is the table's name.
#include "compute.h"

// No templates of the standard library: the linker keeps one copy of each for all sets of instructions.
#include <cstdint>
#include <cstdlib>

namespace {

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float U __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // anywhere in memory

constexpr size_t kRows = 6;                      // of a tile of a product, in registers
constexpr size_t kVectors = LANES == 4 ? 4 : 2;  // each tile row's
constexpr size_t kQueries = 36;                  // at a time: their scores stay in a core's first cache

// Mills' ratio (1 - Phi(x)) / phi(x), divided by t = 1 / (1 + 0.3 x), as a polynomial of t: least squares of the
// relative error for 0 <= x <= 14, which is 4e-9; highest power first.
constexpr float kMillsScale = 0.3f;
constexpr float kMills[] = {-0.0521447323f, 0.284247607f, -0.577643812f, 0.488070905f, -0.205062091f,
                            0.244156256f,   0.195446178f, 0.276535302f,  0.29969725f,  0.300011247f};

V load(const float* from) { return *reinterpret_cast<const U*>(from); }
void store(float* to, V value) { *reinterpret_cast<U*>(to) = value; }
size_t padded(size_t count) { return (count + LANES - 1) / LANES * LANES; }

V all(float number) { return number - V{}; }

// Lanes so far apart change places.
V swapped(V value, int32_t distance) {
  I order;
  for (int32_t lane = 0; lane < LANES; ++lane) order[lane] = lane ^ distance;
  return __builtin_shuffle(value, order);
}

float sum_of(V value) {
#pragma GCC unroll 4
  for (int32_t distance = LANES / 2; distance; distance /= 2) value += swapped(value, distance);
  return value[0];
}

float largest_of(V value) {
#pragma GCC unroll 4
  for (int32_t distance = LANES / 2; distance; distance /= 2) {
    const V other = swapped(value, distance);
    value = other > value ? other : value;
  }
  return value[0];
}

// e^x by 2^n e^r, |r| <= ln(2) / 2, and the Taylor series of e^r to the seventh term: within 2 last digits.
// 0 below -87 (e^-87 = 1e-38), and above 88 it stays at e^88.
inline __attribute__((always_inline)) V exponential(V x) {
  const V low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);  // 1.5 x 2^23: adding it rounds
  const V inside = x > high ? high : x;
  const V whole = (inside * 1.44269504f + magic) - magic;
  const V rest = (inside - whole * 0.693359375f) - whole * -2.12194440e-4f;
  constexpr float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  V series = all(1.0f / 5040);
  for (float term : terms) series = series * rest + term;
  const I power = (__builtin_convertvector(whole, I) + 127) << 23;
  return x < low ? V{} : series * (V)power;
}

// C (rows of the tile, V vectors) = or += A B; A is read number by number, with any strides.
template <size_t R, size_t C, bool ADD>
inline void tile(size_t inner, const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row, float* c,
                 size_t c_row) {
  V sums[R][C];
#pragma GCC unroll 8
  for (size_t row = 0; row < R; ++row)
#pragma GCC unroll 4
    for (size_t column = 0; column < C; ++column)
      sums[row][column] = ADD ? load(c + row * c_row + column * LANES) : V{};
#pragma GCC unroll 1
  for (size_t step = 0; step < inner; ++step) {
    V right[C];
#pragma GCC unroll 4
    for (size_t column = 0; column < C; ++column) right[column] = load(b + step * b_row + column * LANES);
#pragma GCC unroll 8
    for (size_t row = 0; row < R; ++row) {
      const V left = all(a[row * a_row + step * a_column]);
#pragma GCC unroll 4
      for (size_t column = 0; column < C; ++column) sums[row][column] += left * right[column];
    }
  }
#pragma GCC unroll 8
  for (size_t row = 0; row < R; ++row)
#pragma GCC unroll 4
    for (size_t column = 0; column < C; ++column) store(c + row * c_row + column * LANES, sums[row][column]);
}

template <size_t C, bool ADD>
void tiles(size_t rows, size_t inner, const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row,
           float* c, size_t c_row) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_row, c += kRows * c_row)
    tile<kRows, C, ADD>(inner, a, a_row, a_column, b, b_row, c, c_row);
  for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row)
    tile<2, C, ADD>(inner, a, a_row, a_column, b, b_row, c, c_row);
  if (rows) tile<1, C, ADD>(inner, a, a_row, a_column, b, b_row, c, c_row);
}

// (rows, columns) = or += A (rows, inner) B (inner, columns); columns is a multiple of LANES.
template <bool ADD>
void product(size_t rows, size_t inner, size_t columns, const float* a, size_t a_row, size_t a_column, const float* b,
             size_t b_row, float* c, size_t c_row) {
  size_t done = 0;
  for (; done + kVectors * LANES <= columns; done += kVectors * LANES)
    tiles<kVectors, ADD>(rows, inner, a, a_row, a_column, b + done, b_row, c + done, c_row);
  for (; done < columns; done += LANES)
    tiles<1, ADD>(rows, inner, a, a_row, a_column, b + done, b_row, c + done, c_row);
}

// This thread's memory for one head. It grows to what the largest head needs.
float* scratch(size_t floats) {
  struct Memory {
    float* place = nullptr;
    size_t floats = 0;
    ~Memory() { free(place); }
  };
  thread_local Memory memory;
  if (memory.floats < floats) {
    free(memory.place);
    memory.place = static_cast<float*>(malloc(floats * sizeof(float)));
    if (!memory.place) abort();
    memory.floats = floats;
  }
  return memory.place;
}

void clear(float* from, float* end) {
  for (; from < end; ++from) *from = 0;
}

void copy(const float* from, size_t count, float* to) {
  for (size_t place = 0; place < count; ++place) to[place] = from[place];
}

// (tokens, width) of one head, to rows of `row` floats whose ends are 0, each number times `factor`
void rows_of(const float* from, size_t stride, size_t tokens, size_t width, float factor, float* to, size_t row) {
  for (size_t token = 0; token < tokens; ++token, from += stride, to += row) {
    for (size_t place = 0; place < width; ++place) to[place] = from[place] * factor;
    clear(to + width, to + row);
  }
}

// (tokens, width) of one head, to `width` rows of `row` floats whose ends are 0
void columns_of(const float* from, size_t stride, size_t tokens, size_t width, float* to, size_t row) {
  for (size_t place = 0; place < width; ++place) {
    for (size_t token = 0; token < tokens; ++token) to[place * row + token] = from[token * stride + place];
    clear(to + place * row + tokens, to + (place + 1) * row);
  }
}

// rows of scores become weights; what lies behind the tokens becomes 0
void softmax(float* scores, size_t rows, size_t tokens, size_t row) {
  for (size_t number = 0; number < rows; ++number, scores += row) {
    for (size_t place = tokens; place < row; ++place) scores[place] = -__builtin_inff();
    V highest = load(scores);
    for (size_t place = LANES; place < row; place += LANES) {
      const V here = load(scores + place);
      highest = here > highest ? here : highest;
    }
    const float most = largest_of(highest);
    V sums = {};
    for (size_t place = 0; place < row; place += LANES) {
      const V weight = exponential(load(scores + place) - most);
      store(scores + place, weight);
      sums += weight;
    }
    const float share = 1 / sum_of(sums);
    for (size_t place = 0; place < row; place += LANES) store(scores + place, load(scores + place) * share);
  }
}

struct Head {
  size_t stride;  // from token to token in qkv
  const float *q, *k, *v;
};

size_t first_of(const Heads& of, size_t image, size_t head, size_t kinds) {
  return (image * of.tokens * kinds * of.heads + head) * of.width;
}

Head head_of(const Heads& of, const float* qkv, size_t image, size_t head) {
  const float* q = qkv + first_of(of, image, head, 3);
  const size_t inner = of.heads * of.width;
  return {3 * inner, q, q + inner, q + 2 * inner};
}

void attention(const Heads& of, float scale, const float* qkv, float* out, size_t image, size_t head) {
  const size_t tokens = of.tokens, width = of.width, across = padded(tokens), wide = padded(width);
  const Head from = head_of(of, qkv, image, head);
  float* keys = scratch(width * across + tokens * wide + kQueries * (across + 2 * wide));  // transposed
  float* values = keys + width * across;
  float* queries = values + tokens * wide;
  float* weights = queries + kQueries * wide;
  float* made = weights + kQueries * across;
  columns_of(from.k, from.stride, tokens, width, keys, across);
  rows_of(from.v, from.stride, tokens, width, 1, values, wide);
  float* to = out + first_of(of, image, head, 1);
  for (size_t first = 0; first < tokens; first += kQueries) {
    const size_t rows = tokens - first < kQueries ? tokens - first : kQueries;
    rows_of(from.q + first * from.stride, from.stride, rows, width, scale, queries, wide);
    product<false>(rows, width, across, queries, wide, 1, keys, across, weights, across);
    softmax(weights, rows, tokens, across);
    product<false>(rows, tokens, wide, weights, across, 1, values, wide, made, wide);
    for (size_t row = 0; row < rows; ++row)
      copy(made + row * wide, width, to + (first + row) * of.heads * width);
  }
}

void attention_grad(const Heads& of, float scale, const float* qkv, const float* grad, float* d_qkv, size_t image,
                    size_t head) {
  const size_t tokens = of.tokens, width = of.width, across = padded(tokens), wide = padded(width);
  const size_t inner = of.heads * width;
  const Head from = head_of(of, qkv, image, head);
  float* turned_keys = scratch(2 * width * across + 3 * tokens * wide + kQueries * (2 * across + 3 * wide));
  float* turned_values = turned_keys + width * across;
  float* keys = turned_values + width * across;
  float* d_keys = keys + tokens * wide;
  float* d_values = d_keys + tokens * wide;
  float* weights = d_values + tokens * wide;
  float* d_scores = weights + kQueries * across;
  float* queries = d_scores + kQueries * across;
  float* grads = queries + kQueries * wide;
  float* made = grads + kQueries * wide;
  columns_of(from.k, from.stride, tokens, width, turned_keys, across);
  columns_of(from.v, from.stride, tokens, width, turned_values, across);
  rows_of(from.k, from.stride, tokens, width, scale, keys, wide);
  clear(d_keys, d_keys + 2 * tokens * wide);
  const float* left = grad + first_of(of, image, head, 1);
  float* to = d_qkv + first_of(of, image, head, 3);
  for (size_t first = 0; first < tokens; first += kQueries) {
    const size_t rows = tokens - first < kQueries ? tokens - first : kQueries;
    rows_of(from.q + first * from.stride, from.stride, rows, width, scale, queries, wide);
    rows_of(left + first * inner, inner, rows, width, 1, grads, wide);
    product<false>(rows, width, across, queries, wide, 1, turned_keys, across, weights, across);
    softmax(weights, rows, tokens, across);
    product<false>(rows, width, across, grads, wide, 1, turned_values, across, d_scores, across);
    product<true>(tokens, rows, wide, weights, 1, across, grads, wide, d_values, wide);
    for (size_t row = 0; row < rows; ++row) {
      float* here = d_scores + row * across;
      const float* weight = weights + row * across;
      V sums = {};
      for (size_t place = 0; place < across; place += LANES) sums += load(here + place) * load(weight + place);
      const float sum = sum_of(sums);
      for (size_t place = 0; place < across; place += LANES)
        store(here + place, (load(here + place) - sum) * load(weight + place));
    }
    product<true>(tokens, rows, wide, d_scores, 1, across, queries, wide, d_keys, wide);
    product<false>(rows, tokens, wide, d_scores, across, 1, keys, wide, made, wide);
    for (size_t row = 0; row < rows; ++row)
      copy(made + row * wide, width, to + (first + row) * from.stride);
  }
  for (size_t token = 0; token < tokens; ++token) {
    copy(d_keys + token * wide, width, to + token * from.stride + inner);
    copy(d_values + token * wide, width, to + token * from.stride + 2 * inner);
  }
}

// Phi(x) + x phi(x), where Phi(-|x|) = phi(x) m(|x|) with Mills' ratio m.
V gelu_slope(V x) {
  const V zero = {}, size = x < zero ? -x : x;
  const V density = exponential(x * x * -0.5f) * 0.398942280f;
  const V t = 1.0f / (1.0f + size * kMillsScale);
  V ratio = all(kMills[0]);
  for (size_t term = 1; term < sizeof kMills / sizeof *kMills; ++term) ratio = ratio * t + kMills[term];
  const V below = density * ratio * t;
  return (x < zero ? below : 1.0f - below) + x * density;
}

void gelu_grad(const float* grad, const float* entered, float* result, size_t count) {
  size_t place = 0;
  for (; place + LANES <= count; place += LANES)
    store(result + place, load(grad + place) * gelu_slope(load(entered + place)));
  if (place < count) {
    float last[LANES] = {};
    copy(entered + place, count - place, last);
    const V slope = gelu_slope(load(last));
    for (size_t lane = 0; place < count; ++place, ++lane) result[place] = grad[place] * slope[lane];
  }
}

void layer_norm_grad(const float* grad, const float* entered, const float* mean, const float* spread,
                     const float* gamma, float* d_entered, float* sums, size_t rows, size_t width) {
  const size_t whole = width / LANES * LANES;
  for (size_t row = 0; row < rows; ++row, grad += width, entered += width, d_entered += width) {
    const float middle = mean[row], over = spread[row];
    V all_sum = {}, along_sum = {};
    float average = 0, along = 0;
    for (size_t place = 0; place < whole; place += LANES) {
      const V left = load(grad + place), normal = (load(entered + place) - middle) * over;
      const V scaled = left * load(gamma + place), weighted = left * normal;
      all_sum += scaled;
      along_sum += scaled * normal;
      store(sums + place, load(sums + place) + weighted);
      store(sums + width + place, load(sums + width + place) + left);
    }
    for (size_t place = whole; place < width; ++place) {
      const float normal = (entered[place] - middle) * over, scaled = grad[place] * gamma[place];
      average += scaled;
      along += scaled * normal;
      sums[place] += grad[place] * normal;
      sums[width + place] += grad[place];
    }
    average = (average + sum_of(all_sum)) / width;
    along = (along + sum_of(along_sum)) / width;
    for (size_t place = 0; place < whole; place += LANES) {
      const V normal = (load(entered + place) - middle) * over, scaled = load(grad + place) * load(gamma + place);
      store(d_entered + place, (scaled - (normal * along + average)) * over);
    }
    for (size_t place = whole; place < width; ++place) {
      const float normal = (entered[place] - middle) * over;
      d_entered[place] = (grad[place] * gamma[place] - (normal * along + average)) * over;
    }
  }
}

}  // namespace

extern const Kernels NAME;
const Kernels NAME = {attention, attention_grad, gelu_grad, layer_norm_grad};
