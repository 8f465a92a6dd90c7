// Values on an accelerator, a device that this program defines.
#include <ddp/metrics_log.h>

#include <string>
#include <vector>

#include <ddp/internal/text.h>
#include <torch/torch.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/toy_device.h"

#include "support/catch.h"

TEST_CASE("the host waits for a device once a batch of values", "[training][once]") {
  using namespace ddp::testing;
  const TemporaryFolder folder;
  auto& device = toy::Device::get();
  const auto waits = run_ranks<std::vector<int>>(1, [&](const Rank& self) {
    ddp::Metrics metrics(
        ddp::MetricsOptions().jsonl(folder.file("a")).average_every(8).group(self.group));
    auto value = at::full({1}, 1.5, at::kDouble).to(at::kPrivateUse1);
    auto other = at::full({}, 7, at::kLong).to(c10::Device(at::kPrivateUse1, 1));
    std::vector<int> seen;
    const int before = device.host_waits;
    for (int step = 0; step < 3; ++step) {
      metrics.add("a", value, step);
      value.mul_(2);  // the value that was added stays
      metrics.add("b", other, step);
    }
    metrics.add("c", 0.5, 3);
    seen.push_back(device.host_waits - before);
    metrics.add("a", value, 3);
    seen.push_back(device.host_waits - before);
    return seen;
  })[0];
  CHECK(waits == std::vector<int>{0, 2});  // one of each device
  std::vector<std::string> values;
  for (const auto& line : ddp::lines_of(read_bytes(folder.file("a")))) {
    values.push_back(line.substr(line.find("\"name\":\"") + 8));
  }
  CHECK(
      values == std::vector<std::string>{
                    "a\",\"value\":1.5}", "b\",\"value\":7}", "a\",\"value\":3}",
                    "b\",\"value\":7}", "a\",\"value\":6}", "b\",\"value\":7}",
                    "c\",\"value\":0.5}", "a\",\"value\":12}"});
}
