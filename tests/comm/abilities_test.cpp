// In whose memory buckets are to lie.
#include <cstdlib>

#include <ddp/abilities.h>

#include "support/recording_backend.h"

#include "support/catch.h"

namespace {

using namespace ddp;

class Allocating : public testing::RecordingBackend {
 public:
  Allocating(std::string name, testing::Events& events)
      : RecordingBackend(0, 2, events), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }

 private:
  std::string name_;
};

bool allocates(const std::string& name) {
  testing::Events events;
  const auto group = testing::group_over(c10::make_intrusive<Allocating>(name, events));
  return reduces_in_own_memory(*group, at::kCPU);
}

}  // namespace

TEST_CASE("buckets lie in the backend's memory where it has some", "[abilities][pure]") {
  testing::Events events;
  CHECK(allocates("shm"));
  CHECK_FALSE(reduces_in_own_memory(*testing::recording_group(0, 2, events), at::kCPU));
}

TEST_CASE("NCCL's memory is for those who ask for it", "[abilities][pure]") {
  const char* const variable = "DDP_DISABLE_COMM_MEM";
  const auto answer_under = [&](const char* value) {
    setenv(variable, value, 1);
    const bool answer = allocates("nccl");
    unsetenv(variable);
    return answer;
  };
  CHECK_FALSE(allocates("nccl"));
  CHECK_FALSE(answer_under("1"));
  CHECK(answer_under("0"));
}
