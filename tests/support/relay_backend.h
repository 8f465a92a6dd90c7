// What a program's own backend is like: it has some collectives, and a name that c10d does not
// know.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ddp/backend.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/registry.h"

namespace ddp::testing {

/// Has another backend do its collectives.
class Relay : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Relay(std::string name, c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()),
        name_(std::move(name)),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return name_; }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return inner_->broadcast(t, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return inner_->allreduce(t, o);
  }
  WorkPtr allgather(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return inner_->allgather(to, from, o);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }
  void abort() override { inner_->abort(); }

 protected:
  c10d::Backend& inner() const { return *inner_; }

 private:
  const std::string name_;
  const c10::intrusive_ptr<c10d::Backend> inner_;
};

/// Gloo on the loopback device, for a Relay.
inline c10::intrusive_ptr<c10d::Backend> make_loopback(const BackendSetup& s) {
  backends::Setup setup;
  setup.store = s.store;
  setup.rank = s.rank;
  setup.world_size = s.size;
  setup.timeout = s.timeout;
  setup.connect_by = Deadline(s.timeout);
  setup.group_name = s.group_name;
  setup.global_ranks.assign(s.global_ranks.begin(), s.global_ranks.end());
  setup.gloo_devices.address = "127.0.0.1";
  return backends::make_gloo(setup);
}

}  // namespace ddp::testing
