// A network whose first and last layer share a table, in one process, and as stages of a pipeline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/text.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"

namespace ddp::testing {

/// An embedding of vectors, and the head with its weight transposed.
struct TableImpl : torch::nn::Module {
  TableImpl()
      : weight(register_parameter("weight", torch::ones({kPipelineWidth, kPipelineWidth}))) {
    draw_parameters(*this, 77);
  }
  at::Tensor forward(const at::Tensor& x, bool is_head) {
    return x.matmul(is_head ? weight : weight.t());
  }
  at::Tensor weight;
};
TORCH_MODULE(Table);

/// The whole network: the table, layers, the table.
struct WholeTied : WholeNet {
  explicit WholeTied(int64_t layers) : WholeNet(layers) {}
  at::Tensor forward(const at::Tensor& x) {
    return table->forward(WholeNet::forward(table->forward(x, false)), true);
  }
  std::vector<at::Tensor> parameters() const {
    auto all = WholeNet::parameters();
    all.push_back(table->weight);
    return all;
  }
  /// By its name in the stages.
  at::Tensor parameter(const std::string& name) const {
    if (name == "table.weight") return table->weight;
    const auto& layer = layers.at(static_cast<size_t>(std::stoi(name.substr(5))));
    return name.back() == 't' ? layer->fc->weight : layer->fc->bias;
  }
  Table table;
};

/// A layer, and the table where it is the first or the last: names are those in the whole network.
///
/// \tparam T  Table, or a unit of it.
template <typename T>
struct TiedStageImpl : torch::nn::Module {
  TiedStageImpl(int64_t k, int64_t stages, const ddp::FullyShardedOptions& options)
      : is_first(k == 0),
        is_last(k + 1 == stages),
        layer(register_module(ddp::str("layer", k), Layer(k))) {
    if (!is_first && !is_last) return;
    if constexpr (std::is_same_v<T, Table>) {
      table = Table();
    } else {
      table = T(Table(), options);
    }
    register_module("table", table);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = layer->forward(is_first ? table->forward(x, false) : x);
    return is_last ? table->forward(y, true) : y;
  }
  bool is_first, is_last;
  Layer layer;
  T table{nullptr};
};

enum class TiedWrapper { None, Replicas, Shards };

struct TiedPlan {
  int pp = 1, dp = 1;
  int64_t chunks = 1;
  TiedWrapper wrapper = TiedWrapper::None;
};

/// A rank's part of it in a mesh of stages and replicas.
struct TiedRun {
  TiedRun(const Rank& self, const TiedPlan& plan)
      : plan(plan),
        mesh(ddp::init_device_mesh({plan.pp, plan.dp}, {"pp", "dp"}, self.group)),
        ends(ddp::new_group({0, plan.pp - 1}, mesh.group("pp"))) {
    if (plan.wrapper == TiedWrapper::Shards) {
      make_stages<ddp::FullyShardedDataParallel<Table>>([](const auto& stage, const auto& options) {
        return ddp::FullyShardedDataParallel(stage, options);
      });
    } else if (plan.wrapper == TiedWrapper::Replicas) {
      make_stages<Table>([](const auto& stage, const auto& options) {
        return ddp::DistributedDataParallel(
            stage, ddp::DistributedDataParallelOptions().process_group(options.process_group()));
      });
    } else {
      make_stages<Table>([](const auto& stage, const auto& /*options*/) { return stage; });
    }
  }

  int64_t stages() const { return plan.pp * plan.chunks; }

  void step(const PipelineBatch& batch) const {
    const auto own = [&](const at::Tensor& t) {
      return t.chunk(plan.dp)[static_cast<size_t>(mesh.rank("dp"))];
    };
    const int stage = mesh.rank("pp");
    pipeline->step(
        stage == 0 ? std::vector<at::Tensor>{own(batch.input)} : std::vector<at::Tensor>{},
        stage + 1 == plan.pp ? own(batch.target) : at::Tensor());
  }

  /// A chunk's module, in its wrapper.
  std::shared_ptr<torch::nn::Module> module(size_t chunk) const {
    return pipeline->children().at(chunk);
  }

  /// How much this rank's elements of the parameters differ from the whole network's.
  double difference_from(const WholeTied& whole) const {
    double largest = 0;
    for (const auto& layout : ddp::layouts_of(*pipeline)) {
      const auto views = ddp::views_of_boxes(layout, layout.local.detach());
      for (size_t i = 0; i < views.size(); ++i) {
        auto expected = whole.parameter(layout.name).detach();
        for (int64_t d = 0; d < expected.dim(); ++d) {
          const auto& [offset, size] = layout.boxes[i];
          expected =
              expected.narrow(d, offset[static_cast<size_t>(d)], size[static_cast<size_t>(d)]);
        }
        largest = std::max(largest, largest_difference({expected}, {views[i]}));
      }
    }
    return largest;
  }

  const TiedPlan plan;
  ddp::DeviceMesh mesh;
  ddp::ProcessGroup ends;
  at::Tensor table;  // where this rank has it
  std::unique_ptr<ddp::PipelineStageBase> pipeline;

 private:
  template <typename T, typename Wrap>
  void make_stages(const Wrap& wrap) {
    const auto options = ddp::FullyShardedOptions().process_group(mesh.group("dp"));
    using Stage = std::shared_ptr<TiedStageImpl<T>>;
    std::vector<decltype(wrap(Stage(), options))> chunks;
    for (int64_t c = 0; c < plan.chunks; ++c) {
      const auto k = c * plan.pp + mesh.rank("pp");
      auto stage = std::make_shared<TiedStageImpl<T>>(k, stages(), options);
      if (!stage->table.is_empty()) table = stage->table->parameters().front();
      chunks.push_back(wrap(stage, options));
    }
    ddp::PipelineOptions pipeline_options;
    pipeline_options.process_group(mesh.group("pp")).microbatches(3);
    if (plan.chunks > 1) pipeline_options.schedule(ddp::PipelineSchedule::Interleaved);
    if (ends) pipeline_options.tied({{table, ends}});
    using Pipeline = ddp::PipelineStage<typename decltype(chunks)::value_type>;
    pipeline = std::make_unique<Pipeline>(
        std::move(chunks), mesh.rank("pp"), plan.pp, pipeline_loss, pipeline_options);
  }
};

}  // namespace ddp::testing
