// The table of kernels: what a processor class offers, as plain function pointers.
//
// Every class fills one table. Python reads the tables by the order of the fields, so engine/native/table.py has the same
// fields in the same order; `kAbi` is raised whenever a field or an argument changes.
#pragma once
#include <cstdint>

namespace tiercel {

constexpr int kAbi = 1;

// How numbers are stored; computing is in float32 unless a kernel says otherwise.
enum Type : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct Kernels {
  // Root-mean-square norm of x + residual. residual may be null; if not, it receives the sum, rounded to the type.
  // x, residual, out [rows, size] of `type`; weight [size] of `type`.
  void (*add_norm)(int type, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                   float eps);
};

}  // namespace tiercel
