// The loop of prepare() beside the same loop written by hand.
#include <ddp/prepare.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/archives.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kEpochs = 2;
constexpr int64_t kSeed = 7;
constexpr double kRate = 0.1;

struct Table : torch::data::datasets::Dataset<Table> {
  explicit Table(size_t samples) : samples(samples) {}
  torch::data::Example<> get(size_t index) override {
    const double angle = static_cast<double>(index);
    return {draw_values({3}, index + 1), torch::full({1}, std::sin(angle), at::kDouble)};
  }
  std::optional<size_t> size() const override { return samples; }

  size_t samples;
};

auto stacked(size_t samples) { return Table(samples).map(torch::data::transforms::Stack<>()); }

/// Sample i is the number i.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(std::optional<size_t> samples) : samples(samples) {}
  torch::data::Example<> get(size_t index) override {
    const auto number = torch::tensor(static_cast<int64_t>(index));
    return {number, number};
  }
  std::optional<size_t> size() const override { return samples; }

  std::optional<size_t> samples;
};

auto numbers(std::optional<size_t> samples) {
  return Numbers(samples).map(torch::data::transforms::Stack<>());
}

torch::nn::Sequential make_holder() {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Tanh(), torch::nn::Linear(4, 1));
  net->to(at::kDouble);
  set_waves(*net);
  return net;
}

struct Curve : torch::nn::Module {
  Curve() {
    register_module("layer", layer);
    to(at::kDouble);
    set_waves(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(layer(x)); }

  torch::nn::Linear layer{3, 1};
};

torch::jit::Module make_script() {
  torch::jit::Module net("Net");
  net.register_parameter("weight", (at::arange(3, at::kDouble) / 3).requires_grad_(), false);
  net.register_parameter("bias", at::ones({1}, at::kDouble).requires_grad_(), false);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.define(R"(
    def forward(self, x):
      return (x * self.weight).sum(1, keepdim=True) + self.bias
  )");
  return net;
}

template <typename M>
at::Tensor output_of(DistributedDataParallel<M>& model, const at::Tensor& x) {
  if constexpr (std::is_same_v<M, torch::jit::Module>) {
    return model->forward({x}).toTensor();
  } else {
    return model->forward(x);
  }
}

template <typename M>
Tensors parameters_of(const M& net) {
  Tensors parameters;
  if constexpr (std::is_same_v<M, torch::jit::Module>) {
    for (const auto& p : net.parameters()) parameters.push_back(p);
  } else {
    parameters = net->parameters();
  }
  return parameters;
}

torch::optim::SGDOptions sgd() { return torch::optim::SGDOptions(kRate).momentum(0.9); }

struct Settings {
  size_t samples = 25;
  int64_t batch_size = 6;
  int64_t accumulate = 1;
  std::optional<double> max_norm = {};
  int64_t workers = 0;
  bool drop_last = false;
  bool clears_after_step = false;
};

PrepareOptions options_of(const Rank& self, const Settings& settings = {}) {
  return PrepareOptions()
      .batch_size(settings.batch_size)
      .accumulate(settings.accumulate)
      .max_norm(settings.max_norm)
      .workers(settings.workers)
      .drop_last(settings.drop_last)
      .seed(kSeed)
      .process_group(self.group);
}

struct Trained {
  std::vector<double> losses;
  Tensors parameters;
  int64_t steps = 0;
};

/// Whether both ways of `run_ranks` have the same bits on every rank.
bool are_same(const std::vector<Trained>& a, const std::vector<Trained>& b) {
  bool same = a.size() == b.size() && !a.empty();
  for (size_t rank = 0; same && rank < a.size(); ++rank) {
    same = !a[rank].losses.empty() && a[rank].losses == b[rank].losses &&
           a[rank].steps == b[rank].steps && all_equal(a[rank].parameters, b[rank].parameters);
  }
  return same;
}

/// \param accumulate  divides the number of batches.
template <typename Model, typename Optimizer, typename Clip>
Trained train_by_hand(
    const Rank& self, const Settings& settings, Model& model, Optimizer& optimizer,
    const Clip& clip) {
  DistributedSampler sampler(
      settings.samples,
      DistributedSamplerOptions().num_replicas(self.size).rank(self.rank).seed(kSeed).drop_last(
          settings.drop_last));
  const auto loader = torch::data::make_data_loader(
      stacked(settings.samples), sampler,
      torch::data::DataLoaderOptions(static_cast<size_t>(settings.batch_size / self.size))
          .drop_last(settings.drop_last));
  Trained trained;
  int64_t batches = 0;
  for (size_t epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      const bool begins = batches % settings.accumulate == 0;
      const bool ends = ++batches % settings.accumulate == 0;
      if (begins) ddp::zero_grad(optimizer);
      std::unique_ptr<NoSyncGuard> no_sync;
      if (!ends) no_sync.reset(new NoSyncGuard(model->no_sync()));
      const auto loss = torch::mse_loss(output_of(model, batch.data), batch.target);
      (loss / settings.accumulate).backward();
      trained.losses.push_back(ddp::average(loss.template item<double>(), self.group));
      if (!ends) continue;
      clip();
      optimizer.step();
      ++trained.steps;
    }
  }
  trained.parameters = copies_of(model->parameters());
  return trained;
}

template <typename M>
Trained train_by_hand(const Rank& self, const Settings& settings, const M& net) {
  DistributedDataParallel<M> model(net, in(self));
  torch::optim::SGD optimizer(model->parameters(), sgd());
  return train_by_hand(self, settings, model, optimizer, [&] {
    if (settings.max_norm) clip_grad_norm_(*model, *settings.max_norm);
  });
}

template <typename Run>
Trained train_run(const Settings& settings, Run run) {
  Trained trained;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& batch : run.loader(epoch)) {
      if (!settings.clears_after_step) run.zero_grad();
      const auto loss = torch::mse_loss(output_of(run.model(), batch.data), batch.target);
      run.backward(loss);
      trained.steps += run.step() ? 1 : 0;
      if (settings.clears_after_step) run.zero_grad();
      trained.losses.push_back(run.average(loss.template item<double>()));
    }
  }
  if (trained.steps != kEpochs * run.steps_per_epoch()) throw std::runtime_error("other steps");
  run.model()->check_replicas();
  trained.parameters = copies_of(run.model()->parameters());
  return trained;
}

template <typename M>
Trained train_prepared(const Rank& self, const Settings& settings, const M& net) {
  torch::optim::SGD optimizer(parameters_of(net), sgd());
  return train_run(
      settings, prepare(net, optimizer, stacked(settings.samples), options_of(self, settings)));
}

template <typename MakeNet>
bool is_loop_by_hand(int ranks, const Settings& settings, const MakeNet& make_net) {
  const auto by_hand = run_ranks<Trained>(
      ranks, [&](const Rank& self) { return train_by_hand(self, settings, make_net()); });
  const auto prepared = run_ranks<Trained>(
      ranks, [&](const Rank& self) { return train_prepared(self, settings, make_net()); });
  return are_same(by_hand, prepared);
}

/// A prepared loop over numbers, whose net is not trained.
struct Counting {
  using Data = decltype(numbers({}));

  Counting(
      const Rank& self, std::optional<size_t> samples, const Settings& settings = {},
      bool shuffles = true)
      : run(prepare(
            net, optimizer, numbers(samples), options_of(self, settings).shuffle(shuffles))) {}

  /// What gather_for_metrics() returns in the batches of an epoch, one after the other.
  at::Tensor gathered(int64_t epoch) {
    Tensors all{at::empty({0}, at::kLong)};
    for (auto& batch : run.loader(epoch)) all.push_back(run.gather_for_metrics(batch.data));
    return at::cat(all);
  }

  torch::nn::Linear net = make_linear();
  torch::optim::SGD optimizer{net->parameters(), sgd()};
  Prepared<torch::nn::Linear, Data> run;
};

}  // namespace

TEST_CASE("a prepared loop has the bits of one by hand", "[ranks][prepare]") {
  const int ranks = GENERATE(1, 2, 3);
  Settings settings;
  settings.samples = GENERATE(size_t{23}, size_t{25});  // the last batch is whole, or of one row
  settings.workers = GENERATE(0, 2);
  settings.drop_last = GENERATE(false, true);
  CAPTURE(ranks, settings.samples, settings.workers, settings.drop_last);
  CHECK(is_loop_by_hand(ranks, settings, make_holder));
}

TEST_CASE("a prepared loop clips", "[ranks][prepare]") {
  Settings settings;
  settings.max_norm = 0.05;
  CHECK(is_loop_by_hand(2, settings, make_holder));
  const auto norms = run_ranks<double>(2, [&](const Rank& self) {
    auto net = make_holder();
    torch::optim::SGD optimizer(net->parameters(), sgd());
    auto run = prepare(net, optimizer, stacked(12), options_of(self, settings));
    for (auto& batch : run.loader(0)) {
      run.zero_grad();
      run.backward(100 * torch::mse_loss(output_of(run.model(), batch.data), batch.target));
      run.step();
    }
    return torch::nn::utils::clip_grad_norm_(net->parameters(), 1e9);
  });
  for (const double norm : norms) CHECK(norm == Approx(0.05).epsilon(1e-3));
}

TEST_CASE("shared pointers and TorchScript modules are prepared", "[ranks][prepare]") {
  CHECK(is_loop_by_hand(2, {}, [] { return std::make_shared<Curve>(); }));
  CHECK(is_loop_by_hand(2, {}, make_script));
}

TEST_CASE("a wrapped model is prepared with its sharded optimizer", "[ranks][prepare]") {
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  Settings settings;
  settings.max_norm = 0.05;
  const auto by_hand = run_ranks<Trained>(2, [&](const Rank& self) {
    DistributedDataParallel model(make_holder(), in(self));
    Zero optimizer(model, sgd(), ZeroOptions().stage(2));
    return train_by_hand(
        self, settings, model, optimizer, [&] { clip_grad_norm_(optimizer, *settings.max_norm); });
  });
  const auto prepared = run_ranks<Trained>(2, [&](const Rank& self) {
    DistributedDataParallel model(make_holder(), in(self));
    Zero optimizer(model, sgd(), ZeroOptions().stage(2));
    return train_run(
        settings, prepare(model, optimizer, stacked(settings.samples), options_of(self, settings)));
  });
  CHECK(are_same(by_hand, prepared));
}

TEST_CASE("an accumulating loop has the bits of one by hand", "[ranks][prepare]") {
  const int ranks = GENERATE(2, 3);
  Settings settings;
  settings.samples = 24;  // whole steps only
  settings.accumulate = 2;
  settings.workers = GENERATE(0, 2);
  settings.clears_after_step = GENERATE(false, true);
  CAPTURE(ranks, settings.workers, settings.clears_after_step);
  CHECK(is_loop_by_hand(ranks, settings, make_holder));
}

TEST_CASE("accumulated batches train as one large batch", "[ranks][prepare]") {
  const int ranks = GENERATE(2, 3);
  Settings small;
  small.samples = 33;  // the last step has fewer samples, in batches of 2, 2 and 1
  small.batch_size = 2 * ranks;
  small.accumulate = 3;
  Settings large = small;
  large.batch_size = 6 * ranks;
  large.accumulate = 1;
  const auto trained = [&](const Settings& settings) {
    return run_ranks<Trained>(
        ranks, [&](const Rank& self) { return train_prepared(self, settings, make_holder()); });
  };
  const auto in_parts = trained(small);
  const auto at_once = trained(large);
  for (int rank = 0; rank < ranks; ++rank) {
    CHECK(in_parts[rank].steps == at_once[rank].steps);
    CHECK(largest_difference(in_parts[rank].parameters, at_once[rank].parameters) < 1e-13);
  }
}

TEST_CASE("batches weigh by their share of a step's samples", "[ranks][prepare]") {
  Settings settings;
  settings.batch_size = 4;
  settings.accumulate = 2;
  settings.drop_last = GENERATE(false, true);  // batches of 2, 2, 2 and 1; of 2, 2 and 2
  CAPTURE(settings.drop_last);
  const auto results = run_ranks<std::vector<double>>(2, [&](const Rank& self) {
    Counting counting(self, 14, settings);
    auto& run = counting.run;
    std::vector<double> gradients;
    for (auto& batch : run.loader(0)) {
      (void)batch;
      run.zero_grad();
      run.backward(run.model()->forward(at::ones({1, 1})).sum());
      gradients.push_back(counting.net->weight.grad().item<double>());
    }
    return gradients;
  });
  for (const auto& gradients : results) {
    REQUIRE(gradients.size() == (settings.drop_last ? 3U : 4U));
    CHECK(gradients[0] == Approx(0.5));
    CHECK(gradients[1] == Approx(1.0));
    CHECK(gradients[2] == Approx(settings.drop_last ? 1.0 : 2.0 / 3));
    CHECK(gradients.back() == Approx(1.0));
  }
}

TEST_CASE("gather_for_metrics returns every sample once", "[ranks][prepare]") {
  const int ranks = GENERATE(1, 2, 3);
  const int64_t samples = GENERATE(1, 2, 5, 12, 13, 25);
  Settings settings;
  settings.batch_size = 2 * ranks;
  settings.workers = GENERATE(0, 2);
  const bool shuffles = GENERATE(true, false);
  CAPTURE(ranks, samples, settings.workers, shuffles);
  const auto gathered = run_ranks<Tensors>(ranks, [&](const Rank& self) {
    Counting counting(self, static_cast<size_t>(samples), settings, shuffles);
    return Tensors{counting.gathered(0), counting.gathered(1)};
  });
  const auto all = at::arange(samples, at::kLong);
  for (const auto& epochs : gathered) {
    CHECK(all_equal(epochs, gathered[0]));
    for (const auto& epoch : epochs) {
      CHECK(at::equal(shuffles ? std::get<0>(epoch.sort()) : epoch, all));
    }
  }
}

TEST_CASE("gather_for_metrics with drop_last has whole batches", "[ranks][prepare]") {
  const int ranks = GENERATE(2, 3);
  Settings settings;
  settings.batch_size = 2 * ranks;
  settings.drop_last = true;
  const auto gathered = run_ranks<at::Tensor>(ranks, [&](const Rank& self) {
    Counting counting(self, 14, settings);
    return counting.gathered(0);
  });
  for (const auto& numbers : gathered) {
    CHECK(numbers.size(0) == 12);
    CHECK(std::get<0>(at::_unique(numbers)).size(0) == 12);
  }
}

TEST_CASE("gather_for_metrics takes rows of any shape and dtype", "[ranks][prepare]") {
  const auto gathered = run_ranks<Tensors>(2, [](const Rank& self) {
    auto net = make_linear();
    torch::optim::SGD optimizer(net->parameters(), sgd());
    Settings settings;
    settings.batch_size = 8;
    // Without a Stack, a batch is a list of samples.
    auto run =
        prepare(net, optimizer, Numbers(size_t{7}), options_of(self, settings).shuffle(false));
    Tensors all;
    for (auto& batch : run.loader(0)) {
      Tensors rows;
      for (const auto& sample : batch) rows.push_back(sample.data.to(at::kDouble));
      const auto column = at::stack(rows).unsqueeze(1).requires_grad_();
      all.push_back(run.gather_for_metrics(column.expand({-1, 2})));
      all.push_back(run.gather_for_metrics(column.flatten() > 2));
    }
    return all;
  });
  const auto all = at::arange(7, at::kDouble);
  for (const auto& tensors : gathered) {
    CHECK(all_equal(tensors, {all.unsqueeze(1).expand({-1, 2}), all > 2}));
    CHECK_FALSE(tensors[0].requires_grad());
  }
}

TEST_CASE("a loop that ends early leaves nothing behind", "[ranks][prepare]") {
  Settings settings;
  settings.accumulate = 2;
  settings.workers = GENERATE(0, 2);
  CAPTURE(settings.workers);
  struct Result {
    at::Tensor left, averaged, next_epoch;
    int inside = -1, outside = -1;
  };
  const auto results = run_ranks<Result>(2, [&](const Rank& self) {
    Counting counting(self, 13, settings, /*shuffles=*/false);
    auto& run = counting.run;
    Result result;
    const auto forward = [&] {
      return run.model()->forward(at::full({1, 1}, self.rank + 1.0)).sum();
    };
    for (auto& batch : run.loader(0)) {
      (void)batch;
      run.zero_grad();
      run.backward(forward());
      result.inside = run.ends_step() ? 1 : 0;
      result.left = counting.net->weight.grad().clone();
      break;
    }
    result.outside = run.ends_step() ? 1 : 0;
    run.zero_grad();
    forward().backward();
    result.averaged = counting.net->weight.grad().clone();
    result.next_epoch = counting.gathered(1);
    return result;
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(results[rank].left.item<double>() == (rank + 1) / 2.0);  // of this rank alone
    CHECK(results[rank].averaged.item<double>() == 1.5);
    CHECK(results[rank].inside == 0);
    CHECK(results[rank].outside == 0);
    CHECK(at::equal(results[rank].next_epoch, at::arange(13, at::kLong)));
  }
}

TEST_CASE("gradients of an unfinished step are not those of the next one", "[ranks][prepare]") {
  Settings settings;
  settings.accumulate = 2;
  const auto results = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    Counting counting(self, 13, settings, /*shuffles=*/false);
    auto& run = counting.run;
    at::Tensor of_step;
    for (const int epoch : {0, 1}) {
      int batches = 0;
      for (auto& batch : run.loader(epoch)) {
        (void)batch;
        run.backward(run.model()->forward(at::full({1, 1}, self.rank + 1.0)).sum());
        if (run.ends_step()) of_step = counting.net->weight.grad().clone();
        run.step();
        run.zero_grad();
        ++batches;
        if (epoch == 0 && batches == 3) break;
        if (epoch == 1 && batches == 2) break;
      }
    }
    return of_step;
  });
  for (const auto& gradient : results) CHECK(gradient.item<double>() == 1.5);
}

TEST_CASE("a prepared loop goes on at a saved position", "[ranks][prepare]") {
  Settings settings;
  settings.batch_size = 4;
  settings.workers = GENERATE(0, 2);
  CAPTURE(settings.workers);
  constexpr int64_t kEpoch = 3;
  const auto results = run_ranks<Tensors>(2, [&](const Rank& self) {
    Counting whole(self, 13, settings);
    std::string position;
    Tensors parts;
    {
      Counting first(self, 13, settings);
      for (auto& batch : first.run.loader(kEpoch)) {
        parts.push_back(first.run.gather_for_metrics(batch.data));
        if (parts.size() < 2) continue;
        position = bytes_of_archive(first.run.sampler());
        break;
      }
    }
    Counting second(self, 13, settings);
    auto archive = archive_of(position);
    second.run.sampler().load(archive);
    parts.push_back(second.gathered(static_cast<int64_t>(second.run.sampler().epoch())));
    return Tensors{whole.gathered(kEpoch), at::cat(parts)};
  });
  for (const auto& orders : results) {
    CHECK(orders[0].size(0) == 13);
    CHECK(at::equal(orders[0], orders[1]));
  }
}

TEST_CASE("the seed is that of the order and of seed_all", "[ranks][prepare]") {
  // One rank: ranks that are threads share a generator.
  const auto drawn = run_ranks<Tensors>(1, [](const Rank& self) {
    torch::manual_seed(3);
    Counting counting(self, 13);
    const auto prepared = at::rand({4});
    seed_all(kSeed, self.group);
    const auto by_hand = at::rand({4});
    torch::manual_seed(3);
    const auto expected = at::rand({4});
    torch::manual_seed(3);
    auto net = make_linear();
    torch::optim::SGD optimizer(net->parameters(), sgd());
    torch::manual_seed(3);
    prepare(net, optimizer, numbers(13), options_of(self).seed(std::nullopt));
    return Tensors{prepared, by_hand, at::rand({4}), expected};
  });
  CHECK(at::equal(drawn[0][0], drawn[0][1]));
  CHECK(at::equal(drawn[0][2], drawn[0][3]));
}

TEST_CASE("a prepared run averages, and knows its main rank", "[ranks][prepare]") {
  const auto results = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    Counting counting(self, 13);
    auto run = std::move(counting.run);
    const auto means = run.average({{"a", self.rank + 0.0}, {"b", 3.0}});
    return std::vector<double>{
        run.average(self.rank * 2.0), means.at("a"), means.at("b"), run.is_main() ? 1.0 : 0.0};
  });
  CHECK(results[0] == std::vector<double>{1, 0.5, 3, 1});
  CHECK(results[1] == std::vector<double>{1, 0.5, 3, 0});
}

TEST_CASE("rank 0 saves the plain net", "[ranks][prepare]") {
  const TemporaryFolder folder;
  const auto equal = run_ranks<int>(2, [&](const Rank& self) {
    const auto trained = [&](const auto& net, const std::string& path) {
      torch::optim::SGD optimizer(parameters_of(net), sgd());
      auto run = prepare(net, optimizer, stacked(12), options_of(self));
      for (auto& batch : run.loader(0)) {
        run.zero_grad();
        run.backward(torch::mse_loss(output_of(run.model(), batch.data), batch.target));
        run.step();
      }
      run.save(path);
      return parameters_of(net);
    };
    const auto of_holder = trained(make_holder(), folder.file("net.pt"));
    const auto of_script = trained(make_script(), folder.file("script.pt"));
    auto holder = make_holder();
    torch::load(holder, folder.file("net.pt"));
    const auto script = torch::jit::load(folder.file("script.pt"));
    return all_equal(holder->parameters(), of_holder) && !of_script.empty() &&
                   all_equal(parameters_of(script), of_script) &&
                   !all_equal(of_holder, make_holder()->parameters())
               ? 1
               : 0;
  });
  CHECK(equal == std::vector<int>{1, 1});
  const auto errors = errors_of_ranks(
      2, [&](const Rank& self) { Counting(self, 13).run.save(folder.file("missing/net.pt")); });
  CHECK(!errors[0].empty());
  CHECK_THAT(errors[1], ContainsText("rank 0"));
}

TEST_CASE("options that ranks cannot train with are errors of all", "[ranks][prepare][errors]") {
  using Change = std::function<void(PrepareOptions & options, int rank)>;
  struct Case {
    Change change;
    std::string error;
  };
  const auto [change, expected] = GENERATE(values<Case>(
      {{[](auto& o, int) { o.batch_size(7); },
        "prepare: expected a batch_size that the ranks can share evenly, got 7 samples for 2 "
        "ranks. It counts the samples of all ranks together: set it to 6 or 8,"},
       {[](auto& o, int) { o.batch_size(1); },
        "got 1 samples for 2 ranks. It counts the samples "
        "of all ranks together: set it to 2,"},
       {[](auto& o, int) { o.batch_size(0); }, "prepare: expected batch_size >= 1, got 0"},
       {[](auto& o, int) { o.accumulate(0); }, "prepare: expected accumulate >= 1, got 0"},
       {[](auto& o, int) { o.max_norm(0); }, "prepare: expected max_norm > 0, got 0"},
       {[](auto& o, int rank) { o.workers(-rank); }, "prepare: expected workers >= 0, got -1"},
       {[](auto& o, int rank) { o.batch_size(4 + 2 * rank); },
        "got batch_size=4 on rank 0 and batch_size=6 on rank 1 of 2. Pass the same on every rank"},
       {[](auto& o, int rank) {
          if (rank == 1) o.max_norm(1.0);
        },
        "got max_norm=unset on rank 0 and max_norm=1 on rank 1 of 2"}}));
  const auto error = error_of_all(2, [&change = change](const Rank& self) {
    auto net = make_linear();
    torch::optim::SGD optimizer(net->parameters(), sgd());
    auto options = options_of(self);
    change(options, self.rank);
    prepare(net, optimizer, numbers(13), options);
  });
  CHECK_THAT(error, ContainsText(expected));
}

TEST_CASE("data sets and optimizers that do not fit are errors", "[ranks][prepare][errors]") {
  const auto error_with = [](const auto& size_on, bool is_own) {
    return error_of_all(2, [&](const Rank& self) {
      auto net = make_linear();
      torch::optim::SGD optimizer((is_own ? net : make_linear())->parameters(), sgd());
      prepare(net, optimizer, numbers(size_on(self.rank)), options_of(self));
    });
  };
  const auto of_13 = [](int) { return std::optional<size_t>(13); };
  CHECK(error_with(of_13, true) == "");
  CHECK_THAT(
      error_with(of_13, false),
      ContainsText("prepare: expected an optimizer of the net's parameters, got one that steps "
                   "none of them. Make it of net->parameters()."));
  CHECK_THAT(
      error_with([](int) { return std::optional<size_t>(); }, true),
      ContainsText("prepare: expected a data set that knows its size"));
  CHECK_THAT(
      error_with([](int rank) { return std::optional<size_t>(13 + rank); }, true),
      ContainsText("got size of the data set=13 on rank 0 and size of the data set=14 on rank 1"));
}

TEST_CASE("calls outside of a prepared loop are errors", "[ranks][prepare][errors]") {
  using Run = decltype(Counting::run);
  const auto error_with = [](const std::function<void(Run&)>& call) {
    return error_of_all(2, [&](const Rank& self) {
      Settings settings;
      settings.accumulate = 2;
      Counting counting(self, 13, settings);
      for (auto& batch : counting.run.loader(0)) (void)batch;
      call(counting.run);
    });
  };
  const auto outside = ContainsText("expected a call in a loop over loader(), whose batches it ");
  CHECK_THAT(
      error_with([](Run& run) { run.gather_for_metrics(at::ones({3})); }),
      ContainsText("Prepared::gather_for_metrics: ") && outside);
  CHECK_THAT(
      error_with([](Run& run) {
        run.backward(run.model()->forward(at::ones({1, 1})).sum());
      }),
      ContainsText("Prepared::backward: ") && outside);
  CHECK_THAT(error_with([](Run& run) { run.step(); }), ContainsText("Prepared::step: ") && outside);
  CHECK_THAT(
      error_with([](Run& run) {
        for (auto& batch : run.loader(-1)) (void)batch;
      }),
      ContainsText("Prepared::loader: expected an epoch >= 0, got -1"));
  CHECK_THAT(
      error_with([](Run& run) {
        for (auto& batch : run.loader(1)) run.gather_for_metrics(batch.data.sum());
      }),
      ContainsText("Prepared::gather_for_metrics: expected a tensor with a row for each of this "
                   "rank's 3 samples, got one of sizes []"));
}

}  // namespace ddp
