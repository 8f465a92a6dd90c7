#include "backends/local_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/check.h>

namespace ddp::backends {
namespace {

class SingleRankBackend : public LocalBackend {
 public:
  SingleRankBackend(const std::string& name, std::chrono::milliseconds timeout)
      : LocalBackend(/*rank=*/0, /*size=*/1, name, timeout) {}

  WorkPtr send(Tensors& /*t*/, int dst, int /*tag*/) override { refuse("send", dst); }
  WorkPtr recv(Tensors& /*t*/, int src, int /*tag*/) override { refuse("recv", src); }
  WorkPtr recvAnysource(Tensors& /*t*/, int /*tag*/) override { refuse("recv", -1); }

  WorkPtr run(Collective c) override {
    DDP_CHECK_VALUE(
        c.op.op_ != c10d::ReduceOp::PREMUL_SUM,
        "a group of one rank: expected another reduction than PREMUL_SUM. Multiply the tensor.");
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    const auto in = c.inputs(), out = c.outputs();
    for (size_t i = 0; i < out.size(); ++i) {
      if (!out[i].is_same(in[i])) out[i].copy_(in[i].reshape(out[i].sizes()));
    }
    return done(c.type, c.results());
  }

 private:
  [[noreturn]] static void refuse(const char* call, int peer) {
    throw readable_error<c10::ValueError>(
        DDP_HERE, ddp::str(
                      call, ": expected another rank of the group, got rank ", peer,
                      " in a group of one rank. Copy the tensor."));
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_single_rank_backend(
    const std::string& name, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SingleRankBackend>(name, timeout);
}

}  // namespace ddp::backends
