// The capabilities of backends that other rooms see.
#include <cstdlib>

#include <ddp/internal/capabilities.h>

#include "comm/backends/registry.h"
#include "support/recording_backend.h"

#include "support/catch.h"

namespace {

using namespace ddp;

class Named : public testing::RecordingBackend {
 public:
  Named(std::string name, bool allocates, testing::Events& events)
      : RecordingBackend(0, 2, events), name_(std::move(name)), allocates_(allocates) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return allocates_; }

 private:
  std::string name_;
  bool allocates_;
};

BackendCapabilities capabilities(const std::string& name, bool allocates = true) {
  testing::Events events;
  const auto group = testing::group_over(c10::make_intrusive<Named>(name, allocates, events));
  return capabilities_of(*group, at::kCPU);
}

}  // namespace

TEST_CASE("each backend has its own capabilities", "[capabilities][pure]") {
  CHECK(capabilities("shm").averages);
  CHECK(capabilities("shm").falls_back_to_gloo);
  CHECK_FALSE(capabilities("shm").waits_on_stream);

  CHECK_FALSE(capabilities("gloo").averages);
  CHECK(capabilities("gloo").falls_back_to_gloo);
  CHECK_FALSE(capabilities("gloo").waits_on_stream);

  CHECK_FALSE(capabilities("nccl").averages);  // it does, but sums are faster
  CHECK_FALSE(capabilities("nccl").falls_back_to_gloo);
  CHECK(capabilities("nccl").waits_on_stream);
}

TEST_CASE("each backend has its own table of reductions", "[capabilities][pure]") {
  using Op = c10d::ReduceOp;
  const auto reduces = [](const std::string& backend, at::ScalarType dtype, Op::RedOpType op) {
    return capabilities(backend).reductions->has(dtype, op);
  };
  const std::string backend = GENERATE("gloo", "shm", "nccl");
  CAPTURE(backend);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    CAPTURE(dtype);
    for (const auto op : {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX})
      CHECK(reduces(backend, dtype, op));
    for (const auto op : {Op::BAND, Op::BOR, Op::BXOR}) CHECK_FALSE(reduces(backend, dtype, op));
    CHECK(reduces(backend, dtype, Op::AVG) == (backend != "gloo"));
    CHECK(reduces(backend, dtype, Op::PREMUL_SUM) == (backend == "nccl"));
  }
  for (const auto dtype : {at::kByte, at::kChar, at::kInt, at::kLong}) {
    CAPTURE(dtype);
    for (const auto op : {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX})
      CHECK(reduces(backend, dtype, op));
    for (const auto op : {Op::BAND, Op::BOR, Op::BXOR}) {
      CHECK(reduces(backend, dtype, op) == (backend != "nccl"));
    }
    for (const auto op : {Op::AVG, Op::PREMUL_SUM}) CHECK_FALSE(reduces(backend, dtype, op));
  }
  for (const auto dtype :
       {at::kShort, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kBits8, at::kQInt8}) {
    CAPTURE(dtype);
    CHECK(capabilities(backend).reductions->ops_of(dtype).empty());
  }
  CHECK(capabilities("own").reductions == nullptr);  // it reports itself what it refuses
}

TEST_CASE("a program's own backend has the default capabilities", "[capabilities][pure]") {
  const auto own = capabilities("own");
  CHECK_FALSE(own.averages);
  CHECK_FALSE(own.falls_back_to_gloo);
  CHECK_FALSE(own.waits_on_stream);
}

TEST_CASE("buckets lie in the backend's memory if it has some", "[capabilities][pure]") {
  const std::string name = GENERATE("shm", "own");
  CHECK(capabilities(name, /*allocates=*/true).reduces_in_own_memory);
  CHECK_FALSE(capabilities(name, /*allocates=*/false).reduces_in_own_memory);
}

TEST_CASE(
    "NCCL's memory is used only if an environment variable enables it", "[capabilities][pure]") {
  const char* const variable = "DDP_DISABLE_COMM_MEM";
  const auto answer_under = [&](const char* value) {
    setenv(variable, value, 1);
    const bool answer = capabilities("nccl").reduces_in_own_memory;
    unsetenv(variable);
    return answer;
  };
  CHECK_FALSE(capabilities("nccl").reduces_in_own_memory);
  CHECK_FALSE(answer_under("1"));
  CHECK(answer_under("0"));
}

TEST_CASE("every backend in the registry is described in full", "[capabilities][pure]") {
  CHECK(backends::find("none") == nullptr);
  for (const auto* backend : backends::all()) {
    CAPTURE(backend->name);
    CHECK(backends::find(backend->name) == backend);
    CHECK_FALSE(backend->devices.empty());
    CHECK(backend->capabilities);
    CHECK(static_cast<bool>(backend->make) == backend->why_no_build.empty());
  }
}
