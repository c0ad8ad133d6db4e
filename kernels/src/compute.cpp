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

// The numbers of lanes, as a constant: the compiler puts a vector that is filled in a loop together number by number.
#if LANES == 4
constexpr I kLanes = {0, 1, 2, 3};
#elif LANES == 8
constexpr I kLanes = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr I kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// Lanes so far apart change places.
inline __attribute__((always_inline)) V swapped(V value, int32_t distance) {
  return __builtin_shuffle(value, kLanes ^ distance);
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

constexpr int32_t kInfinity = 0x7f800000;  // as bits; those of NaN are larger

// The bits of magnitudes, which are in the order of the numbers.
I magnitude_bits(V x) { return (I)x & 0x7fffffff; }

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0 by 2^n 2^r, |r| <= 1/2, and the Taylor series of 2^r to the seventh term: within 2 last digits.
// 2^-100 below -100, which is nothing beside 1, and no denormal number. NaN stays NaN: "x < least" is false for it, and
// this way round the comparison is one instruction of NEON.
inline __attribute__((always_inline)) V power_of_2(V x) {
  const V least = all(-100.0f);
  x = x < least ? least : x;
  const V magic = all(12582912.0f + 127);  // 1.5 x 2^23: adding it rounds; the last bits are n and a float's offset of it
  const V rounded = x + magic, rest = x - (rounded - magic);
  constexpr float terms[] = {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f,
                             2.40226507e-1f, 6.93147181e-1f, 1.0f};
  V series = all(1.52527338e-5f);
#pragma GCC unroll 8
  for (float term : terms) series = series * rest + term;
  return series * (V)((I)rounded << 23);
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

void scaled(const float* from, size_t count, float factor, float* to) {
  size_t place = 0;
  for (; place + LANES <= count; place += LANES) store(to + place, load(from + place) * factor);
  for (; place < count; ++place) to[place] = from[place] * factor;
}

void copy(const float* from, size_t count, float* to) { scaled(from, count, 1, to); }

// (tokens, width) of one head, to rows of `row` floats whose ends are 0, each number times `factor`
void rows_of(const float* from, size_t stride, size_t tokens, size_t width, float factor, float* to, size_t row) {
  for (size_t token = 0; token < tokens; ++token, from += stride, to += row) {
    scaled(from, width, factor, to);
    clear(to + width, to + row);
  }
}

// LANES vectors become their columns: places whose numbers differ in one bit are exchanged, bit by bit.
void turn(V* rows) {
#pragma GCC unroll 4
  for (int32_t distance = LANES / 2; distance; distance /= 2) {
    const I other = kLanes & distance, low = kLanes + (other ? LANES - distance : I{});
    const I high = kLanes + (other ? LANES + I{} : distance + I{});
#pragma GCC unroll 16
    for (int32_t row = 0; row < LANES; ++row) {
      if (row & distance) continue;
      const V upper = rows[row], lower = rows[row + distance];
      rows[row] = __builtin_shuffle(upper, lower, low);
      rows[row + distance] = __builtin_shuffle(upper, lower, high);
    }
  }
}

// (tokens, width) of one head, to `width` rows of `row` floats whose ends are 0
void columns_of(const float* from, size_t stride, size_t tokens, size_t width, float* to, size_t row) {
  const size_t wide = width / LANES * LANES;
  for (size_t first = 0; first < tokens; first += LANES) {
    const size_t count = tokens - first < LANES ? tokens - first : LANES;
    for (size_t place = 0; place < wide; place += LANES) {
      V block[LANES];
#pragma GCC unroll 16
      for (size_t token = 0; token < LANES; ++token)
        block[token] = token < count ? load(from + (first + token) * stride + place) : V{};
      turn(block);
#pragma GCC unroll 16
      for (size_t column = 0; column < LANES; ++column) store(to + (place + column) * row + first, block[column]);
    }
    for (size_t place = wide; place < width; ++place)
      for (size_t token = 0; token < LANES; ++token)
        to[place * row + first + token] = token < count ? from[(first + token) * stride + place] : 0;
  }
}

// Rows of scores become weights, each row's still to be multiplied by its share; what lies behind the tokens becomes 0.
// Scores are logarithms to the base of 2. Loop by loop, since a row by itself is one long chain.
void softmax(float* scores, size_t rows, size_t tokens, size_t row, float* shares) {
  const size_t last = row - LANES;
  const I behind = kLanes >= int32_t(tokens - last);
  float most[kQueries];
  for (size_t number = 0; number < rows; ++number) {
    float* here = scores + number * row;
    V highest = behind ? all(-__builtin_inff()) : load(here + last);
    store(here + last, highest);
    for (size_t place = 0; place < last; place += LANES) {
      const V score = load(here + place);
      highest = score > highest ? score : highest;
    }
    most[number] = largest_of(highest);
  }
  for (size_t number = 0; number < rows; ++number) {
    float* here = scores + number * row;
    V sums = {};
    for (size_t place = 0; place < row; place += LANES) {
      const V weight = power_of_2(load(here + place) - most[number]);
      store(here + place, weight);
      sums += weight;
    }
    shares[number] = sum_of(sums);
  }
  for (size_t number = 0; number < rows; ++number) shares[number] = 1 / shares[number];
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
    float shares[kQueries];
    rows_of(from.q + first * from.stride, from.stride, rows, width, scale * kLog2E, queries, wide);
    product<false>(rows, width, across, queries, wide, 1, keys, across, weights, across);
    softmax(weights, rows, tokens, across, shares);
    product<false>(rows, tokens, wide, weights, across, 1, values, wide, made, wide);
    for (size_t row = 0; row < rows; ++row)
      scaled(made + row * wide, width, shares[row], to + (first + row) * of.heads * width);
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
    float shares[kQueries], sums[kQueries];
    rows_of(from.q + first * from.stride, from.stride, rows, width, scale * kLog2E, queries, wide);
    rows_of(left + first * inner, inner, rows, width, 1, grads, wide);
    product<false>(rows, width, across, queries, wide, 1, turned_keys, across, weights, across);
    softmax(weights, rows, tokens, across, shares);
    product<false>(rows, width, across, grads, wide, 1, turned_values, across, d_scores, across);
    for (size_t row = 0; row < rows; ++row) {
      const float *here = d_scores + row * across, *weight = weights + row * across;
      V along = {};
      for (size_t place = 0; place < across; place += LANES) along += load(here + place) * load(weight + place);
      sums[row] = sum_of(along) * shares[row];
    }
    for (size_t row = 0; row < rows; ++row) {
      float* here = d_scores + row * across;
      const float *weight = weights + row * across, share = shares[row];
      for (size_t place = 0; place < across; place += LANES)
        store(here + place, (load(here + place) - sums[row]) * (load(weight + place) * share));
      scaled(grads + row * wide, wide, share, grads + row * wide);
    }
    product<true>(tokens, rows, wide, weights, 1, across, grads, wide, d_values, wide);
    product<true>(tokens, rows, wide, d_scores, 1, across, queries, wide, d_keys, wide);
    product<false>(rows, tokens, wide, d_scores, across, 1, keys, wide, made, wide);
    for (size_t row = 0; row < rows; ++row)
      copy(made + row * wide, width, to + (first + row) * from.stride);
  }
  for (size_t token = 0; token < tokens; ++token) {
    scaled(d_keys + token * wide, width, 1 / kLog2E, to + token * from.stride + inner);
    copy(d_values + token * wide, width, to + token * from.stride + 2 * inner);
  }
}

// Phi(x) + x phi(x), where Phi(-|x|) = phi(x) m(|x|) with Mills' ratio m. Inlined, so that loops load its numbers once.
inline __attribute__((always_inline)) V gelu_slope(V x) {
  const V zero = {}, size = (V)magnitude_bits(x);
  const V density = power_of_2(x * x * (-0.5f * kLog2E)) * 0.398942280f;
  const V t = 1.0f / (1.0f + size * kMillsScale);
  V ratio = all(kMills[0]);
#pragma GCC unroll 9
  for (size_t term = 1; term < sizeof kMills / sizeof *kMills; ++term) ratio = ratio * t + kMills[term];
  const V below = density * ratio * t;
  return (x > zero ? 1.0f - below : below) + x * density;
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

void layer_norm(const float* entered, const float* gamma, const float* beta, float epsilon, float* result, float* mean,
                float* spread, size_t rows, size_t width) {
  const size_t whole = width / LANES * LANES;
  for (size_t row = 0; row < rows; ++row, entered += width, result += width) {
    V sums = {}, squares = {};
    float sum = 0, square = 0;
    for (size_t place = 0; place < whole; place += LANES) sums += load(entered + place);
    for (size_t place = whole; place < width; ++place) sum += entered[place];
    const float middle = (sum + sum_of(sums)) / width;
    for (size_t place = 0; place < whole; place += LANES) {
      const V off = load(entered + place) - middle;
      squares += off * off;
    }
    for (size_t place = whole; place < width; ++place) square += (entered[place] - middle) * (entered[place] - middle);
    const float over = 1 / __builtin_sqrtf((square + sum_of(squares)) / width + epsilon);
    for (size_t place = 0; place < whole; place += LANES)
      store(result + place, (load(entered + place) - middle) * over * load(gamma + place) + load(beta + place));
    for (size_t place = whole; place < width; ++place)
      result[place] = (entered[place] - middle) * over * gamma[place] + beta[place];
    mean[row] = middle;
    spread[row] = over;
  }
}

void column_sums(const float* entered, float* sums, size_t rows, size_t width) {
  const size_t whole = width / LANES * LANES;
  for (size_t row = 0; row < rows; ++row, entered += width) {
    for (size_t place = 0; place < whole; place += LANES)
      store(sums + place, load(sums + place) + load(entered + place));
    for (size_t place = whole; place < width; ++place) sums[place] += entered[place];
  }
}

// Adding it rounds a number of less than 2^22 to a whole one, to the even one of two: the last bits are the integer.
constexpr float kRounding = 12582912.0f;  // 1.5 x 2^23

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

void round_rows(const float* entered, const float* factors, float most_steps, int zero, uint8_t* rounded,
                float* scales, size_t rows, size_t width) {
  const size_t whole = width / LANES * LANES;
  auto number = [&](size_t place) { return factors ? entered[place] * factors[place] : entered[place]; };
  auto numbers = [&](size_t place) {
    return factors ? load(entered + place) * load(factors + place) : load(entered + place);
  };
  for (size_t row = 0; row < rows; ++row, entered += width, rounded += width) {
    I highest = magnitude_bits(all(1e-30f));
#pragma GCC unroll 4
    for (size_t place = 0; place < whole; place += LANES) {
      const I size = magnitude_bits(numbers(place));
      highest = size > highest ? size : highest;
    }
    for (size_t place = whole; place < width; ++place) {
      const I size = magnitude_bits(all(number(place)));
      highest = size > highest ? size : highest;
    }
    int32_t most = highest[0];
    for (size_t lane = 1; lane < LANES; ++lane) most = highest[lane] > most ? highest[lane] : most;
    const float scale = ((V)(most - I{}))[0] * (1 / most_steps), steps = 1 / scale;
    scales[row] = most < kInfinity ? scale : __builtin_nanf("");
    const float rounding = kRounding + zero;  // the last bits of a sum with it are a whole number above `zero`
#pragma GCC unroll 4
    for (size_t place = 0; place < whole; place += LANES) {
      const I bits = (I)(numbers(place) * steps + rounding);
      *reinterpret_cast<Bytes*>(rounded + place) = __builtin_convertvector(bits, Bytes);
    }
    for (size_t place = whole; place < width; ++place) {
      const V one = all(number(place)) * steps + rounding;
      rounded[place] = uint8_t(((I)one)[0]);
    }
  }
}

void scale_rows(const float* entered, const float* scales, const float* bias, float* result, size_t rows,
                size_t width) {
  const size_t whole = width / LANES * LANES;
  for (size_t row = 0; row < rows; ++row, entered += width, result += width) {
    const float scale = scales[row];
    if (bias) {
#pragma GCC unroll 4
      for (size_t place = 0; place < whole; place += LANES)
        store(result + place, load(entered + place) * scale + load(bias + place));
      for (size_t place = whole; place < width; ++place) result[place] = entered[place] * scale + bias[place];
    } else {
#pragma GCC unroll 4
      for (size_t place = 0; place < whole; place += LANES) store(result + place, load(entered + place) * scale);
      for (size_t place = whole; place < width; ++place) result[place] = entered[place] * scale;
    }
  }
}

// The square root of each number: the compiler makes one instruction of it.
inline __attribute__((always_inline)) V root_of(V value) {
#pragma GCC unroll 16
  for (size_t lane = 0; lane < LANES; ++lane) value[lane] = __builtin_sqrtf(value[lane]);
  return value;
}

void adamw(const AdamW& by, const float* value, const float* grad, const float* mean, const float* square,
           float* next_value, float* next_mean, float* next_square, size_t count) {
  const AdamW with = by;  // a copy, which what is written cannot change
  const size_t whole = count / LANES * LANES;
#pragma GCC unroll 4
  for (size_t place = 0; place < whole; place += LANES) {
    const V slope = load(grad + place);
    const V average = load(mean + place) * with.kept_mean + slope * with.new_mean;
    const V second = load(square + place) * with.kept_square + slope * with.new_square * slope;
    store(next_mean + place, average);
    store(next_square + place, second);
    store(next_value + place, load(value + place) * with.kept - average * with.rate / (root_of(second) + with.least));
  }
  for (size_t place = whole; place < count; ++place) {
    const float slope = grad[place], average = mean[place] * with.kept_mean + slope * with.new_mean;
    const float second = square[place] * with.kept_square + slope * with.new_square * slope;
    next_mean[place] = average;
    next_square[place] = second;
    next_value[place] = value[place] * with.kept - average * with.rate / (__builtin_sqrtf(second) + with.least);
  }
}

}  // namespace

extern const Kernels NAME;
const Kernels NAME = {attention,  attention_grad, gelu_grad,   layer_norm_grad, round_rows,
                      scale_rows, layer_norm,     column_sums, adamw};
