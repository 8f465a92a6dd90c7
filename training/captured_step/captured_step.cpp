#include <ddp/captured_step.h>

#include <utility>

#include "captured_step/capture_sequence.h"

namespace ddp {

class CapturedStep::Impl : public CaptureSequence {
 public:
  using CaptureSequence::CaptureSequence;
};

CapturedStep::CapturedStep(Step step, const CapturedStepOptions& options)
    : impl_(std::make_unique<Impl>(std::move(step), options, make_cuda_graph_device())) {}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()() { return impl_->run(); }

bool CapturedStep::is_captured() const { return impl_->is_captured(); }

void CapturedStep::release() { impl_->release("after release()"); }

}  // namespace ddp
