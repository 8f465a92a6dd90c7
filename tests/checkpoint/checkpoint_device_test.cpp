// Saves of tensors of a device that runs nothing before it is waited for.
#include <algorithm>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include <ddp/internal/tensors_on_host.h>
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

using Order = TensorsOnHost::Order;

const c10::Device kHost(at::kCPU);
const c10::Device kToy(at::kPrivateUse1, 0);
const c10::Device kOther(at::kPrivateUse1, 1);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(c10::Device device) {
    for (int i = 0; i < 5; ++i) {
      weights.push_back(register_parameter(
          "w" + std::to_string(i),
          torch::full({3, 4}, 1. + i, torch::dtype(at::kFloat).device(device))));
    }
    cut = torch::arange(6, at::kFloat).to(device).view({2, 3});
  }
  std::vector<at::Tensor> weights;
  at::Tensor cut;
};
TORCH_MODULE(Net);

bool goes_without_wait(const toy::Copy& copy) { return copy.pinned && copy.non_blocking; }

}  // namespace

TEST_CASE(
    "a save waits once for its copies, and the tensors may change then", "[checkpoint][device]") {
  const TemporaryFolder folder;
  auto& device = toy::Device::get();
  struct Saw {
    std::vector<toy::Copy> copies;
    int host_waits = 0;
  };
  const auto saw = run_ranks<Saw>(1, [&](const Rank& self) {
    const Net net(kToy);
    Checkpointer checkpointer(
        folder.path(), CheckpointerOptions().process_group(self.group).background(true));
    checkpointer.add("net", net);
    checkpointer.add_sharded("cut", [net] {
      return std::vector<ShardedTensor>{
          {"rows", {2, 3}, {0, 0}, net->cut.t().contiguous().t(), 0, {}}};
    });
    device.forget();
    checkpointer.save(1);
    Saw saw{device.copies, device.host_waits};
    const torch::NoGradGuard no_grad;
    for (auto& w : net->weights) w.fill_(-1);
    net->cut.fill_(-1);
    (void)toy::on_host(net->cut);  // the device does it before the file is written
    checkpointer.wait();
    return saw;
  })[0];
  CHECK(saw.copies.size() == 6);
  CHECK(std::all_of(saw.copies.begin(), saw.copies.end(), goes_without_wait));
  CHECK(saw.host_waits == 1);
  const auto ok = run_ranks<int>(1, [&](const Rank& self) {
    const Net net(kHost);
    for (auto& w : net->weights) w.detach().zero_();
    net->cut.zero_();
    Checkpointer checkpointer(folder.path(), CheckpointerOptions().process_group(self.group));
    checkpointer.add("net", net);
    checkpointer.add_sharded("cut", [net] {
      return std::vector<ShardedTensor>{{"rows", {2, 3}, {0, 0}, net->cut, 0, {}}};
    });
    checkpointer.load_latest();
    for (int i = 0; i < 5; ++i) {
      const auto expected = torch::full({3, 4}, 1.F + i);
      TORCH_CHECK(torch::equal(net->weights[static_cast<size_t>(i)], expected), "weight ", i);
    }
    TORCH_CHECK(torch::equal(net->cut, torch::arange(6, at::kFloat).view({2, 3})), net->cut);
    return 1;
  });
  CHECK(ok[0] == 1);
}

TEST_CASE(
    "copies on the host have values, strides and their own storage", "[checkpoint][pure][device]") {
  auto& device = toy::Device::get();
  device.has_pinned_memory = GENERATE(true, false);
  const auto x = torch::arange(24, at::kFloat).view({4, 6});
  const std::vector<at::Tensor> given{
      x,
      x.t(),
      x.narrow(1, 1, 3),
      x[0].expand({3, 6}),
      x.to(at::kBool),
      x.slice(0, 0, 0),
      torch::scalar_tensor(7, at::kDouble)};
  device.forget();
  TensorsOnHost copies;
  for (const auto order : {Order::AsItLies, Order::RowByRow}) {
    std::vector<at::Tensor> sources, copied;
    for (const auto& t : given) {
      for (const auto where : {kHost, kToy, kOther}) {
        // On the device the same view of the same memory.
        const at::Tensor base(t.is_view() ? t._base() : t);
        sources.push_back(base.to(where).as_strided(t.sizes(), t.strides(), t.storage_offset()));
        copied.push_back(copies.copy(sources.back(), order));
      }
    }
    device.host_waits = 0;
    copies.wait();
    if (device.has_pinned_memory) CHECK(device.host_waits == 2);  // one of each device
    for (size_t i = 0; i < copied.size(); ++i) {
      const auto& expected = given[i / 3];
      CHECK(torch::equal(copied[i], expected));
      CHECK(copied[i].storage().nbytes() == expected.nbytes());
      const bool keeps = order == Order::AsItLies && expected.is_non_overlapping_and_dense();
      CHECK((keeps ? copied[i].strides() == expected.strides() : copied[i].is_contiguous()));
    }
  }
  device.has_pinned_memory = true;
  device.forget();
}

TEST_CASE("copies share blocks that live as long as they do", "[checkpoint][pure][device]") {
  auto& device = toy::Device::get();
  device.forget();
  const auto count = [&] { return device.pinned.size(); };
  const auto before = count();
  const auto small = torch::ones({1000}).to(kToy);
  std::vector<at::Tensor> copied;
  {
    TensorsOnHost copies;
    for (int i = 0; i < 100; ++i) copied.push_back(copies.copy(small, Order::AsItLies));
    copies.wait();
  }
  CHECK(count() <= before + 1);
  for (const auto& t : copied) CHECK(t.sum().item<float>() == 1000);
  device.forget();
}

}  // namespace ddp::testing
