// Units over "dp" of layers that are cut over "tp", beside one process with the whole model and the
// whole batch.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/cut_parameters.h>

#include "parallel/tensor/cut_model.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

constexpr int64_t kWords = 8, kFeatures = 6, kInnerFeatures = 12, kLayers = 2, kBatch = 8;
constexpr double kMaxNorm = 0.2;

torch::nn::LayerNorm normalization() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures}));
}

/// A residual layer. \tparam Up, Down  linear layers, whole or cut.
template <typename Up, typename Down>
struct LayerImpl : torch::nn::Module {
  LayerImpl(torch::nn::LayerNorm normalization, Up up_layer, Down down_layer)
      : norm(register_module("norm", std::move(normalization))),
        up(register_module("up", std::move(up_layer))),
        down(register_module("down", std::move(down_layer))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(torch::gelu(up->forward(norm->forward(x))));
  }
  torch::nn::LayerNorm norm;
  Up up;
  Down down;
};

using WholeLayer = LayerImpl<torch::nn::Linear, torch::nn::Linear>;
using CutLayer = LayerImpl<ddp::ColumnParallelLinear, ddp::RowParallelLinear>;
using CutUnit = FullyShardedDataParallel<std::shared_ptr<CutLayer>>;

struct WholeWords : torch::nn::Module {
  explicit WholeWords(uint64_t seed = 1) {
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(std::make_shared<WholeLayer>(
          normalization(), torch::nn::Linear(kFeatures, kInnerFeatures),
          torch::nn::Linear(kInnerFeatures, kFeatures)));
      register_module("layer" + std::to_string(i), layers.back());
    }
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(draw_values(p.sizes().vec(), seed++) * 0.4);
  }
  at::Tensor loss(const at::Tensor& tokens) {
    auto x = embedding->forward(tokens);
    for (auto& layer : layers) x = layer->forward(x);
    const auto logits = head->forward(x);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 0).flatten());
  }

  torch::nn::Embedding embedding{
      register_module("embedding", torch::nn::Embedding(kWords, kFeatures))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(kFeatures, kWords))};
  std::vector<std::shared_ptr<WholeLayer>> layers;
};

/// The same, cut over tp, with a unit over dp for each layer.
struct CutWords : torch::nn::Module {
  CutWords(WholeWords& whole, const ddp::DeviceMesh& mesh) : tp(mesh.group("tp")) {
    embedding = register_module(
        "embedding", ddp::VocabParallelEmbedding(
                         ddp::VocabParallelEmbeddingOptions(kWords, kFeatures).process_group(tp),
                         whole.embedding->weight));
    head = register_module(
        "head", ddp::ColumnParallelLinear(
                    ddp::ColumnParallelLinearOptions(kFeatures, kWords).process_group(tp),
                    whole.head->weight, whole.head->bias));
    for (const auto& layer : whole.layers) {
      auto norm = normalization();
      norm->to(torch::kDouble);
      const torch::NoGradGuard no_grad;
      norm->weight.copy_(layer->norm->weight);
      norm->bias.copy_(layer->norm->bias);
      const auto cut = std::make_shared<CutLayer>(
          norm,
          ddp::ColumnParallelLinear(
              ddp::ColumnParallelLinearOptions(kFeatures, kInnerFeatures).process_group(tp),
              layer->up->weight, layer->up->bias),
          ddp::RowParallelLinear(
              ddp::RowParallelLinearOptions(kInnerFeatures, kFeatures).process_group(tp),
              layer->down->weight, layer->down->bias));
      layers.emplace_back(cut, FullyShardedOptions().process_group(mesh.group("dp")));
      register_module("layer" + std::to_string(layers.size() - 1), layers.back());
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding->forward(tokens);
    for (auto& layer : layers) x = layer->forward(x);
    return ddp::vocab_parallel_cross_entropy(
        head->forward(x), tokens.roll(-1, 0), tp,
        ddp::VocabParallelCrossEntropyOptions().num_classes(kWords));
  }

  ddp::ProcessGroup tp;
  ddp::VocabParallelEmbedding embedding = nullptr;
  ddp::ColumnParallelLinear head = nullptr;
  std::vector<CutUnit> layers;
};

torch::optim::SGD stepping(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

at::Tensor words_of(int64_t step) {
  const auto numbers = torch::arange(kTime * kBatch).view({kTime, kBatch});
  return (numbers * numbers + numbers * step + 3 * step).remainder(kWords);
}

/// The whole model after some steps.
WholeWords trained(int64_t steps) {
  WholeWords whole;
  auto optimizer = stepping(whole.parameters());
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    whole.loss(words_of(step)).backward();
    const auto norm = torch::nn::utils::clip_grad_norm_(whole.parameters(), kMaxNorm);
    if (norm <= kMaxNorm) throw std::runtime_error("nothing to clip");
    optimizer.step();
  }
  return whole;
}

/// One rank of a mesh.
struct WordsRun {
  WordsRun(const Rank& self, int64_t dp_size, int64_t tp_size, WholeWords& start)
      : mesh(ddp::init_device_mesh({dp_size, tp_size}, {"dp", "tp"}, self.group)),
        model(
            std::make_shared<CutWords>(start, mesh),
            FullyShardedOptions().process_group(mesh.group("dp"))),
        optimizer(stepping(model->parameters())) {}

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      optimizer.zero_grad();
      const auto parts = words_of(step).chunk(mesh.size("dp"), 1);
      model->forward(parts[static_cast<size_t>(mesh.rank("dp"))]).backward();
      ddp::clip_grad_norm_(*model, kMaxNorm, mesh);
      optimizer.step();
    }
  }

  ddp::DeviceMesh mesh;
  FullyShardedDataParallel<std::shared_ptr<CutWords>> model;
  torch::optim::SGD optimizer;
};

/// The largest distance of this rank's elements from those of a whole model.
double distance_from(const torch::nn::Module& cut, const torch::nn::Module& whole) {
  const auto parameters = whole.named_parameters();
  const auto layouts = ddp::layouts_of(cut);
  if (layouts.size() != parameters.size()) return 1e300;
  double largest = 0;
  for (const auto& layout : layouts) {
    const auto views = ddp::views_of_boxes(layout, layout.local.detach());
    for (size_t i = 0; i < views.size(); ++i) {
      auto box = parameters[layout.name].detach();
      for (size_t d = 0; d < layout.sizes.size(); ++d) {
        box =
            box.narrow(static_cast<int64_t>(d), layout.boxes[i].offset[d], layout.boxes[i].size[d]);
      }
      largest = std::max(largest, (views[i] - box).abs().max().item<double>());
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("units of cut layers train as one process", "[ranks][sharded][cut][many]") {
  using Shape = std::pair<int64_t, int64_t>;  // dp, tp
  const auto whole = trained(3);
  for (const auto& [dp, tp] : {Shape{2, 2}, Shape{4, 1}, Shape{1, 4}, Shape{1, 2}}) {
    CAPTURE(dp, tp);
    const auto distances =
        run_ranks<double>(static_cast<int>(dp * tp), [&, dp = dp, tp = tp](const Rank& self) {
          WholeWords start;
          WordsRun run(self, dp, tp, start);
          run.train(0, 3);
          return distance_from(*run.model, whole);
        });
    for (const auto distance : distances) CHECK(distance < 1e-12);
  }
}

TEST_CASE("units of cut layers load on other meshes", "[ranks][sharded][cut][many]") {
  const TemporaryFolder folder;
  const auto saved_by = [](const Rank& self) {
    return ddp::CheckpointerOptions().process_group(self.group);
  };
  run_ranks<int>(4, [&](const Rank& self) {
    WholeWords start;
    WordsRun run(self, 2, 2, start);
    run.train(0, 3);
    ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
    checkpointer.add("model", run.model).add("optimizer", run.optimizer);
    checkpointer.save(3);
    checkpointer.wait();
    return 0;
  });
  const auto whole = trained(3), next = trained(5);
  const auto check_small = [](const std::vector<std::pair<double, double>>& distances) {
    for (const auto& [loaded, stepped] : distances) {
      CHECK(loaded < 1e-12);
      CHECK(stepped < 1e-12);
    }
  };
  using Shape = std::pair<int64_t, int64_t>;  // dp, tp
  for (const auto& [dp, tp] : {Shape{1, 4}, Shape{4, 1}, Shape{2, 1}, Shape{2, 2}}) {
    CAPTURE(dp, tp);
    const auto load = [&, dp = dp, tp = tp](const Rank& self) {
      WholeWords start(100);
      WordsRun run(self, dp, tp, start);
      run.train(7, 8);  // a state to be replaced
      ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
      checkpointer.add("model", run.model).add("optimizer", run.optimizer);
      TORCH_CHECK(checkpointer.load_latest() == 3);
      const auto loaded = distance_from(*run.model, whole);
      run.train(3, 5);
      return std::pair(loaded, distance_from(*run.model, next));
    };
    check_small(run_ranks<std::pair<double, double>>(static_cast<int>(dp * tp), load));
  }
  // And where nothing is cut.
  check_small(run_ranks<std::pair<double, double>>(1, [&](const Rank& self) {
    WholeWords plain(100);
    auto optimizer = stepping(plain.parameters());
    ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
    checkpointer.add("model", plain).add("optimizer", optimizer);
    TORCH_CHECK(checkpointer.load_latest() == 3);
    const auto loaded = distance_from(plain, whole);
    for (int64_t step = 3; step < 5; ++step) {
      optimizer.zero_grad();
      plain.loss(words_of(step)).backward();
      torch::nn::utils::clip_grad_norm_(plain.parameters(), kMaxNorm);
      optimizer.step();
    }
    return std::pair(loaded, distance_from(plain, next));
  }));
}

TEST_CASE(
    "a unit of attention, tied weights and sequence parallel trains as one process",
    "[ranks][sharded][cut][many]") {
  const Cut cut{GENERATE(false, true)};
  const WholeModel start;
  WholeModel whole;
  auto optimizer = stepping(whole->parameters());
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    whole->loss(tokens_of(step, 4)).backward();
    torch::nn::utils::clip_grad_norm_(whole->parameters(), kMaxNorm);
    optimizer.step();
  }
  const auto distances = run_ranks<double>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    FullyShardedDataParallel model(
        CutModel(start, mesh.group("tp"), cut),
        FullyShardedOptions().process_group(mesh.group("dp")));
    auto own = stepping(model->parameters());
    for (int64_t step = 0; step < 3; ++step) {
      own.zero_grad();
      model->forward(tokens_of(step, 4).chunk(2, 1)[static_cast<size_t>(mesh.rank("dp"))])
          .backward();
      ddp::clip_grad_norm_(*model, kMaxNorm);
      own.step();
    }
    const ddp::SummonFullParams of_dp(*model);
    return distance_from_whole(*model, whole);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}
