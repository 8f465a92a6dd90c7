// What a step of a sharded model copies, what it sends while it computes, and what it leaves.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <ddp/ddp.h>

#include "parallel/sharded/block_pool.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {
namespace sharded_step {

/// A collective of a unit, or a copy of a tensor.
struct Call {
  enum class Kind { Gather, Reduction, Copy };
  Kind kind;
  int64_t numel = 0;              // of what is written
  at::Tensor to = {}, from = {};  // of a collective
};

/// The gathers, reductions and copies of at least `least_numel` elements that this thread starts
/// while the object exists.
class RecordedCalls {
 public:
  using OnCall = std::function<void(const Call&)>;

  /// \param on_begin, on_end  called when a collective is about to start, and when it has started.
  explicit RecordedCalls(int64_t least_numel, OnCall on_begin = {}, OnCall on_end = {})
      : least_numel_(least_numel), on_begin_(std::move(on_begin)), on_end_(std::move(on_end)) {
    current() = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&RecordedCalls::begin, &RecordedCalls::end)
            .scopes({at::RecordScope::FUNCTION})
            .needsInputs(true));
  }
  ~RecordedCalls() {
    at::removeCallback(handle_);
    current() = nullptr;
  }
  RecordedCalls(const RecordedCalls&) = delete;
  RecordedCalls& operator=(const RecordedCalls&) = delete;

  std::vector<Call> of(Call::Kind kind) const {
    std::vector<Call> found;
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(found), [&](const Call& call) {
      return call.kind == kind;
    });
    return found;
  }
  int64_t elements_of(Call::Kind kind) const {
    int64_t sum = 0;
    for (const auto& call : of(kind)) sum += call.numel;
    return sum;
  }
  void clear() { calls_.clear(); }

 private:
  struct Started : at::ObserverContext {
    explicit Started(Call call) : call(std::move(call)) {}
    Call call;
  };

  static RecordedCalls*& current() {
    thread_local RecordedCalls* calls = nullptr;
    return calls;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (!current()) return nullptr;  // a thread that a backend gave the state of this one
    const std::string name = function.name();
    const auto inputs = function.inputs();
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (name == "aten::copy_") {
      const auto numel = inputs[0].toTensor().numel();
      if (numel >= current()->least_numel_) current()->calls_.push_back({Call::Kind::Copy, numel});
      return nullptr;
    }
    if (name.rfind("c10d::", 0) != 0 || inputs.size() < 2 || !inputs[0].isTensor()) return nullptr;
    const auto kind = has("reduce_scatter") ? Call::Kind::Reduction : Call::Kind::Gather;
    if (kind == Call::Kind::Gather && !has("gather")) return nullptr;
    const auto to = inputs[0].toTensor();
    if (to.numel() < current()->least_numel_) return nullptr;
    const Call call{kind, to.numel(), to, inputs[1].toTensor()};
    current()->calls_.push_back(call);
    if (current()->on_begin_) current()->on_begin_(call);
    return std::make_unique<Started>(call);
  }
  static void end(const at::RecordFunction&, at::ObserverContext* context) {
    if (!current() || !context || !current()->on_end_) return;
    current()->on_end_(static_cast<const Started*>(context)->call);
  }

  const int64_t least_numel_;
  const OnCall on_begin_, on_end_;
  std::vector<Call> calls_;
  at::CallbackHandle handle_ = 0;
};

constexpr int64_t kWidth = 64;
constexpr int64_t kUnitNumel = kWidth * kWidth;  // 2 ranks need no padding

torch::nn::Linear layer_of(int64_t width) {
  return torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false));
}

/// \return  a net of units of one layer each, in a root without parameters of its own.
torch::nn::Sequential sharded_layers(
    int64_t units, const ddp::FullyShardedOptions& options, int64_t width = kWidth) {
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < units; ++i) net->push_back(layer_of(width));
  TORCH_CHECK(ddp::fully_shard(net, width * width, options) == units);
  return net;
}

/// What the ranks of a test tell each other.
class Scene {
 public:
  void set(const std::string& event) {
    {
      const std::lock_guard lock(mutex_);
      events_.insert(event);
    }
    changed_.notify_all();
  }
  /// \return  whether the event comes.
  bool comes(const std::string& event) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(
        lock, std::chrono::seconds(5), [&] { return events_.count(event) == 1; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> events_;
};

/// A linear layer that calls a function when it computes.
struct ProbedImpl : torch::nn::Module {
  using OnCompute = std::function<void(const std::string& when)>;
  ProbedImpl(int64_t k, OnCompute on_compute)
      : on_compute(std::move(on_compute)),
        place(std::to_string(k)),
        fc(register_module("fc", layer_of(kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    on_compute("forward " + place);
    const auto y = fc->forward(x);
    y.register_hook([this](const at::Tensor&) { on_compute("backward " + place); });
    return y;
  }
  OnCompute on_compute;
  std::string place;
  torch::nn::Linear fc;
};
TORCH_MODULE(Probed);

/// Rank 0 of two, or rank 1, which begins each collective after rank 0 computes beside it.
class Overlap {
 public:
  Overlap(Scene& scene, const Rank& self)
      : scene_(scene),
        rank_(self.rank),
        // LibTorch's Gloo adds up on a thread, and writes the sum in wait().
        writes_sums_early_(self.group->getBackend(c10::kCPU)->getBackendName() != "gloo"),
        recorded_(kWidth, on_begin()) {}

  /// Names the collectives of a step that begin ahead.
  void expect(std::vector<std::string> gathers, std::vector<std::string> reductions) {
    begun_.clear();
    names_[0] = std::move(gathers);
    names_[1] = std::move(reductions);
  }
  /// While a unit computes: waits until all that has begun has arrived.
  void on_compute(const std::string& when) {
    for (auto& [name, call] : std::exchange(begun_, {})) {
      if (rank_ == 0) scene_.set("rank 0 computes beside " + name);
      if (call.kind == Call::Kind::Gather || writes_sums_early_) wait_until_arrived(name, call.to);
      log_ += name + " in " + when + "; ";
    }
  }
  const std::string& log() const { return log_; }

 private:
  RecordedCalls::OnCall on_begin() {
    return [this](const Call& call) {
      auto& names = names_[call.kind == Call::Kind::Reduction ? 1 : 0];
      if (names.empty()) return;
      const auto name = names.front();
      names.erase(names.begin());
      if (name.empty()) return;  // not ahead
      std::fill_n(call.to.data_ptr<float>(), call.numel, std::numeric_limits<float>::quiet_NaN());
      begun_.emplace_back(name, call);
      if (rank_ == 1 && !scene_.comes("rank 0 computes beside " + name)) {
        log_ += "not beside rank 0: ";  // an exception would be swallowed here
      }
    };
  }
  static void wait_until_arrived(const std::string& name, const at::Tensor& to) {
    const auto* const values = to.data_ptr<float>();
    const auto is_missing = [&] {
      return std::any_of(values, values + to.numel(), [](float x) { return std::isnan(x); });
    };
    for (int ms = 0; is_missing(); ++ms) {
      TORCH_CHECK(ms < 5000, name, " does not arrive");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Scene& scene_;
  const int rank_;
  const bool writes_sums_early_;
  std::vector<std::string> names_[2];
  std::vector<std::pair<std::string, Call>> begun_;
  std::string log_;
  RecordedCalls recorded_;
};

/// The distinct storages of some tensors, in bytes.
int64_t storage_bytes(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const auto& t : tensors) {
    const auto* storage = t.storage().unsafeGetStorageImpl();
    if (seen.insert(storage).second) bytes += static_cast<int64_t>(storage->nbytes());
  }
  return bytes;
}

int64_t mapped_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

}  // namespace sharded_step
}  // namespace

TEST_CASE(
    "over shared memory a step copies each gradient once, and nothing that is gathered",
    "[ranks][sharded][once]") {
  using namespace sharded_step;
  constexpr int64_t kUnits = 3;
  const auto copied = run_ranks<std::vector<int64_t>>(2, over("shm"), [](const Rank& self) {
    const auto options = ddp::FullyShardedOptions().process_group(self.group);
    ddp::FullyShardedDataParallel model(sharded_layers(kUnits, options), options);
    const auto x = torch::ones({1, kWidth});
    model->forward(x).square().sum().backward();
    model->zero_grad();
    RecordedCalls recorded(
        /*least_numel=*/2 * kWidth);  // more than an activation and notes have
    const auto loss = model->forward(x).square().sum();
    const auto in_forward = recorded.elements_of(Call::Kind::Copy);
    recorded.clear();
    loss.backward();
    return std::vector<int64_t>{
        in_forward, recorded.elements_of(Call::Kind::Copy),
        static_cast<int64_t>(recorded.of(Call::Kind::Gather).size())};
  });
  for (const auto& of_rank : copied) {
    CHECK(of_rank == std::vector<int64_t>{0, kUnits * kUnitNumel, kUnits});
  }
}

TEST_CASE("over shared memory ranks read shards where they lie", "[ranks][sharded][once]") {
  using namespace sharded_step;
  Scene scene;
  std::promise<at::Tensor> of_rank_0;
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    const auto options = ddp::FullyShardedOptions().process_group(self.group);
    const auto net = sharded_layers(1, options);
    auto unit = net->ptr(0)->as<ddp::FullyShardedBase>();
    const auto weight = net->parameters()[0];
    const RecordedCalls recorded(kWidth, {}, [&](const Call&) { scene.set("a gather of rank 0"); });
    if (self.rank == 0) {
      of_rank_0.set_value(weight.detach());
    } else {
      TORCH_CHECK(scene.comes("a gather of rank 0"));
      of_rank_0.get_future().get().fill_(7);
    }
    unit->unshard();
    // Each rank has a half.
    const auto elements = weight.detach().reshape({-1});
    TORCH_CHECK(elements.narrow(0, 0, kUnitNumel / 2).eq(7).all().item<bool>(), "old values");
    TORCH_CHECK(elements[kUnitNumel / 2].item<float>() != 7, "of rank 1");
    const auto gathers = recorded.of(Call::Kind::Gather);
    TORCH_CHECK(gathers.size() == 1 && weight.is_alias_of(gathers[0].to), "not into place");
    unit->reshard();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE(
    "over shared memory ranks read packed gradients where they lie", "[ranks][sharded][once]") {
  using namespace sharded_step;
  Scene scene;
  std::promise<at::Tensor> of_rank_0;
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    // Its backward begins with the reduction.
    const auto options =
        ddp::FullyShardedOptions().process_group(self.group).reshard_after_forward(false);
    ddp::FullyShardedDataParallel model(sharded_layers(1, options), options);
    const auto loss = model->forward(torch::ones({1, kWidth})).sum();
    bool has_written = self.rank == 0;
    const auto on_begin = [&](const Call& call) {
      if (call.kind != Call::Kind::Reduction || self.rank == 0) return;
      if (!(has_written = scene.comes("the reduction of rank 0"))) return;
      // Writes into rank 1's slice, which lies in rank 0's memory after rank 0's own.
      of_rank_0.get_future().get().narrow(0, kUnitNumel / 2, 8).fill_(7);
    };
    const auto on_end = [&](const Call& call) {
      if (call.kind != Call::Kind::Reduction || self.rank == 1) return;
      of_rank_0.set_value(call.from);
      scene.set("the reduction of rank 0");
    };
    const RecordedCalls recorded(kWidth, on_begin, on_end);
    loss.backward();
    TORCH_CHECK(has_written);
    const auto sum = model->parameters()[0].grad().reshape({-1});
    // The mean of rank 0's 7 and rank 1's 1.
    const auto expected = self.rank == 1 ? 4.0f : 1.0f;
    TORCH_CHECK(sum.narrow(0, 0, 8).eq(expected).all().item<bool>(), sum.narrow(0, 0, 8));
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("units are gathered and reduced while others compute", "[ranks][sharded]") {
  using namespace sharded_step;
  Scene scene;
  const auto logs = run_ranks<std::string>(2, [&](const Rank& self) {
    Overlap overlap(scene, self);
    const auto options = ddp::FullyShardedOptions().process_group(self.group);
    torch::nn::Sequential net;
    for (int64_t k = 0; k < 3; ++k) {
      const Probed layer(k, [&](const std::string& when) { overlap.on_compute(when); });
      net->push_back(ddp::FullyShardedDataParallel(layer, options));
    }
    ddp::FullyShardedDataParallel model(net, options);
    const auto x = torch::ones({1, kWidth});
    // The first passes compare orders, and find the one by which units are gathered ahead.
    for (int pass = 0; pass < 2; ++pass) model->forward(x).sum().backward();
    overlap.expect(
        {"", "gather 1", "gather 2", "", "gather 1 again", "gather 0 again"},
        {"reduction 2", "reduction 1", ""});
    model->forward(x).sum().backward();
    return overlap.log();
  });
  for (const auto& log : logs) {
    CHECK(
        log ==
        "gather 1 in forward 0; gather 2 in forward 1; gather 1 again in backward 2; "
        "reduction 2 in backward 1; gather 0 again in backward 1; reduction 1 in backward 0; ");
  }
}

TEST_CASE(
    "between steps a rank's state is 16 bytes of each of its parameters", "[ranks][sharded]") {
  using namespace sharded_step;
  constexpr int64_t kUnits = 3;
  const auto bytes = run_ranks<std::vector<int64_t>>(2, [](const Rank& self) {
    const auto options = ddp::FullyShardedOptions().process_group(self.group);
    ddp::FullyShardedDataParallel model(sharded_layers(kUnits, options), options);
    torch::optim::AdamW optimizer(model->parameters());
    std::vector<at::Tensor> state;
    int64_t gathered = 0;
    for (int step = 0; step < 2; ++step) {
      const RecordedCalls recorded(kWidth);
      optimizer.zero_grad();
      model->forward(torch::ones({2, kWidth})).sum().backward();
      optimizer.step();
      std::vector<at::Tensor> wholes;
      for (const auto& gather : recorded.of(Call::Kind::Gather)) wholes.push_back(gather.to);
      TORCH_CHECK(wholes.size() == 2 * kUnits, wholes.size());
      gathered += storage_bytes(wholes);
    }
    for (const auto& p : model->parameters()) {
      state.push_back(p);
      state.push_back(p.grad());
      const auto& of_parameter = static_cast<const torch::optim::AdamWParamState&>(
          *optimizer.state().at(p.unsafeGetTensorImpl()));
      state.push_back(of_parameter.exp_avg());
      state.push_back(of_parameter.exp_avg_sq());
    }
    return std::vector<int64_t>{storage_bytes(state), gathered};
  });
  constexpr int64_t kState = 16 * kUnits * kUnitNumel / 2;
  for (const auto& of_rank : bytes) {
    CAPTURE(of_rank, kState);
    CHECK(of_rank[0] == kState);  // the gradients lie in the sum that brought them
    CHECK(of_rank[1] == 0);
  }
}

TEST_CASE("after a step no memory of whole parameters waits", "[ranks][sharded]") {
  using namespace sharded_step;
  constexpr int64_t kWide = 512;
  constexpr int64_t kUnitBytes = kWide * kWide * 4;
  // What the process gives back when asked to, while no rank computes.
  const auto waiting = [](const Rank& self) {
    ddp::barrier(self.group);
    int64_t bytes = 0;
    if (self.rank == 0) {
      bytes = mapped_bytes();
      ddp::trim_blocks();
      bytes -= mapped_bytes();
    }
    ddp::barrier(self.group);
    return bytes;
  };
  const auto bytes = run_ranks<std::vector<int64_t>>(2, [&](const Rank& self) {
    const auto options = ddp::FullyShardedOptions().process_group(self.group);
    ddp::FullyShardedDataParallel model(sharded_layers(4, options, kWide), options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    std::vector<int64_t> found;
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const auto loss = model->forward(torch::ones({1, kWide})).sum();
      found.push_back(waiting(self));
      loss.backward();
      found.push_back(waiting(self));
      optimizer.step();
    }
    return found;
  });
  for (const size_t step : {0, 1}) {
    CAPTURE(bytes[0]);
    CHECK(bytes[0][2 * step] > kUnitBytes / 2);  // backward takes it again
    CHECK(bytes[0][2 * step + 1] < kUnitBytes / 2);
  }
}
