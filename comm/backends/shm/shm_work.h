#pragma once

#include <memory>
#include <vector>

#include "exchange.h"
#include "told_work.h"

namespace ddp::backends::shm {

/// The handle of one collective. Whoever waits or polls drives the Exchange.
class ShmWork : public ToldWork {
 public:
  ShmWork(
      std::shared_ptr<Exchange> exchange, int rank, c10d::OpType type, const char* title,
      std::vector<at::Tensor> outputs);

  /// Begins the call, whose end this handle then tells.
  ///
  /// \throws c10::DistBackendError  as Exchange::begin.
  void start(Call call);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

 private:
  void end(std::exception_ptr error);

  std::shared_ptr<Exchange> exchange_;
  uint64_t number_ = 0;
  bool counts_future_ = false;  // with the base class's mutex_
};

}  // namespace ddp::backends::shm
