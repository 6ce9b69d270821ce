// The table of one class: include this last in its translation unit, after TIERCEL_CLASS and its simd header.
#include <type_traits>

#include "norm.h"

namespace tiercel::TIERCEL_CLASS {

extern const Kernels table = {
    add_norm,
};

}  // namespace tiercel::TIERCEL_CLASS
