// Operators for onnxruntime: registers them, checks shapes, and divides the work among the engine's threads.
#include <algorithm>
#include <vector>

#include "compute.h"
#include "engine.h"

namespace {

using namespace engine;

const Kernels& kernels() {
#ifdef ONLY
  return ONLY;
#elif defined(__x86_64__)
  static const Kernels* best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? &avx512_kernels
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")       ? &avx2_kernels
                                                                                                       : &plain_kernels;
  return *best;
#else
  return plain_kernels;
#endif
}

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

  const float* input(size_t number, std::vector<int64_t>& lengths) {
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
    return data(const_cast<Tensor*>(tensor));
  }

  float* output(size_t number, const std::vector<int64_t>& lengths) {
    if (failed) return nullptr;
    Tensor* tensor = nullptr;
    using Made = Status* (*)(Context*, size_t, const int64_t*, size_t, Tensor**);
    keep(function<Made>(table_, kOutput)(context_, number, lengths.data(), lengths.size(), &tensor));
    return failed ? nullptr : data(tensor);
  }

  // work(0), work(1), ... on the engine's threads
  template <class Work>
  void each(size_t count, const Work& work) {
    if (failed || !count) return;
    using Each = Status* (*)(const Context*, void (*)(void*, size_t), size_t, size_t, void*);
    auto one = [](void* given, size_t number) { (*static_cast<const Work*>(given))(number); };
    keep(function<Each>(table_, kParallelFor)(context_, one, count, 0, const_cast<Work*>(&work)));
  }

  void require(bool right, const char* expected) {
    if (!failed && !right) failed = refused(table_, expected);
  }

  Status* failed = nullptr;

 private:
  void keep(Status* status) {
    if (!failed) failed = status;
  }

  float* data(Tensor* tensor) {
    void* place = nullptr;
    keep(function<Status* (*)(Tensor*, void**)>(table_, kTensorData)(tensor, &place));
    return static_cast<float*>(place);
  }

  Table table_;
  Context* context_;
};

using Lengths = std::vector<int64_t>;

struct Kernel {
  Table table;
  float scale;  // of attention
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
    kernels().attention(heads, kernel.scale, qkv, out, unit / heads.heads, unit % heads.heads);
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
    kernels().attention_grad(heads, kernel.scale, qkv, grad, d_qkv, unit / heads.heads, unit % heads.heads);
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
  size_t count = 1;
  for (int64_t length : lengths) count *= length;
  constexpr size_t kPiece = 1 << 13;
  run.each((count + kPiece - 1) / kPiece, [&](size_t piece) {
    const size_t first = piece * kPiece;
    kernels().gelu_grad(grad + first, entered + first, result + first, std::min(kPiece, count - first));
  });
  return run.failed;
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
  const size_t width = inner[0];
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < lengths.size(); ++axis) rows *= lengths[axis];
  // pieces do not depend on the number of threads, so that sums do not either
  const size_t piece = std::max<size_t>(16, (rows + 31) / 32), pieces = (rows + piece - 1) / piece;
  std::vector<float> sums(pieces * 2 * width);
  run.each(pieces, [&](size_t number) {
    const size_t first = number * piece, from = first * width;
    kernels().layer_norm_grad(grad + from, entered + from, mean + first, spread + first, gamma, d_entered + from,
                              sums.data() + number * 2 * width, std::min(piece, rows - first), width);
  });
  for (size_t place = 0; place < width; ++place) {
    d_gamma[place] = d_beta[place] = 0;
    for (size_t number = 0; number < pieces; ++number) {
      d_gamma[place] += sums[number * 2 * width + place];
      d_beta[place] += sums[(number * 2 + 1) * width + place];
    }
  }
  return run.failed;
}

struct Described : Operator {
  const char* called;
  size_t reads, makes;
  bool scaled;
};

const Described& described(const Operator* of) { return *static_cast<const Described*>(of); }

Described describe(const char* called, size_t reads, size_t makes, bool scaled, Status* (*compute)(void*, Context*)) {
  Described made{};
  made.called = called;
  made.reads = reads;
  made.makes = makes;
  made.scaled = scaled;
  made.version = kVersion;
  made.name = [](const Operator* of) { return described(of).called; };
  made.provider = [](const Operator*) -> const char* { return nullptr; };  // the processor
  made.inputs = [](const Operator* of) { return described(of).reads; };
  made.outputs = [](const Operator* of) { return described(of).makes; };
  made.input_type = made.output_type = [](const Operator*, size_t) { return kFloats; };
  made.input_kind = made.output_kind = [](const Operator*, size_t) { return 0; };  // required
  made.input_memory = [](const Operator*, size_t) { return 0; };
  made.least_inputs = made.least_outputs = [](const Operator*) { return 1; };
  made.equal_inputs = made.equal_outputs = [](const Operator*) { return 1; };
  made.first_version = [](const Operator*) { return 1; };
  made.last_version = [](const Operator*) { return 1; };
  made.create = [](const Operator* of, Table table, const KernelInfo* info, void** kernel) -> Status* {
    float scale = 1;
    using Read = Status* (*)(const KernelInfo*, const char*, float*);
    if (described(of).scaled)
      if (Status* failed = function<Read>(table, kFloatAttribute)(info, "scale", &scale)) return failed;
    *kernel = new Kernel{table, scale};
    return nullptr;
  };
  made.compute = compute;
  made.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return made;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) engine::Status* RegisterCustomOps(engine::SessionOptions* options,
                                                                                   const engine::Base* base) {
  static const Described operators[] = {
      describe("Attention", 1, 1, true, attention),
      describe("AttentionGrad", 2, 1, true, attention_grad),
      describe("GeluGrad", 2, 1, false, gelu_grad),
      describe("LayerNormGrad", 5, 3, false, layer_norm_grad),
  };
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
