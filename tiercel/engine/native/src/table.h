// The table of one class: include this last in its translation unit, after TIERCEL_CLASS and its simd header.
#include <type_traits>

#include "activation.h"
#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "quantized.h"
#include "rope.h"
#include "sampling.h"

namespace tiercel::TIERCEL_CLASS {

extern const Kernels table = {
    linear_bytes,
    linear_pack,
    linear,
    embed,
    quantized_bytes,
    quantized_pack,
    quantized_room,
    quantized_linear,
    quantized_embed,
    add_norm,
    silu_mul,
    store_heads,
    attend,
    draw_rows,
};

}  // namespace tiercel::TIERCEL_CLASS
