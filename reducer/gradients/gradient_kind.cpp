#include "gradients/gradient_kind.h"

#include <ddp/internal/text.h>

namespace ddp {

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes();
}

std::string kind_difference(const at::Tensor& got, const at::Tensor& expected) {
  std::string text;
  const auto compare = [&](const char* what, const auto& a, const auto& b) {
    if (a != b) text += ddp::str(text.empty() ? "" : ", ", what, a, " instead of ", b);
  };
  compare("", got.scalar_type(), expected.scalar_type());
  compare("on ", got.device(), expected.device());
  compare("layout ", got.layout(), expected.layout());
  compare("shape ", got.sizes(), expected.sizes());
  return text;
}

}  // namespace ddp
