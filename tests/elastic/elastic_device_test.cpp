// Elastic runs with parameters on a device, whose collectives a stream waits for. The device is the
// toy, so each rank is a process: this program, started by ddprun for its hidden case.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <ddp/backend.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "comm/backends/shm/backend/fallback_backend.h"
#include "support/nets.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "support/toy_device.h"
#include "training/elastic/flat_state.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr c10::StreamId kWireStream = 11;
constexpr const char* kRank = "one rank of a job";
constexpr int kSteps = 24;
constexpr int kLostIn = 9;  // step

/// The memory of a tensor of the toy.
at::Tensor memory_of(const at::Tensor& t) {
  return at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

/// The end of a collective on the wire's stream.
class WireWork final : public c10d::Work {
 public:
  explicit WireWork(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {
    const auto device = outputs_.front().device();
    end_.record(toy::stream(kWireStream, device.index()));
    auto& toy = toy::Device::get();
    const std::lock_guard lock(toy.mutex);
    position_ = toy.streams[{device.index(), kWireStream}].end();
    result_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{device});
    result_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { TORCH_CHECK(false, "isSuccess() is deprecated"); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  // As on a GPU the host goes on: the stream waits once it comes to that.
  void synchronize() override {
    auto& device = toy::Device::get();
    const auto index = outputs_.front().device().index();
    const toy::Device::Key wire{index, kWireStream};
    device.push(
        toy::Device::key_of(toy::Guard().getStream(outputs_.front().device())),
        [&device, wire, position = position_] { device.run_until(wire, position); });
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return result_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::Event end_{at::kPrivateUse1};
  size_t position_ = 0;
  c10::intrusive_ptr<c10::ivalue::Future> result_;
};

/// Carries tensors of the toy between processes, as ProcessGroupNCCL does: a stream waits for a
/// collective; one that waits for a rank that is gone never ends, but for an abort, after which it
/// leaves nothing of use, and tells nobody.
class Wire final : public backends::shm::FallbackBackend {
 public:
  Wire(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier)
      : FallbackBackend(
            rank, size, /*memory=*/nullptr,
            std::make_shared<backends::shm::GlooCarrier>(std::move(carrier))) {}
  const std::string getBackendName() const override { return "wire"; }

  WorkPtr run(Collective c) override {
    const at::NoGradGuard no_grad;
    const auto results = c.results();
    TORCH_CHECK(
        !results.empty() && !*aborted_, "wire: expected tensors, and no call after abort()");
    auto& device = toy::Device::get();
    const auto stream = toy::Device::key_of(toy::Guard().getStream(results.front().device()));
    {
      const std::lock_guard lock(device.mutex);
      device.run_until(stream, device.streams[stream].end());  // the inputs
    }
    Tensors targets = c.out, staged;
    if (c.whole_out.defined()) targets.push_back(c.whole_out);
    std::map<const void*, at::Tensor> copies;  // the inputs of an all-reduce are its outputs
    const auto staged_as = [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto& copy = copies[t.data_ptr()];
      if (!copy.defined() || copy.sizes() != t.sizes()) copy = memory_of(t).clone();
      return copy;
    };
    for (auto* tensors : {&c.in, &c.out}) {
      for (auto& t : *tensors) t = staged_as(t);
    }
    for (auto* whole : {&c.whole_in, &c.whole_out}) *whole = staged_as(*whole);
    staged = c.out;
    if (c.whole_out.defined()) staged.push_back(c.whole_out);
    const auto carried = FallbackBackend::run(std::move(c));
    const c10::StreamGuard guard(toy::stream(kWireStream, results.front().device().index()));
    device.push({results.front().device().index(), kWireStream}, [=, aborted = aborted_] {
      while (!*aborted && !(carried->isCompleted() && !carried->exception())) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      const at::NoGradGuard inner;
      for (size_t i = 0; i < targets.size(); ++i) {
        *aborted ? memory_of(targets[i]).fill_(NAN) : memory_of(targets[i]).copy_(staged[i]);
      }
    });
    return c10::make_intrusive<WireWork>(results);
  }
  void abort() override {
    *aborted_ = true;
    FallbackBackend::abort();
  }

 private:
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};

void register_wire() {
  register_backend(
      "wire", BackendDescription()
                  .devices({at::kPrivateUse1})
                  .waits_on_stream(true)
                  .make([](const BackendSetup& setup) {
                    backends::Setup gloo;
                    gloo.store = setup.store;
                    gloo.rank = setup.rank;
                    gloo.world_size = setup.size;
                    gloo.timeout = setup.timeout;
                    gloo.connect_by = Deadline(setup.timeout);
                    gloo.group_name = setup.group_name;
                    gloo.gloo_devices.address = "127.0.0.1";
                    return c10::make_intrusive<Wire>(
                        setup.rank, setup.size, backends::find("gloo")->make(gloo));
                  }));
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct NetImpl : torch::nn::Module {
  NetImpl() { set_waves(*this, {1.3, 0.2, 0, 0.3}); }
  at::Tensor forward(const at::Tensor& x) { return out(torch::relu(in(x))) + shift; }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 33))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(33, 2))};
  at::Tensor shift{register_buffer("shift", torch::full({2}, 0.1))};
};
TORCH_MODULE(Net);

/// One of the processes that slot 1 has in a job is lost, once.
bool is_to_be_lost(const Elastic& run, const std::string& where) {
  if (where != variable("LOST_AT") || run.generation().slot != 1) return false;
  if (run.steps() != kLostIn) return false;
  const auto file = variable("FOLDER") + "/lost";
  if (std::ifstream(file).good()) return false;
  std::ofstream(file) << "lost";
  return true;
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(DistributedDataParallel<Net>& model) {
  const torch::optim::AdamWOptions adamw(1e-2);
  if (variable("ZERO").empty()) {
    return std::make_unique<torch::optim::AdamW>(model->parameters(), adamw);
  }
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(model, adamw);
}

/// Counts the optimizer's tensors that lie on another device than their parameters.
int strays_of(torch::optim::Optimizer& any, const Net& net) {
  auto* optimizer = dynamic_cast<torch::optim::AdamW*>(&any);
  int strays = 0;
  for (const auto& p : net->parameters()) {
    if (optimizer == nullptr) continue;
    auto& state = static_cast<torch::optim::AdamWParamState&>(
        *optimizer->state().at(p.unsafeGetTensorImpl()));
    strays += state.exp_avg().device() == p.device() ? 0 : 1;
    strays += state.exp_avg_sq().device() == p.device() ? 0 : 1;
  }
  return strays;
}

void train() {
  const bool on_device = variable("DEVICE") == "toy";
  if (on_device) register_wire();
  const auto device = on_device ? c10::Device(at::kPrivateUse1, 0) : c10::Device(at::kCPU);
  Elastic run(ElasticOptions().snapshot_every(6).group(
      ProcessGroupOptions()
          .backend(on_device ? "cpu:gloo,toy:wire" : "gloo")
          .timeout(std::chrono::seconds(60))));
  Net net;
  net->to(device);
  DistributedDataParallel model(
      net, DistributedDataParallelOptions().bucket_cap_mb(
               variable("BUCKETS").empty() ? 25 : std::atof(variable("BUCKETS").c_str())));
  const auto optimizer = make_optimizer(model);
  auto total = torch::zeros({1}).to(device);
  run.add("model", model).add("optimizer", *optimizer).add("total", total);
  run.loop([&] {
    if (run.steps() >= kSteps) return false;
    const auto number = static_cast<double>(run.steps() * 4 + run.generation().rank);
    const auto x = torch::sin(torch::arange(1.0F, 33.0F).view({8, 4}) * number).to(device);
    optimizer->zero_grad();
    const auto loss = (model->forward(x) - 0.5).square().mean();
    if (is_to_be_lost(run, "forward")) die();
    if (is_to_be_lost(run, "backward")) {
      net->in->weight.register_hook([](const at::Tensor&) { die(); });
    }
    loss.backward();
    run.step(*optimizer);
    if (is_to_be_lost(run, "metric")) die();
    auto mean = loss.detach().view({1}).clone();
    all_reduce(mean);
    at::NoGradGuard no_grad;
    total.add_(mean);
    return true;
  });
  double sum = 0;
  for (const auto& p : net->parameters())
    sum += p.detach().cpu().to(at::kDouble).abs().sum().item<double>();
  const auto seed = at::globalContext().defaultGenerator(device).current_seed();
  std::printf(
      "slot %d: the end at step %lld, sum %a, seed %llu, total %s, %d strays\n",
      run.generation().slot, static_cast<long long>(run.steps()), sum,
      static_cast<unsigned long long>(seed),
      std::isfinite(total.cpu().item<float>()) ? "finite" : "not finite",
      strays_of(*optimizer, net));
  std::fflush(stdout);
}

/// Runs a job of two ranks.
Ended run_job(std::vector<std::string> environment, const std::string& folder) {
  ProcessOptions options = in_one_stream(within(std::chrono::seconds(100)));
  environment.push_back("FOLDER=" + folder);
  environment.emplace_back("OMP_NUM_THREADS=1");
  options.environment = std::move(environment);
  return testing::run(
      ddprun(
          {"--elastic", "-n", "2", "--", std::filesystem::read_symlink("/proc/self/exe"), kRank}),
      options);
}

std::vector<std::string> ends_in(const std::string& out) {
  std::vector<std::string> ends;
  for (size_t at = 0; (at = out.find("the end at step", at)) != std::string::npos; ++at) {
    ends.push_back(out.substr(at, out.find('\n', at) - at));
  }
  std::sort(ends.begin(), ends.end());  // each slot has a seed of its own
  return ends;
}

}  // namespace

TEST_CASE("one rank of a job", "[.rank]") { train(); }

TEST_CASE("a state on a device is copied, hashed and loaded with one wait of the host", "[pure]") {
  auto& device = toy::Device::get();
  const auto where = c10::Device(at::kPrivateUse1, 0);
  c10::impl::GenericList on_host(c10::AnyType::get()), on_device(c10::AnyType::get());
  for (int i = 1; i < 6; ++i) {
    on_host.push_back(torch::arange(7 * i) * 0.5);
    on_device.push_back((torch::arange(7 * i) * 0.5).to(where));
  }
  const auto waits_of = [&](const auto& act) {
    device.forget();
    act();
    return device.host_waits.load();
  };
  CHECK(waits_of([&] { CHECK(elastic::hash_of(on_device) == elastic::hash_of(on_host)); }) == 1);
  CHECK(waits_of([&] {
          CHECK(elastic::packed_state(on_device) == elastic::packed_state(on_host));
        }) == 1);
  c10::IValue back;
  CHECK(waits_of([&] {
          TensorsOnHost copies;
          back = elastic::copied_to_host(on_device, copies);
          copies.wait();
        }) == 1);
  CHECK(elastic::hash_of(back) == elastic::hash_of(on_host));
  CHECK(waits_of([&] { back = elastic::copied_to_device(on_host, where, true); }) == 1);
  CHECK(back.toListRef()[4].toTensor().device() == where);
  CHECK(elastic::hash_of(back) == elastic::hash_of(on_host));
  CHECK(waits_of([&] { back = elastic::copied(on_device); }) == 0);
}

TEST_CASE("a rank with parameters on a device is lost: the bits of a run on the CPU", "[elastic]") {
  struct Case {
    std::string lost_at;
    std::vector<std::string> environment;
  };
  const auto now = GENERATE(
      Case{"", {}}, Case{"forward", {}}, Case{"backward", {}}, Case{"backward", {"BUCKETS=0.0001"}},
      Case{"backward", {"ZERO=1"}});
  CAPTURE(now.lost_at, now.environment);
  const TemporaryFolder quiet_folder, folder;
  const auto quiet = run_job(now.environment, quiet_folder.path());
  CAPTURE(quiet.out);
  REQUIRE(ends_in(quiet.out).size() == 2);
  auto environment = now.environment;
  environment.insert(environment.end(), {"DEVICE=toy", "LOST_AT=" + now.lost_at});
  const auto ended = run_job(environment, folder.path());
  CAPTURE(ended.out);
  CHECK(ended.code == 0);
  CHECK(ends_in(ended.out) == ends_in(quiet.out));
  CHECK_THAT(quiet.out, ContainsText("total finite, 0 strays"));
  const bool is_replaced = ended.out.find("starting another one") != std::string::npos;
  CHECK(is_replaced == !now.lost_at.empty());
}

TEST_CASE("a rank is lost after its step: no part has what an abort leaves", "[elastic]") {
  const TemporaryFolder folder;
  const auto ended = run_job({"DEVICE=toy", "LOST_AT=metric"}, folder.path());
  CAPTURE(ended.out);
  CHECK(ended.code == 0);
  const auto ends = ends_in(ended.out);
  REQUIRE(ends.size() == 2);
  CHECK_THAT(ends, Each(ContainsText("total finite")));
}

}  // namespace ddp
