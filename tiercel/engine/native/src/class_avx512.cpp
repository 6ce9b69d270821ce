#define TIERCEL_CLASS avx512
#include "simd_avx512.h"
#include "table.h"
