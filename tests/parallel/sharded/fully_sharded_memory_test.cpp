// FullyShardedDataParallel and memory: deferred construction, whole state dicts, freed parameters.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/block_pool.h"
#include "parallel/sharded/sharded_net.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr uint64_t kSeed = 11;

/// A network whose blocks draw their own values.
torch::nn::Sequential drawn_net() {
  torch::nn::Sequential net;
  for (int i = 0; i < 3; ++i) net->push_back(torch::nn::Linear(6, 6));
  return net;
}

ddp::FullyShardedOptions over_group(const Rank& self) {
  return ddp::FullyShardedOptions().process_group(self.group);
}

}  // namespace

TEST_CASE("units of a deferred model have its values", "[ranks][sharded][deferred]") {
  torch::manual_seed(kSeed);
  const auto whole = drawn_net()->parameters();
  torch::manual_seed(kSeed);
  std::vector<torch::nn::Sequential> nets;
  for (int rank = 0; rank < 2; ++rank) {
    const ddp::DeferredInit guard;
    nets.push_back(drawn_net());
    torch::manual_seed(kSeed);
  }
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    auto net = nets[static_cast<size_t>(self.rank)];
    const auto options = over_group(self).init_sync(false);
    TORCH_CHECK(ddp::fully_shard(net, 10, options) == 3);
    ddp::FullyShardedDataParallel model(net, options);
    const ddp::SummonFullParams summoned(*model);
    TORCH_CHECK(all_equal(model->parameters(), whole));
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a model can be cut while it is deferred", "[ranks][sharded][deferred]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetUse use;
    use.options = over_group(self);
    std::shared_ptr<ShardedNet> net;
    {
      const ddp::DeferredInit guard;
      net = std::make_shared<ShardedNet>(use);
    }
    ddp::FullyShardedDataParallel model(net, use.options);
    const ddp::SummonFullParams summoned(*model);
    TORCH_CHECK(all_equal(model->parameters(), PlainNet(NetUse()).parameters()));
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a sharded model's whole state goes out and comes in", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    NetUse use;
    use.options = over_group(self);
    ddp::FullyShardedDataParallel model(std::make_shared<ShardedNet>(use), use.options);
    const auto dict = ddp::full_state_dict(*model, 0, self.group);
    PlainNet plain{NetUse()};
    if (self.rank == 0) {
      TORCH_CHECK(dict.keys() == plain.named_parameters().keys(), dict.keys());
      for (const auto& item : plain.named_parameters()) {
        TORCH_CHECK(at::equal(dict[item.key()], item.value()), item.key());
      }
    }
    torch::OrderedDict<std::string, at::Tensor> other;
    for (const auto& item : dict) other.insert(item.key(), item.value() + 1);
    ddp::load_full_state_dict(*model, other, self.group);
    const ddp::SummonFullParams summoned(*model);
    const auto found = model->parameters();
    const auto before = plain.parameters();
    for (size_t i = 0; i < found.size(); ++i) TORCH_CHECK(at::equal(found[i], before[i] + 1), i);
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("between steps a rank has its shards alone", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetUse use;
    use.options = over_group(self);
    ddp::FullyShardedDataParallel model(std::make_shared<ShardedNet>(use), use.options);
    const auto whole = PlainNet(NetUse()).parameters();
    const auto check = [&] {
      int64_t mine = 0;
      int64_t all = 0;
      for (const auto& p : model->parameters()) mine += p.numel();
      for (const auto& p : whole) all += p.numel();
      TORCH_CHECK(mine <= all / 2 + 4 * 8, mine, " of ", all);
    };
    check();
    model->forward(net_input(use, 0, 0, self.rank), self.rank).backward();
    check();
    {
      const torch::NoGradGuard no_grad;
      (void)model->forward(net_input(use, 0, 0, self.rank), self.rank);
    }
    check();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("blocks are reused, and those of several sizes do not add up", "[sharded][once]") {
  using ddp::OnFree;
  constexpr size_t kBytes = size_t{64} << 20;  // more than anything else that a test maps meanwhile
  const auto mapped_bytes = [] {
    double pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * 4096;
  };
  ddp::trim_blocks();
  const auto before = mapped_bytes();
  auto block = ddp::allocate_block(kBytes, OnFree::kReuse);
  const auto* const memory = block.get();
  block.clear();
  block = ddp::allocate_block(kBytes, OnFree::kReuse);
  CHECK(block.get() == memory);
  block.clear();
  auto other = ddp::allocate_block(2 * kBytes, OnFree::kReuse);
  CHECK(mapped_bytes() - before < 2.1 * kBytes);
  other.clear();
  CHECK(mapped_bytes() - before > 1.5 * kBytes);
  ddp::trim_blocks();
  CHECK(mapped_bytes() - before < 0.1 * kBytes);
  other = ddp::allocate_block(kBytes, OnFree::kReturn);
  other.clear();
  CHECK(mapped_bytes() - before < 0.1 * kBytes);
}

TEST_CASE("large blocks lie where huge pages can be", "[sharded]") {
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  std::vector<c10::DataPtr> blocks;
  for (const size_t bytes : {2 * kHugePage, kHugePage + 1, 3 * kHugePage + 5}) {
    blocks.push_back(ddp::allocate_block(bytes, ddp::OnFree::kReturn));
    CHECK(reinterpret_cast<uintptr_t>(blocks.back().get()) % kHugePage == 0);
    std::memset(blocks.back().get(), 1, bytes);
  }
  for (const auto& block : blocks) CHECK(static_cast<const char*>(block.get())[kHugePage] == 1);
}

TEST_CASE("sharded models of groups that are gone leave no sockets", "[ranks][sharded]") {
  const auto sockets_after_training = [] {
    const auto errors = errors_of_ranks(2, [](const Rank& self) {
      torch::nn::Linear layer(3, 2);
      ddp::FullyShardedDataParallel model(layer, over_group(self));
      model->forward(torch::ones({1, 3})).sum().backward();
    });
    CHECK(errors == std::vector<std::string>(2));
    int sockets = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code closed;
      const auto target = std::filesystem::read_symlink(entry.path(), closed).string();
      sockets += target.rfind("socket:", 0) == 0 ? 1 : 0;
    }
    return sockets;
  };
  const auto first = sockets_after_training();
  for (int i = 0; i < 3; ++i) CHECK(sockets_after_training() <= first);
}

TEST_CASE("values of whole parameters keep the views that they need", "[ranks][sharded][errors]") {
  const bool by_unshard = GENERATE(true, false);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    const auto weight = torch::tensor({{1.0, 2.0, 3.0}, {4.0, 5.0, 6.0}});
    torch::nn::Linear layer(torch::nn::LinearOptions(3, 2).bias(false));
    layer->weight.set_data(weight.clone());
    ddp::FullyShardedDataParallel unit(layer, over_group(self));
    const auto computed = [&](const at::Tensor& x, bool inside) {
      std::unique_ptr<ddp::SummonFullParams> whole;
      by_unshard ? unit->unshard() : (void)(whole = std::make_unique<ddp::SummonFullParams>(*unit));
      const auto y = torch::mm(x, layer->weight.t()).sum();
      if (inside) y.backward();
      whole.reset();
      if (by_unshard) unit->reshard();
      return y;
    };
    const auto x = torch::ones({1, 3}).requires_grad_();
    const auto sums = weight.sum(0, /*keepdim=*/true);
    const auto of_x = torch::autograd::grad({computed(x, false)}, {x});
    TORCH_CHECK(at::equal(of_x[0], sums), of_x[0]);
    computed(x, true);
    TORCH_CHECK(at::equal(x.grad(), sums), x.grad());
    TORCH_CHECK(at::equal(layer->weight.grad(), torch::ones_like(layer->weight)), "gradient");
    const auto y = computed(x, false);
    unit->forward(x).sum().backward();  // with other memory
    y.backward();
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText("expected gradients of the root while its parameters are whole") &&
                  ContainsText("Run its backward before they end.")));
}
