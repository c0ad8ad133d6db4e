// What these kernels use of onnxruntime's C interface, which only ever grows at its end: functions are named by their
// place in its table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

constexpr uint32_t kVersion = 17;  // of the interface: the first with ParallelFor, onnxruntime 1.17

struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct Context;
struct Tensor;
struct Shape;
using Table = const void* const*;

struct Base {
  Table (*table)(uint32_t version);  // null where this engine is older
  const char* (*name_of_version)();
};

enum Place : size_t {
  kCreateStatus = 0,
  kCreateDomain = 26,
  kAddOperator = 27,
  kAddDomain = 28,
  kTensorData = 51,
  kAxes = 61,
  kLengths = 62,
  kShapeOf = 65,
  kFloatAttribute = 85,
  kInputs = 88,
  kInput = 90,
  kOutput = 91,
  kReleaseShape = 99,
  kParallelFor = 274,
};

constexpr int kInvalidArgument = 2;
constexpr int kRequired = 0, kOptional = 1;  // inputs and outputs
constexpr int kFloats = 1, kBytes = 2, kSignedBytes = 3;  // types of a tensor's elements

// One operator, with all that version 17 of the interface knows. The engine asks it by these functions.
struct Operator {
  uint32_t version;
  void* (*create_old)(const Operator*, Table, const KernelInfo*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t);
  size_t (*inputs)(const Operator*);
  int (*output_type)(const Operator*, size_t);
  size_t (*outputs)(const Operator*);
  void (*compute_old)(void*, Context*);
  void (*destroy)(void*);
  int (*input_kind)(const Operator*, size_t);
  int (*output_kind)(const Operator*, size_t);
  int (*input_memory)(const Operator*, size_t);
  int (*least_inputs)(const Operator*);
  int (*equal_inputs)(const Operator*);
  int (*least_outputs)(const Operator*);
  int (*equal_outputs)(const Operator*);
  Status* (*create)(const Operator*, Table, const KernelInfo*, void** kernel);
  Status* (*compute)(void* kernel, Context*);
  Status* (*infer_shapes)(const Operator*, void*);
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
};

}  // namespace engine
