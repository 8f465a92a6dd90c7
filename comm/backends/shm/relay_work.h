#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "exchange.h"
#include "told_work.h"

namespace ddp::backends::shm {

/// The handle of a collective that goes through several exchanges; whoever sees its end says so.
/// Whoever waits drives the exchanges.
class RelayWork : public ToldWork {
 public:
  RelayWork(
      std::vector<std::shared_ptr<Exchange>> exchanges, int rank, c10d::OpType type,
      const char* title, std::vector<at::Tensor> outputs);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// Once. What callbacks on the future throw is logged.
  void end(const std::exception_ptr& error) noexcept;

 private:
  std::vector<std::shared_ptr<Exchange>> exchanges_;
};

}  // namespace ddp::backends::shm
