// The whole state of models that are cut, gathered on a rank and loaded on other cuts.
#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/tensor/cut_model.h"
#include "support/live_bytes.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

/// Parameters and a buffer of which each rank has a range of the elements, all in one row: what
/// fully sharded modules have. A wrapper, whose name is in no layout, lies around each of them.
struct FlatModelImpl : torch::nn::Module, ddp::ShardedModule {
  struct Inner : torch::nn::Module {};
  struct Wrapper : torch::nn::Module {};

  FlatModelImpl(ddp::ProcessGroup ranks, uint64_t seed)
      : group(std::move(ranks)),
        list(register_module("blocks", std::make_shared<torch::nn::Module>())) {
    const auto whole = whole_values(seed);
    int64_t elements = 0;
    for (const auto& item : whole) elements += item.value().numel();
    const auto shard = (elements + group->getSize() - 1) / group->getSize();
    const auto begin = shard * group->getRank();
    int64_t at = 0;
    for (const auto& item : whole) {
      const auto count = item.value().numel();
      const auto first = std::clamp<int64_t>(begin - at, 0, count);
      const auto last = std::clamp<int64_t>(begin + shard - at, 0, count);
      add(item.key(), item.value(), first, last);
      at += count;
    }
  }

  static Dict whole_values(uint64_t seed) {
    Dict whole;
    whole.insert("blocks.0.weight", draw_values({5, 4}, seed));
    whole.insert("blocks.0.bias", draw_values({1}, seed + 1));
    whole.insert("blocks.1.weight", draw_values({2, 3, 7}, seed + 2));
    whole.insert("blocks.1.bias", draw_values({}, seed + 3));
    return whole;
  }

  void add(const std::string& name, const at::Tensor& whole, int64_t first, int64_t last) {
    const auto block = name.substr(0, name.rfind('.'));
    if (blocks.count(block) == 0) {
      const auto wrapper = std::make_shared<Wrapper>();
      list->register_module(block.substr(7), wrapper);
      blocks[block] = wrapper->register_module("module", std::make_shared<Inner>());
      blocks[block]->register_buffer("mean", torch::full({2}, double(blocks.size())));
    }
    const auto local = whole.reshape({-1}).narrow(0, first, last - first).clone();
    ddp::ParameterLayout layout;
    layout.name = name;
    layout.sizes = whole.sizes().vec();
    layout.dtype = whole.scalar_type();
    layout.local = blocks[block]->register_parameter(name.substr(block.size() + 1), local);
    const std::vector<int64_t> front(layout.sizes.size(), 0);
    layout.boxes = ddp::boxes_of({front, layout.sizes}, first, last);
    layout.sharded_over = {group};
    all.push_back(std::move(layout));
  }

  std::vector<ddp::ParameterLayout> layouts() override { return all; }

  ddp::ProcessGroup group;
  std::shared_ptr<torch::nn::Module> list;
  std::map<std::string, std::shared_ptr<torch::nn::Module>> blocks;
  std::vector<ddp::ParameterLayout> all;
};
TORCH_MODULE(FlatModel);

bool are_same(const Dict& a, const Dict& b) {
  return a.keys() == b.keys() && std::all_of(a.begin(), a.end(), [&](const auto& item) {
           return torch::equal(item.value(), b[item.key()]);
         });
}

}  // namespace

TEST_CASE("a cut model's whole state is gathered", "[parallel][full_state][ranks]") {
  const int size = GENERATE(1, 2, 4);
  const int to = GENERATE(0, 1);
  CAPTURE(size, to);
  const auto dicts = run_ranks<Dict>(size, [&](const Rank& self) {
    const CutModel model(WholeModel(5), self.group);
    return ddp::full_state_dict(model, to % size, self.group);
  });
  const auto whole = WholeModel(5)->named_parameters();
  for (int rank = 0; rank < size; ++rank) {
    const auto& dict = dicts[static_cast<size_t>(rank)];
    if (rank != to % size) {
      CHECK(dict.is_empty());
      continue;
    }
    CHECK(dict.size() == whole.size());
    for (const auto& item : dict) {
      CAPTURE(item.key());
      CHECK(item.value().is_cpu());
      CHECK_FALSE(item.value().requires_grad());
      CHECK(torch::equal(item.value(), whole[name_in_whole(item.key())]));
    }
  }
}

TEST_CASE("a whole state loads on any number of ranks", "[parallel][full_state][ranks]") {
  const int from = GENERATE(1, 2, 4);
  const int to = GENERATE(1, 2, 4);
  CAPTURE(from, to);
  const TemporaryFolder folder;
  const auto saved = run_ranks<Dict>(from, [&](const Rank& self) {
    const CutModel model(WholeModel(5), self.group);
    return ddp::full_state_dict(model, 0, self.group);
  })[0];
  ddp::save_state_dict(saved, folder.file("model.pt"));
  ddp::save_safetensors(saved, folder.file("model.safetensors"));
  std::ofstream(folder.file("model.safetensors.index.json")) << [&] {
    std::string map;
    for (const auto& name : saved.keys()) {
      map += (map.empty() ? "\"" : ", \"") + name + "\": \"model.safetensors\"";
    }
    return "{\"weight_map\": {" + map + "}}";
  }();
  const auto distances = run_ranks<double>(to, [&](const Rank& self) {
    double largest = 0;
    const auto load = [&](const auto& file_or_dict) {
      CutModel model(WholeModel(99), self.group);
      if (distance_from_whole(*model, WholeModel(5)) < 0.1) largest = 1;
      ddp::load_full_state_dict(model, file_or_dict, self.group);
      largest = std::max(largest, distance_from_whole(*model, WholeModel(5)));
    };
    load(self.rank == 0 ? saved : Dict());
    for (const auto* file : {"model.pt", "model.safetensors", "model.safetensors.index.json"}) {
      load(folder.file(file));
    }
    return largest;
  });
  for (const auto distance : distances) CHECK(distance == 0);
}

TEST_CASE("flat ranges of parameters are gathered and loaded", "[parallel][full_state][ranks]") {
  const int from = GENERATE(1, 2, 3, 4);
  const int to = GENERATE(1, 3);
  CAPTURE(from, to);
  const TemporaryFolder folder;
  const auto saved = run_ranks<Dict>(from, [&](const Rank& self) {
    FlatModel model(self.group, 7);
    ddp::Checkpointer checkpointer(
        folder.path(), ddp::CheckpointerOptions().process_group(self.group).background(false));
    if (from > 1) checkpointer.add("model", model).save(1);
    return ddp::full_state_dict(model, 0, self.group);
  })[0];
  const auto whole = FlatModelImpl::whole_values(7);
  CHECK(saved.size() == whole.size() + 2);
  for (const auto& item : whole) CHECK(torch::equal(saved[item.key()], item.value()));
  // The buffers are below the same wrappers as the parameters.
  CHECK(torch::equal(saved["blocks.1.mean"], torch::full({2}, 2.0)));
  ddp::save_safetensors(saved, folder.file("model.safetensors"));
  const auto loaded = run_ranks<std::vector<Dict>>(to, [&](const Rank& self) {
    std::vector<Dict> dicts;
    const auto take = [&](const auto& load) {
      FlatModel model(self.group, 50);
      load(model);
      dicts.push_back(ddp::full_state_dict(model, 0, self.group));
    };
    take([&](FlatModel& model) { ddp::load_full_state_dict(model, saved, self.group); });
    take([&](FlatModel& model) {
      ddp::load_full_state_dict(model, folder.file("model.safetensors"), self.group);
    });
    if (from > 1 && to > 1) {
      take([&](FlatModel& model) {
        ddp::Checkpointer checkpointer(
            folder.path(), ddp::CheckpointerOptions().process_group(self.group));
        checkpointer.add("model", model).load(1);
      });
    }
    return dicts;
  })[0];
  for (const auto& dict : loaded) CHECK(are_same(dict, saved));
  if (from > 1) {
    ddp::consolidate_checkpoint(folder.path(), 1, folder.file("one.safetensors"));
    const auto one = ddp::load_safetensors(folder.file("one.safetensors"));
    CHECK(one.size() == saved.size());
    for (const auto& item : saved) CHECK(torch::equal(one[item.key()], item.value()));
  }
}

TEST_CASE("of replicas the first rank's values count", "[parallel][full_state][ranks]") {
  const auto dicts = run_ranks<Dict>(4, [](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    ddp::DistributedDataParallel<CutModel> model(
        CutModel(WholeModel(5), mesh.group("tp")),
        ddp::DistributedDataParallelOptions().process_group(mesh.group("dp")));
    if (mesh.rank("dp") == 1) {
      const torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.add_(1);
    }
    return ddp::full_state_dict(model, 3, self.group);
  });
  const auto whole = WholeModel(5)->named_parameters();
  CHECK(dicts[0].is_empty());
  CHECK(dicts[3].size() == whole.size());
  for (const auto& item : dicts[3]) {
    CHECK(torch::equal(item.value(), whole[name_in_whole(item.key())]));
  }
}

TEST_CASE(
    "buffers and shared parameters have each of their names", "[parallel][full_state][ranks]") {
  struct Tied : torch::nn::Module {
    Tied() {
      first = register_module("first", torch::nn::Linear(2, 2));
      norm = register_module("norm", torch::nn::BatchNorm1d(2));
      auto shared = register_module("shared", std::make_shared<torch::nn::Module>());
      shared->register_parameter("weight", first->weight);
      shared->register_buffer("mean", norm->running_mean);
    }
    torch::nn::Linear first{nullptr};
    torch::nn::BatchNorm1d norm{nullptr};
  };
  const auto dicts = run_ranks<std::vector<Dict>>(2, [](const Rank& self) {
    Tied tied;
    const torch::NoGradGuard no_grad;
    tied.first->weight.fill_(3);
    tied.norm->running_mean.fill_(self.rank + 4);
    const auto saved = ddp::full_state_dict(tied, 0, self.group);
    auto one_name = Dict();
    for (const auto& item : saved) {
      const bool is_left_out = item.key() == "first.weight" || item.key() == "shared.mean";
      if (!is_left_out) one_name.insert(item.key(), item.value() + 1);
    }
    ddp::load_full_state_dict(tied, one_name, self.group);
    return std::vector<Dict>{saved, ddp::full_state_dict(tied, 0, self.group)};
  })[0];
  const std::vector<std::string> names{
      "first.weight",
      "first.bias",
      "norm.weight",
      "norm.bias",
      "norm.running_mean",
      "norm.running_var",
      "norm.num_batches_tracked",
      "shared.weight",
      "shared.mean"};
  CHECK(dicts[0].keys() == names);
  CHECK(dicts[0]["first.weight"].is_same(dicts[0]["shared.weight"]));
  CHECK(torch::equal(dicts[0]["shared.mean"], torch::full({2}, 4.0F)));
  for (const auto& name : names) CHECK(torch::equal(dicts[1][name], dicts[0][name] + 1));
}

TEST_CASE("values are converted to the model's dtype", "[parallel][full_state][ranks]") {
  const TemporaryFolder folder;
  Dict saved;
  saved.insert("weight", torch::arange(4.0, torch::kBFloat16).view({2, 2}));
  ddp::save_safetensors(saved, folder.file("a.safetensors"));
  const auto values = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    torch::nn::Linear model(torch::nn::LinearOptions(2, 2).bias(false));
    ddp::load_full_state_dict(model, folder.file("a.safetensors"), self.group);
    auto sum = model->weight.detach().clone();
    ddp::load_full_state_dict(model, saved, self.group);
    return sum + model->weight.detach();
  });
  for (const auto& value : values) {
    CHECK(torch::equal(value, 2 * torch::arange(4.0, torch::kFloat).view({2, 2})));
  }
}

TEST_CASE("other ranks need memory for one parameter", "[parallel][full_state][ranks][once]") {
  constexpr int64_t kSide = 128, kLayers = 8, kBytes = kSide * kSide * 8;
  const TemporaryFolder folder;
  struct Peaks {
    int64_t gather = 0, load_dict = 0, load_file = 0;
  };
  // Of both ranks together: backends free on threads of their own.
  PeakOfAllThreads peak;
  const auto peaks = run_ranks<Peaks>(2, [&](const Rank& self) {
    torch::nn::ModuleList layers;
    for (int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(ddp::ColumnParallelLinear(
          ddp::ColumnParallelLinearOptions(kSide, kSide).bias(false).process_group(self.group),
          draw_values({kSide, kSide}, 1), at::Tensor()));
    }
    const auto peak_of = [&](const auto& body) {
      ddp::barrier(self.group);
      int64_t before = 0;
      if (self.rank == 0) {
        peak.reset();
        before = peak.bytes();
      }
      ddp::barrier(self.group);
      body();
      ddp::barrier(self.group);
      return self.rank == 0 ? peak.bytes() - before : 0;
    };
    Peaks all;
    Dict dict;
    all.gather = peak_of([&] { dict = ddp::full_state_dict(layers, 0, self.group); });
    all.load_dict = peak_of([&] { ddp::load_full_state_dict(layers, dict, self.group); });
    if (self.rank == 0) ddp::save_safetensors(dict, folder.file("a.safetensors"));
    all.load_file = peak_of(
        [&] { ddp::load_full_state_dict(layers, folder.file("a.safetensors"), self.group); });
    return all;
  })[0];
  // A backend may still hold some messages, or free those of before.
  CHECK(peaks.gather >= (kLayers - 2) * kBytes);
  CHECK(peaks.gather <= (kLayers + 3) * kBytes);
  CHECK(peaks.load_dict <= 4 * kBytes);
  CHECK(peaks.load_file >= (kLayers - 2) * kBytes);
  CHECK(peaks.load_file <= (kLayers + 1) * kBytes);
}
