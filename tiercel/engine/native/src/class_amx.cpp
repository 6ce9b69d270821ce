// AVX-512, with tile registers for products of bf16 by bf16.
//
// Tests compile it with TIERCEL_EMULATE_TILES for processors without AMX, and without the flags of AVX-512 for any processor.
#define TIERCEL_CLASS amx
#define TIERCEL_TILES
#if defined(TIERCEL_EMULATE_TILES) && !defined(__AVX512BF16__)
#include "simd_portable.h"
#else
#include "simd_avx512.h"
#endif
#include "table.h"
