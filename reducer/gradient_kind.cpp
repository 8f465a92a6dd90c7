#include "gradient_kind.h"

#include <c10/util/StringUtil.h>

namespace ddp {

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes();
}

std::string describe_kind(const at::Tensor& t) {
  return c10::str(t.scalar_type(), " on ", t.device(), ", layout ", t.layout(), ", ", t.sizes());
}

}  // namespace ddp
