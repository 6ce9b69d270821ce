#define TIERCEL_CLASS portable
#include "simd_portable.h"
#include "table.h"
