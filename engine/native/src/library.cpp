// What the shared library exports: the class of this processor and the tables.
#include "kernels.h"

namespace tiercel {
namespace portable { extern const Kernels table; }
#ifdef __x86_64__
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif
}  // namespace tiercel

#define EXPORT extern "C" __attribute__((visibility("default")))

// The order of engine/native/table.py.
enum Class : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

EXPORT int tiercel_abi() { return tiercel::kAbi; }

// The SHA-256 of the sources, as build.py computed it.
EXPORT const char* tiercel_sources() { return TIERCEL_SOURCES; }

// The most capable class that this processor and its system support.
EXPORT int tiercel_class() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!has_avx2) return kPortable;
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return kAvx512;
  return kAvx2;
#else
  return kPortable;
#endif
}

// The table of a class; null if it was not compiled. Kernels of a class above `tiercel_class` must not be called.
EXPORT const tiercel::Kernels* tiercel_kernels(int which) {
  switch (which) {
    case kPortable: return &tiercel::portable::table;
#ifdef __x86_64__
    case kAvx2: return &tiercel::avx2::table;
    case kAvx512: return &tiercel::avx512::table;
#endif
    default: return nullptr;
  }
}
