#define TIERCEL_CLASS avx2
#include "simd_avx2.h"
#include "table.h"
