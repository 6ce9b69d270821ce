// What the shared library exports: the class of this processor and the tables.
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

// Null for a class that was not compiled.
#define DECLARE_TABLE extern const Kernels table __attribute__((weak))

namespace tiercel {
namespace portable { DECLARE_TABLE; }
namespace avx2 { DECLARE_TABLE; }
namespace avx512 { DECLARE_TABLE; }
namespace amx { DECLARE_TABLE; }
}  // namespace tiercel

#define EXPORT extern "C" __attribute__((visibility("default")))

// The order of engine/native/table.py.
enum Class : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

EXPORT int tiercel_abi() { return tiercel::kAbi; }

// The SHA-256 of the sources, as build.py computed it.
EXPORT const char* tiercel_sources() { return TIERCEL_SOURCES; }

#ifdef __x86_64__
// Whether the processor has AMX with products of bf16 and of integers, and Linux (from version 5.16) lets this process use the registers.
static bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
#ifdef __linux__
  const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

// The most capable class that was compiled and that this processor and its system support.
EXPORT int tiercel_class() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!has_avx2) return kPortable;
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return &tiercel::amx::table && has_tiles() ? kAmx : kAvx512;
  return kAvx2;
#else
  return kPortable;
#endif
}

// The table of a class; null if it was not compiled. Kernels of a class above `tiercel_class` must not be called.
EXPORT const tiercel::Kernels* tiercel_kernels(int which) {
  switch (which) {
    case kPortable: return &tiercel::portable::table;
    case kAvx2: return &tiercel::avx2::table;
    case kAvx512: return &tiercel::avx512::table;
    case kAmx: return &tiercel::amx::table;
    default: return nullptr;
  }
}
