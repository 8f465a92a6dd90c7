// A backend of a program's own: its name is unknown to c10d.
#pragma once

#include <string>
#include <utility>

#include <ddp/backend.h>
#include <ddp/collective_backend.h>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/registry.h"

namespace ddp::testing {

/// Has another backend do its collectives.
class Relay : public CollectiveBackend {
 public:
  Relay(std::string name, c10::intrusive_ptr<c10d::Backend> inner)
      : CollectiveBackend(inner->getRank(), inner->getSize()),
        name_(std::move(name)),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return name_; }
  WorkPtr run(Collective collective) override { return run_on(*inner_, std::move(collective)); }
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
