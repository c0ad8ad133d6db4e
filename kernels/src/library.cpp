// Operators for onnxruntime: registers them, checks shapes, and divides the work among the engine's threads.
#include <algorithm>
#include <vector>

#include "compute.h"
#include "engine.h"

namespace {

using namespace engine;

#ifdef ONLY
const Kernels& choose() { return ONLY; }
#elif defined(__x86_64__)
const Kernels& choose() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return plain_kernels;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? avx512_kernels : avx2_kernels;
}
#else
const Kernels& choose() { return plain_kernels; }
#endif

// chosen when the library is loaded: the engine's threads only read it
const Kernels& chosen = choose();

const Kernels& kernels() { return chosen; }

template <class Function>
Function function(Table table, Place place) {
  return reinterpret_cast<Function>(const_cast<void*>(table[place]));
}

Status* refused(Table table, const char* why) {
  return function<Status* (*)(int, const char*)>(table, kCreateStatus)(kInvalidArgument, why);
}

// One run of a node.
class Run {
 public:
  Run(Table table, Context* context) : table_(table), context_(context) {}

  // null, and no lengths, where an optional input is not there
  template <class Number = float>
  const Number* input(size_t number, std::vector<int64_t>& lengths) {
    lengths.clear();
    size_t count = 0;
    keep(function<Status* (*)(const Context*, size_t*)>(table_, kInputs)(context_, &count));
    if (failed || number >= count) return nullptr;
    const Tensor* tensor = nullptr;
    keep(function<Status* (*)(const Context*, size_t, const Tensor**)>(table_, kInput)(context_, number, &tensor));
    Shape* shape = nullptr;
    if (!failed) keep(function<Status* (*)(const Tensor*, Shape**)>(table_, kShapeOf)(tensor, &shape));
    if (failed) return nullptr;
    size_t axes = 0;
    keep(function<Status* (*)(const Shape*, size_t*)>(table_, kAxes)(shape, &axes));
    lengths.resize(axes);
    keep(function<Status* (*)(const Shape*, int64_t*, size_t)>(table_, kLengths)(shape, lengths.data(), axes));
    function<void (*)(Shape*)>(table_, kReleaseShape)(shape);
    return data<Number>(const_cast<Tensor*>(tensor));
  }

  template <class Number = float>
  Number* output(size_t number, const std::vector<int64_t>& lengths) {
    if (failed) return nullptr;
    Tensor* tensor = nullptr;
    using Made = Status* (*)(Context*, size_t, const int64_t*, size_t, Tensor**);
    keep(function<Made>(table_, kOutput)(context_, number, lengths.data(), lengths.size(), &tensor));
    return failed ? nullptr : data<Number>(tensor);
  }

  // work(0), work(1), ... on the engine's threads
  template <class Work>
  void each(size_t count, const Work& work) {
    if (failed || !count) return;
    using Each = Status* (*)(const Context*, void (*)(void*, size_t), size_t, size_t, void*);
    auto one = [](void* given, size_t number) { (*static_cast<const Work*>(given))(number); };
    keep(function<Each>(table_, kParallelFor)(context_, one, count, 0, const_cast<Work*>(&work)));
  }

  // work(first, count) for pieces of rows, each about as much as a core's first cache holds
  template <class Work>
  void rows(size_t count, size_t width, const Work& work) {
    const size_t piece = std::max<size_t>(1, (1 << 13) / std::max<size_t>(1, width));
    each((count + piece - 1) / piece, [&](size_t number) {
      work(number * piece, std::min(piece, count - number * piece));
    });
  }

  // the same for the numbers of a tensor
  template <class Work>
  void numbers(const std::vector<int64_t>& lengths, const Work& work) {
    size_t count = 1;
    for (int64_t length : lengths) count *= length;
    rows(count, 1, work);
  }

  void require(bool right, const char* expected) {
    if (!failed && !right) failed = refused(table_, expected);
  }

  Status* failed = nullptr;

 private:
  void keep(Status* status) {
    if (!failed) failed = status;
  }

  template <class Number>
  Number* data(Tensor* tensor) {
    void* place = nullptr;
    keep(function<Status* (*)(Tensor*, void**)>(table_, kTensorData)(tensor, &place));
    return static_cast<Number*>(place);
  }

  Table table_;
  Context* context_;
};

using Lengths = std::vector<int64_t>;

struct Kernel {
  Table table;
  float number;  // of the one attribute, where there is one: attention's scale, or LayerNorm's epsilon
};

bool heads_of(const Lengths& qkv, Heads& heads) {
  if (qkv.size() != 5 || qkv[2] != 3) return false;
  heads = {size_t(qkv[0]), size_t(qkv[1]), size_t(qkv[3]), size_t(qkv[4])};
  return true;
}

Status* attention(void* self, Context* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  Run run(kernel.table, context);
  Lengths lengths;
  Heads heads{};
  const float* qkv = run.input(0, lengths);
  run.require(heads_of(lengths, heads), "Attention: expected (images, tokens, 3, heads, width)");
  if (run.failed) return run.failed;
  float* out = run.output(0, {lengths[0], lengths[1], lengths[3], lengths[4]});
  run.each(heads.images * heads.heads, [&](size_t unit) {
    kernels().attention(heads, kernel.number, qkv, out, unit / heads.heads, unit % heads.heads);
  });
  return run.failed;
}

Status* attention_grad(void* self, Context* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  Run run(kernel.table, context);
  Lengths lengths, left;
  Heads heads{};
  const float* qkv = run.input(0, lengths);
  const float* grad = run.input(1, left);
  run.require(heads_of(lengths, heads), "AttentionGrad: expected (images, tokens, 3, heads, width)");
  run.require(run.failed || left == Lengths{lengths[0], lengths[1], lengths[3], lengths[4]},
              "AttentionGrad: expected a gradient of (images, tokens, heads, width)");
  float* d_qkv = run.output(0, lengths);
  run.each(heads.images * heads.heads, [&](size_t unit) {
    kernels().attention_grad(heads, kernel.number, qkv, grad, d_qkv, unit / heads.heads, unit % heads.heads);
  });
  return run.failed;
}

Status* gelu_grad(void* self, Context* context) {
  Run run(static_cast<Kernel*>(self)->table, context);
  Lengths lengths, left;
  const float* grad = run.input(0, left);
  const float* entered = run.input(1, lengths);
  run.require(left == lengths, "GeluGrad: expected two tensors of one shape");
  float* result = run.output(0, lengths);
  run.numbers(lengths, [&](size_t first, size_t count) {
    kernels().gelu_grad(grad + first, entered + first, result + first, count);
  });
  return run.failed;
}

size_t rows_of(const Lengths& lengths) {
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < lengths.size(); ++axis) rows *= lengths[axis];
  return rows;
}

// Pieces of rows for sums: they do not depend on the number of threads, so that sums do not either.
struct Pieces {
  size_t all, each, count;
  explicit Pieces(size_t rows) : all(rows), each(std::max<size_t>(16, (rows + 31) / 32)) {
    count = (rows + each - 1) / each;
  }
  size_t first(size_t number) const { return number * each; }
  size_t rows(size_t number) const { return std::min(each, all - first(number)); }
};

// result (width): the sum of `count` rows that lie `apart` floats from each other
void add_pieces(const float* sums, size_t count, size_t apart, size_t width, float* result) {
  std::fill(result, result + width, 0.0f);
  for (size_t number = 0; number < count; ++number, sums += apart)
    for (size_t place = 0; place < width; ++place) result[place] += sums[place];
}

Status* layer_norm_grad(void* self, Context* context) {
  Run run(static_cast<Kernel*>(self)->table, context);
  Lengths lengths, left, means, spreads, inner;
  const float* grad = run.input(0, left);
  const float* entered = run.input(1, lengths);
  const float* mean = run.input(2, means);
  const float* spread = run.input(3, spreads);
  const float* gamma = run.input(4, inner);
  Lengths moments = lengths;
  if (!moments.empty()) moments.back() = 1;
  run.require(inner.size() == 1 && !lengths.empty() && lengths.back() == inner[0] && left == lengths &&
                  means == moments && spreads == moments,
              "LayerNormGrad: expected rows, their means and deviations, and a factor for each column");
  float* d_entered = run.output(0, lengths);
  float* d_gamma = run.output(1, inner);
  float* d_beta = run.output(2, inner);
  if (run.failed) return run.failed;
  const size_t width = inner[0], rows = rows_of(lengths);
  const Pieces pieces(rows);
  std::vector<float> sums(pieces.count * 2 * width);
  run.each(pieces.count, [&](size_t number) {
    const size_t first = pieces.first(number), from = first * width;
    kernels().layer_norm_grad(grad + from, entered + from, mean + first, spread + first, gamma, d_entered + from,
                              sums.data() + number * 2 * width, pieces.rows(number), width);
  });
  add_pieces(sums.data(), pieces.count, 2 * width, width, d_gamma);
  add_pieces(sums.data() + width, pieces.count, 2 * width, width, d_beta);
  return run.failed;
}

Status* column_sums(void* self, Context* context) {
  Run run(static_cast<Kernel*>(self)->table, context);
  Lengths lengths;
  const float* entered = run.input(0, lengths);
  run.require(lengths.size() == 2, "ColumnSums: expected rows");
  if (run.failed) return run.failed;
  float* result = run.output(0, {1, lengths[1]});
  if (run.failed) return run.failed;
  const size_t width = lengths[1];
  const Pieces pieces(lengths[0]);
  std::vector<float> sums(pieces.count * width);
  run.each(pieces.count, [&](size_t number) {
    kernels().column_sums(entered + pieces.first(number) * width, sums.data() + number * width, pieces.rows(number),
                          width);
  });
  add_pieces(sums.data(), pieces.count, width, width, result);
  return run.failed;
}

Status* layer_norm(void* self, Context* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  Run run(kernel.table, context);
  Lengths lengths, factors, offsets;
  const float* entered = run.input(0, lengths);
  const float* gamma = run.input(1, factors);
  const float* beta = run.input(2, offsets);
  run.require(!lengths.empty() && factors == Lengths{lengths.back()} && offsets == factors,
              "LayerNorm: expected rows, and a factor and an offset for each column");
  if (run.failed) return run.failed;
  Lengths moments = lengths;
  moments.back() = 1;
  float* result = run.output(0, lengths);
  float* mean = run.output(1, moments);
  float* spread = run.output(2, moments);
  const size_t width = lengths.back();
  run.rows(rows_of(lengths), width, [&](size_t first, size_t count) {
    const size_t from = first * width;
    kernels().layer_norm(entered + from, gamma, beta, kernel.number, result + from, mean + first, spread + first, count,
                         width);
  });
  return run.failed;
}

Status* round_rows(Context* context, const Kernel& kernel, float steps, int zero) {
  Run run(kernel.table, context);
  Lengths lengths, across;
  const float* entered = run.input(0, lengths);
  const float* factors = run.input(1, across);
  run.require(lengths.size() == 2 && (!factors || across == Lengths{lengths[1]}),
              "RoundRows, RoundWeights: expected rows, and at most a factor for each column");
  if (run.failed) return run.failed;
  uint8_t* rounded = run.output<uint8_t>(0, lengths);
  float* scales = run.output(1, {lengths[0], 1});
  const size_t width = lengths[1];
  run.rows(lengths[0], width, [&](size_t first, size_t count) {
    const size_t from = first * width;
    kernels().round_rows(entered + from, factors, steps, zero, rounded + from, scales + first, count, width);
  });
  return run.failed;
}

// of what is multiplied by weights: around 128, as unsigned bytes
Status* round_rows(void* self, Context* context) { return round_rows(context, *static_cast<Kernel*>(self), 127, 128); }

// of weights: coarser, as signed bytes
Status* round_weights(void* self, Context* context) { return round_rows(context, *static_cast<Kernel*>(self), 64, 0); }

Status* scale_rows(void* self, Context* context) {
  Run run(static_cast<Kernel*>(self)->table, context);
  Lengths lengths, down, across;
  const float* entered = run.input(0, lengths);
  const float* scales = run.input(1, down);
  const float* bias = run.input(2, across);
  run.require(lengths.size() == 2 && down == Lengths{lengths[0], 1} && (!bias || across == Lengths{lengths[1]}),
              "ScaleRows: expected rows, a scale for each of them, and at most a bias for each column");
  if (run.failed) return run.failed;
  float* result = run.output(0, lengths);
  const size_t width = lengths[1];
  run.rows(lengths[0], width, [&](size_t first, size_t count) {
    const size_t from = first * width;
    kernels().scale_rows(entered + from, scales + first, bias, result + from, count, width);
  });
  return run.failed;
}

Status* adamw(void* self, Context* context) {
  Run run(static_cast<Kernel*>(self)->table, context);
  Lengths lengths, other;
  constexpr size_t kTensors = 4, kFactors = 7;
  const float* tensors[kTensors];
  float factors[kFactors];
  for (size_t number = 0; number < kTensors; ++number) {
    tensors[number] = run.input(number, number ? other : lengths);
    run.require(!number || other == lengths, "AdamW: expected four tensors of one shape");
  }
  for (size_t number = 0; number < kFactors; ++number) {
    const float* factor = run.input(kTensors + number, other);
    run.require(other.empty(), "AdamW: expected seven numbers after the tensors");
    if (run.failed) return run.failed;
    factors[number] = *factor;
  }
  const AdamW by = {factors[0], factors[1], factors[2], factors[3], factors[4], factors[5], factors[6]};
  float* value = run.output(0, lengths);
  float* mean = run.output(1, lengths);
  float* square = run.output(2, lengths);
  run.numbers(lengths, [&](size_t first, size_t count) {
    kernels().adamw(by, tensors[0] + first, tensors[1] + first, tensors[2] + first, tensors[3] + first, value + first,
                    mean + first, square + first, count);
  });
  return run.failed;
}

struct Described : Operator {
  const char* called;
  size_t reads, makes;
  Status* (*compute_now)(void*, Context*);
  const char* attribute = nullptr;  // a number
  bool last_is_optional = false;
  int first_type = kFloats;  // of the outputs
};

const Described& described(const Operator* of) { return *static_cast<const Described*>(of); }

// Fills in what the engine asks for.
Described completed(Described made) {
  made.version = kVersion;
  made.name = [](const Operator* of) { return described(of).called; };
  made.provider = [](const Operator*) -> const char* { return nullptr; };  // the processor
  made.inputs = [](const Operator* of) { return described(of).reads; };
  made.outputs = [](const Operator* of) { return described(of).makes; };
  made.input_type = [](const Operator*, size_t) { return kFloats; };
  made.output_type = [](const Operator* of, size_t number) { return number ? kFloats : described(of).first_type; };
  made.input_kind = [](const Operator* of, size_t number) {
    return described(of).last_is_optional && number + 1 == described(of).reads ? kOptional : kRequired;
  };
  made.output_kind = [](const Operator*, size_t) { return kRequired; };
  made.input_memory = [](const Operator*, size_t) { return 0; };
  made.least_inputs = made.least_outputs = [](const Operator*) { return 1; };
  made.equal_inputs = made.equal_outputs = [](const Operator*) { return 1; };
  made.first_version = [](const Operator*) { return 1; };
  made.last_version = [](const Operator*) { return 1; };
  made.create = [](const Operator* of, Table table, const KernelInfo* info, void** kernel) -> Status* {
    float number = 0;
    using Read = Status* (*)(const KernelInfo*, const char*, float*);
    if (const char* attribute = described(of).attribute)
      if (Status* failed = function<Read>(table, kFloatAttribute)(info, attribute, &number)) return failed;
    *kernel = new Kernel{table, number};
    return nullptr;
  };
  made.compute = made.compute_now;
  made.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return made;
}

const Described operators[] = {
    completed({{}, "Attention", 1, 1, attention, "scale"}),
    completed({{}, "AttentionGrad", 2, 1, attention_grad, "scale"}),
    completed({{}, "GeluGrad", 2, 1, gelu_grad}),
    completed({{}, "LayerNorm", 3, 3, layer_norm, "epsilon"}),
    completed({{}, "LayerNormGrad", 5, 3, layer_norm_grad}),
    completed({{}, "ColumnSums", 1, 1, column_sums}),
    completed({{}, "RoundRows", 2, 2, round_rows, nullptr, true, kBytes}),
    completed({{}, "RoundWeights", 1, 2, round_weights, nullptr, false, kSignedBytes}),
    completed({{}, "ScaleRows", 3, 1, scale_rows, nullptr, true}),
    completed({{}, "AdamW", 11, 3, adamw}),
};

}  // namespace

extern "C" __attribute__((visibility("default"))) engine::Status* RegisterCustomOps(engine::SessionOptions* options,
                                                                                   const engine::Base* base) {
  Table table = base->table(kVersion);
  if (!table) return refused(base->table(1), "the kernels of fedvit need onnxruntime 1.17 or later");
  // the engine refers to the domain for as long as there are sessions: it is made once, and kept
  static Domain* domain = nullptr;
  if (!domain) {
    using Create = Status* (*)(const char*, Domain**);
    if (Status* failed = function<Create>(table, kCreateDomain)("fedvit.kernels", &domain)) return failed;
    for (const Described& one : operators) {
      using Add = Status* (*)(Domain*, const Operator*);
      if (Status* failed = function<Add>(table, kAddOperator)(domain, &one)) return failed;
    }
  }
  return function<Status* (*)(SessionOptions*, Domain*)>(table, kAddDomain)(options, domain);
}
